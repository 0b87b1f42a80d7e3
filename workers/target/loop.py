"""The target's loop: one thread owns the model and runs step after step.

    plan the rows  →  run the model  →  verify and commit  →  drafters' turn  →  hand the results over

Results are handed over last, as the next step begins: whoever sends them needs the interpreter, which a
running model does not. First tokens, and what drafters elsewhere are to hear, leave before the turn.

The event loop's side talks to it through `submit`, `close` and the sessions' mailboxes.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final

from workers.draft.group import commit_together
from workers.engine.model import Model
from workers.engine.rows import RowBatch
from workers.engine.threads import use_threads
from workers.grammar import GrammarError
from workers.rpc import messages as m
from workers.target.counters import Counters
from workers.target.scheduler import Scheduler, Work
from workers.target.session import TargetSession

logger = logging.getLogger(__name__)

RECENT_STEPS: Final = 10_000
Deliver = Callable[[Sequence[tuple[TargetSession, Any]]], None]


class TargetLoop:
    """Runs sessions to their end. `deliver` is called on the loop's thread, with what was said since.

    With `drafters_turn` those beside it take their turn between two steps. `watchdog` is entered for each
    step.
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        deliver: Deliver,
        counters: Counters,
        threads: int,
        drafters_turn: Callable[[], None],
        watchdog: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._watchdog = watchdog or nullcontext()
        self._drafters_turn = drafters_turn
        self._model = model
        self._scheduler = scheduler
        self._deliver = deliver
        self._counters = counters
        self._threads = threads
        self._condition = threading.Condition()
        self._lost: m.Failed | None = None
        self._opened: list[TargetSession] = []
        self._closed: list[TargetSession] = []
        self._awake = False
        self._said: list[tuple[TargetSession, Any]] = []
        self._waited = False
        self._ended = 0.0
        self._stopping = False
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)
        self._thread = threading.Thread(target=self._run, name="target-loop", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._lost is None and self._thread.is_alive()

    def recent_steps(self) -> list[tuple[float, int]]:
        """(seconds, rows) of the steps since the last call, ten thousand at most."""
        return [self._recent.popleft() for _ in range(len(self._recent))]

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the running step."""
        self._notify(stopping=True)
        self._thread.join()

    def submit(self, session: TargetSession) -> None:
        """Take a new session."""
        with self._condition:
            if self._lost is None:
                self._opened.append(session)
        if self._lost is not None:
            self._deliver([(session, self._lost)])
        self._notify()

    def close(self, session: TargetSession) -> None:
        """Drop a session before the next step; nothing more is delivered for it after that."""
        with self._condition:
            self._closed.append(session)
        self._notify()

    def notice(self) -> None:
        """A mailbox changed."""
        self._notify()

    def _notify(self, stopping: bool = False) -> None:
        with self._condition:
            self._awake = True
            self._stopping = self._stopping or stopping
            self._condition.notify()

    def _run(self) -> None:
        use_threads(self._threads)
        try:
            self._run_steps()
        except Exception as error:
            # Whoever watches this process replaces it; until then its answers go on elsewhere.
            with self._condition:
                self._lost = m.Failed("UNAVAILABLE", f"the target's loop has ended: {error!r}")
                left = (*self._scheduler.running, *self._scheduler.waiting, *self._opened)
            self._deliver([(session, self._lost) for session in left])
            raise

    def _run_steps(self) -> None:
        while self._wait():
            work = self._scheduler.plan()
            if not work:
                continue
            price = self._scheduler.policy.price(sum(item.session.decoding for item in work))
            try:
                results = self._step(work, *price)
            except Exception as error:
                # The caches are as before the step; those who were in it get an answer, others go on.
                logger.exception("a step of %d sessions failed", len(work))
                failed = m.Failed("INTERNAL", f"the target failed in a step: {error!r}")
                for item in work:
                    self._scheduler.remove(item.session)
                results = [(item.session, failed) for item in work]
            self._said += results
            sessions = [item.session for item in work]
            if any(s.just_prefilled or s.proposals.elsewhere for s in sessions):
                self._hand_over()
            self._tell_beside([s for s in sessions if s.decoding and s.finished is None], *price)

    def say(self, session: TargetSession, message: Any) -> None:
        """Deliver a message with the next results; for drafters in their turn."""
        self._said.append((session, message))

    def _hand_over(self) -> None:
        if self._said:
            self._deliver(self._said)
            self._said = []

    def _tell_beside(self, sessions: Sequence[TargetSession], price: float, pace: float) -> None:
        """Tell the drafters beside the target what these sessions, whose answers go on, have committed."""
        affordable = self._scheduler.policy.lets_draft(sessions)
        told = [session.news_beside(price, pace, affordable) for session in sessions]
        news = [heard for heard in told if heard is not None]
        commit_together(news)
        self._waited = bool(news)

    def _wait(self) -> bool:
        """Wait until a step can start; False when the loop is to end."""
        while True:
            with self._condition:
                if self._stopping:
                    return False
                opened, self._opened = self._opened, []
                closed, self._closed = self._closed, []
                self._awake = False
            for session in opened:
                self._scheduler.add(session)
            for session in closed:
                self._scheduler.remove(session)
            self._drafters_turn()
            start = self._scheduler.next_start()
            if start is None or start > time.monotonic():
                self._hand_over()
            if start is None:
                self._scheduler.check_integrity()
            with self._condition:
                if self._awake:
                    continue
                wait = None if start is None else start - time.monotonic()
                if wait is not None and wait <= 0:
                    return True
                self._waited = start is not None
                self._condition.wait(wait)

    def _step(
        self, work: Sequence[Work], price: float, pace: float
    ) -> list[tuple[TargetSession, Any]]:
        started = time.monotonic()
        waited, self._waited = self._waited, False
        decoding = [item.session for item in work if item.session.decoding]
        ready = [session.ready_since for session in decoding] or [started]
        idle_s = max(0.0, started - max(ready))
        since = max(self._ended, min(ready))
        rows = RowBatch([item.rows for item in work])
        results: list[tuple[TargetSession, Any]] = []
        self._hand_over()
        with self._watchdog:
            logits = self._model.forward(rows)
        step_ns = int((time.monotonic() - started) * 1e9)
        self._count(work, rows.num_rows, step_ns, idle_s, waited)
        policy = self._scheduler.policy
        first = 0
        for item in work:
            session, wanted = item.session, len(item.rows.wanted)
            waited_ns = int(max(0.0, started - session.ready_since) * 1e9)
            timings = m.TargetTimings(waited_ns, step_ns, rows.num_rows)
            session.proposals.price = price
            try:
                messages = session.advance(logits[first : first + wanted])
            except ValueError as error:
                code = "INVALID_ARGUMENT" if isinstance(error, GrammarError) else "INTERNAL"
                session.finished = m.Failed(code, str(error))
                messages = []
            first += wanted
            if session.just_prefilled:
                session.stages.stage("prefill", {"slipstream.rows": rows.num_rows})
            for message in messages:
                if isinstance(message, m.Committed):
                    message = replace(
                        message,
                        timings=timings,
                        price=price,
                        pace=pace,
                        resting=policy.resting,
                    )
                results.append((session, message))
            if session.finished is None and session.pending == 1:
                results += [(session, features) for features in session.wanted_features()]
            self._scheduler.stepped(session)
            if session.finished is not None:
                results.append((session, session.finished))
        self._ended = time.monotonic()
        if decoding:
            committed = sum(
                len(message.tokens) for _, message in results if isinstance(message, m.Committed)
            )
            policy.stepped(
                rows.num_rows,
                idle_s,
                waited,
                self._ended - started,
                self._ended - since,
                len(decoding),
                committed,
            )
        return results

    def _count(
        self, work: Sequence[Work], rows: int, step_ns: int, idle_s: float, waited: bool
    ) -> None:
        self._counters.steps += 1
        self._counters.rows += rows
        self._counters.shared_steps += len(work) > 1
        self._counters.step_ns += step_ns
        self._recent.append((step_ns / 1e9, rows))
        if waited:
            self._counters.waits += 1
            self._counters.waits_in_vain += not any(
                item.session.decoding and len(item.rows.tokens) > 1 for item in work
            )
            self._counters.wait_ns += int(idle_s * 1e9)
