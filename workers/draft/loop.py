"""A drafter's loop: one thread owns it, answers every commit with a proposal, and drafts on meanwhile.

On a draft worker that is a thread of its own. Beside a target it is the target's, which lets the drafter take
its turn between two steps: they share a processor, and threads would take turns at worse moments.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from workers.draft.drafter import Ask, Drafter
from workers.draft.session import DraftSession
from workers.rpc import messages as m
from workers.tree import TokenTree

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftCounters:
    """What a drafter has done since its start; written by its thread only."""

    proposals: int = 0
    hits: int = 0
    proposals_again: int = 0
    draft_ns: int = 0
    growth_ns: int = 0


Deliver = Callable[[Sequence[tuple[DraftSession, Any]]], None]


class DraftLoop:
    """Observes and proposes for all sessions of one drafter.

    `deliver` is called on the thread that owns it: the one that `start` begins, or the one that calls `turn`.
    `num_threads` are torch's on its own; 0 leaves what is set.
    """

    def __init__(self, name: str, drafter: Drafter, deliver: Deliver, num_threads: int) -> None:
        self.name = name
        self.drafter = drafter
        self.counters = DraftCounters()
        self._deliver = deliver
        self._num_threads = num_threads
        self._condition = threading.Condition()
        self._opened: list[DraftSession] = []
        self._committed: list[DraftSession] = []
        self._closed: list[DraftSession] = []
        self._stopping = self._retiring = False
        self._sessions: set[DraftSession] = set()
        self._growing: dict[DraftSession, None] = {}
        self._thread = threading.Thread(target=self._run, name=f"draft-{name}", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the running proposal, if there is one."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self.drafter.end()

    def stop_when_idle(self) -> bool:
        """Take no new sessions, and end the thread with the last one; whether that is now."""
        with self._condition:
            self._retiring = True
            self._condition.notify()
            return not (self._sessions or self._opened)

    def open(self, session: DraftSession) -> None:
        """Take a new session."""
        with self._condition:
            self._opened.append(session)
            self._condition.notify()

    def commit(self, commits: Sequence[tuple[DraftSession, m.Commit]]) -> None:
        """Tokens were committed; they join what the thread has not taken yet."""
        with self._condition:
            for session, commit in commits:
                if session.waiting is None:
                    session.waiting, session.arrived = commit, time.monotonic()
                    self._committed.append(session)
                else:
                    session.waiting = session.waiting.followed_by(commit)
            self._condition.notify()

    def close(self, session: DraftSession) -> None:
        """Drop a session."""
        with self._condition:
            self._closed.append(session)
            self._condition.notify()

    def _run(self) -> None:
        if self._num_threads:
            from workers.engine.threads import use_threads

            use_threads(self._num_threads)
        try:
            self._work()
        finally:
            self.drafter.end()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not (self._has_news() or self._growing):
                    self._condition.wait()
                if self._stopping or (self._retiring and not (self._sessions or self._opened)):
                    return
                news = self._has_news()
            if news:
                self._turn(meanwhile=True)
            elif not self._grow(list(self._growing)):
                self._growing.clear()

    def turn(self) -> None:
        """Take what is new, and propose for those whose target has committed something.

        The target waits meanwhile: who has just come would wait for its first token.
        """
        self._turn(meanwhile=False)

    def _turn(self, meanwhile: bool) -> None:
        with self._condition:
            opened, self._opened = self._opened, []
            closed, self._closed = self._closed, []
            commits = [(s, s.waiting) for s in self._committed if s.waiting is not None]
            for session, _ in commits:
                session.waiting = None
            self._committed.clear()
        self._take(opened, commits, closed)
        asked = {s for s, commit in commits if self._asks(s, commit)}
        if meanwhile:
            # The target reads the prompt, too.
            asked.update(opened)
        for session, _ in commits:
            self._growing.pop(session, None)
        self._propose(list(asked & self._sessions))
        growing = (*self._growing, *(session for session in asked if session.grows))
        self._growing = {session: None for session in growing if session in self._sessions}

    def _has_news(self) -> bool:
        return bool(
            self._stopping
            or self._opened
            or self._committed
            or self._closed
            or (self._retiring and not self._sessions)
        )

    def _asks(self, session: DraftSession, commit: m.Commit) -> bool:
        """Whether a session wants a proposal: features alone are no question, but may answer one."""
        return commit.asks(self.name) if commit.tokens else session.unanswered

    def _take(
        self,
        opened: Sequence[DraftSession],
        commits: Sequence[tuple[DraftSession, m.Commit]],
        closed: Sequence[DraftSession],
    ) -> None:
        for session in opened:
            self._sessions.add(session)
            with self._failing_alone(session):
                request = session.request
                self.drafter.belongs_to(session.number, request.key_id)
                self.drafter.predicted(session.number, request.prediction)
                self.drafter.open(session.number, request.tokens, request.sampling)
        for session, commit in commits:
            if session not in self._sessions:
                continue
            session.committed(commit)
            with self._failing_alone(session):
                if commit.verified is not None and self.drafter.reads_choices:
                    self.drafter.verified(session.number, commit.verified)
                self.drafter.observe(session.number, commit.tokens, commit.features)
        for session in closed:
            self._drop(session)

    def _propose(self, sessions: Sequence[DraftSession]) -> None:
        started = time.monotonic()
        rest = []
        for session in sessions:
            tree = None
            with self._failing_alone(session):
                tree = self.drafter.recall(session.ask())
            if tree is not None:
                # What is known already does not wait for what the others still have to draft.
                self.counters.hits += 1
                self.counters.proposals += self._send([(session, tree)], started, hit=True)
            elif session in self._sessions:
                rest.append(session)
        trees = self._draft(rest, self.drafter.propose) if rest else []
        for session, tree in zip(rest, trees, strict=False):
            session.unanswered = tree is None
        self.counters.proposals += self._send(list(zip(rest, trees, strict=False)), started)
        self.counters.draft_ns += int((time.monotonic() - started) * 1e9)

    def _grow(self, sessions: Sequence[DraftSession]) -> bool:
        """One pass more for trees whose target is verifying; whether there was anything to do."""
        started = time.monotonic()
        trees = self._draft(sessions, self.drafter.grow)
        made = list(zip(sessions, trees, strict=False))
        self.counters.proposals_again += self._send(made, started, again=True)
        self.counters.growth_ns += int((time.monotonic() - started) * 1e9)
        return bool(trees)

    def _draft(
        self,
        sessions: Sequence[DraftSession],
        draft: Callable[[Sequence[Ask]], list[TokenTree | None]],
    ) -> list[TokenTree | None]:
        try:
            return draft([session.ask() for session in sessions])
        except Exception as error:
            logger.exception("drafter %s failed; its sessions decode without it", self.name)
            for session in sessions:
                self._fail(session, error)
            return []

    def _send(
        self,
        made: Sequence[tuple[DraftSession, TokenTree | None]],
        started: float,
        hit: bool = False,
        again: bool = False,
    ) -> int:
        """Send the trees that there are; how many."""
        draft_ns = int((time.monotonic() - started) * 1e9)
        proposals = []
        for session, tree in made:
            if tree is not None:
                wait_ns = int(max(0.0, started - session.arrived) * 1e9)
                made_so = (hit, wait_ns, draft_ns, again)
                proposal = m.Proposal(session.drafted_to, tree, self.name, *made_so)
                proposals.append((session, proposal))
        if proposals:
            self._deliver(proposals)
        return len(proposals)

    @contextlib.contextmanager
    def _failing_alone(self, session: DraftSession) -> Iterator[None]:
        """A drafter that fails costs this session its drafts, and nobody else."""
        try:
            yield
        except Exception as error:
            logger.exception("drafter %s failed; a session decodes without it", self.name)
            self._fail(session, error)

    def _fail(self, session: DraftSession, error: Exception) -> None:
        self._drop(session)
        failed = m.Failed("INTERNAL", f"the drafter failed: {error!r}", self.name)
        self._deliver([(session, failed)])

    def _drop(self, session: DraftSession) -> None:
        if session in self._sessions:
            self._sessions.discard(session)
            try:
                self.drafter.close(session.number)
            except Exception:
                # The session is over anyway, and the thread serves others, or is the target's.
                logger.exception("drafter %s failed to close a session", self.name)
