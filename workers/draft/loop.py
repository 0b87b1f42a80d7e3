"""The draft worker's loop: one thread owns the drafters and answers every commit with a proposal."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workers.draft.drafter import Drafter
from workers.draft.session import DraftSession
from workers.rpc import messages as m

logger = logging.getLogger(__name__)

Deliver = Callable[[Sequence[tuple[DraftSession, Any]]], None]


class DraftLoop:
    """Observes and proposes for all sessions. `deliver` is called on the loop's thread."""

    def __init__(self, drafters: Mapping[str, Drafter], deliver: Deliver) -> None:
        self._drafters = drafters
        self._deliver = deliver
        self._condition = threading.Condition()
        self._opened: list[DraftSession] = []
        self._committed: dict[int, DraftSession] = {}
        self._closed: list[DraftSession] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="draft-loop", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the running proposal."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    def open(self, session: DraftSession) -> None:
        """Take a new session."""
        with self._condition:
            self._opened.append(session)
            self._condition.notify()

    def commit(self, session: DraftSession, commit: m.Commit) -> None:
        """Tokens were committed; joined to what the thread has not taken yet."""
        with self._condition:
            waiting = session.waiting
            if waiting is None:
                session.arrived = time.monotonic()
            session.waiting = commit if waiting is None else waiting.followed_by(commit)
            self._committed[session.number] = session
            self._condition.notify()

    def close(self, session: DraftSession) -> None:
        """Drop a session."""
        with self._condition:
            self._closed.append(session)
            self._condition.notify()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not (self._stopping or self._opened or self._committed or self._closed):
                    self._condition.wait()
                if self._stopping:
                    return
                opened, self._opened = self._opened, []
                closed, self._closed = self._closed, []
                committed, self._committed = self._committed, {}
                commits = []
                for session in committed.values():
                    if session.waiting is not None:
                        commits.append((session, session.waiting))
                    session.waiting = None
            gone = {session.number for session in closed}
            for session in opened:
                for name in session.request.drafters:
                    self._drafters[name].open(
                        session.number, session.request.tokens, session.request.sampling
                    )
            for session, commit in commits:
                session.length += len(commit.tokens)
                for name in session.request.drafters:
                    self._drafters[name].observe(session.number, commit.tokens)
            ready = {s.number: s for s in (*opened, *(s for s, _ in commits))}
            self._propose([s for s in ready.values() if s.number not in gone])
            for session in closed:
                for name in session.request.drafters:
                    self._drafters[name].close(session.number)

    def _propose(self, sessions: Sequence[DraftSession]) -> None:
        for name, drafter in self._drafters.items():
            asked = [session for session in sessions if name in session.request.drafters]
            if not asked:
                continue
            started = time.monotonic()
            trees = drafter.propose([session.ask() for session in asked])
            draft_ns = int((time.monotonic() - started) * 1e9)
            self._deliver(
                [
                    (
                        session,
                        m.Proposal(
                            base_len=session.length,
                            tree=tree,
                            drafter=name,
                            wait_ns=int(max(0.0, started - session.arrived) * 1e9),
                            draft_ns=draft_ns,
                        ),
                    )
                    for session, tree in zip(asked, trees, strict=True)
                ]
            )
