"""Which rows the next step runs: continuous batching over the sessions of a target.

A session whose committed tokens are not all in the cache catches up in chunks; one that is decoding
takes its anchor and what was proposed. Both share a step under one budget of rows. When the cache is
full, the session that matters least gives its slots up and catches up again later; its tokens do not
change. Drafted rows never cause that: the tree is cut.
"""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from workers.engine.kv_cache import KVPool
from workers.engine.prefix_cache import PrefixCache
from workers.engine.rows import SequenceRows
from workers.target.counters import Counters
from workers.target.policy import Policy
from workers.target.session import TargetSession
from workers.tree import TokenTree

Order = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class Work:
    """The rows of one session in a step."""

    session: TargetSession
    rows: SequenceRows


class Scheduler:
    """Queues and admits sessions, and plans steps; `policy` says what drafting may cost.

    Of those that wait, the first is the one with the smallest priority number (in the order
    "priority"), then one whose key has the fewest sessions running, then the one that came first: so no
    key can keep the others out.
    """

    def __init__(
        self,
        pool: KVPool,
        prefix_cache: PrefixCache | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        order: Order,
        policy: Policy,
        counters: Counters,
    ) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._max_num_seqs = max_num_seqs
        self._max_rows = max_num_batched_tokens
        self._order = order
        self.policy = policy
        self._counters = counters
        self.waiting: list[TargetSession] = []
        self.running: list[TargetSession] = []

    def add(self, session: TargetSession) -> None:
        """Queue a new session."""
        self.waiting.append(session)
        self._counters.resumed += session.resumed

    def remove(self, session: TargetSession) -> None:
        """Forget a session and free its slots."""
        if session in self.running:
            self.running.remove(session)
        elif session in self.waiting:
            self.waiting.remove(session)
        session.kv.free()

    def stepped(self, session: TargetSession) -> None:
        """A session took part in a step: keep its prefix for others, and forget it if it is over."""
        over = session.finished is not None
        if self._prefix_cache is not None and (over or session.just_prefilled):
            self._prefix_cache.store(session.kv, session.tokens)
        if over:
            self.remove(session)

    def next_start(self) -> float | None:
        """When the next step can start, on time.monotonic's clock; None if there is nothing to do.

        Decoding sessions share a step, which may wait for their proposals; prompts wait for nobody.
        """
        self._admit()
        if not self.running:
            return None
        now = time.monotonic()
        if not all(session.decoding for session in self.running):
            return now
        return self.policy.start(self.running, now)

    def plan(self) -> list[Work]:
        """The rows of the next step, at most `max_num_batched_tokens`."""
        # Decoding first: a long prompt must not hold up answers that have begun.
        decoding = [session for session in self.running if session.decoding][: self._max_rows]
        catching_up = [session for session in self.running if not session.decoding]
        rows_left = self._max_rows - len(decoding)
        prompt_rows = min(rows_left, sum(session.pending for session in catching_up))
        trees = self.policy.select(decoding, prompt_rows, rows_left - prompt_rows)
        work: list[Work] = []
        for session in decoding:
            if session in self.running:
                rows = self._decode_rows(session, trees.get(session, TokenTree()))
                if rows is not None:
                    work.append(Work(session, rows))
        for session in catching_up:
            count = min(session.pending, prompt_rows)
            if count and session in self.running and self._make_room(session, count):
                work.append(Work(session, session.prefill_rows(count)))
                prompt_rows -= count
        # A preemption may have hit a session that was planned before.
        work = [item for item in work if item.session in self.running]
        # Sessions that found no room go first next time.
        planned = {id(item.session) for item in work}
        self.running.sort(key=lambda session: id(session) in planned)
        return work

    def check_integrity(self) -> None:
        """Raise RuntimeError if slots were lost; called when nothing runs."""
        self._pool.check_integrity()
        if not self.running and self._pool.available_slots != self._pool.num_slots:
            raise RuntimeError(
                f"nothing runs, but only {self._pool.available_slots} of {self._pool.num_slots} slots "
                "are available"
            )

    def _decode_rows(self, session: TargetSession, tree: TokenTree) -> SequenceRows | None:
        if tree and session.kv.reserve(session.kv.length + 1 + len(tree)):
            return session.decode_rows(tree)
        return session.decode_rows(TokenTree()) if self._make_room(session, 1) else None

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_num_seqs:
            running = Counter(session.request.key_id for session in self.running)
            session = min(
                self.waiting,
                key=lambda s: (self._priority(s), running[s.request.key_id], s.arrival),
            )
            # Room for the first new token as well, or the session would be preempted at once.
            if self.running and self._pool.available_slots < session.pending + KVPool.GRAIN:
                return
            self.waiting.remove(session)
            self.running.append(session)
            session.stages.stage("queue", {"slipstream.running": len(self.running)})
            if self._prefix_cache is not None and not session.wants_prompt_logprobs:
                self._prefix_cache.restore(session.kv, session.tokens)

    def _make_room(self, session: TargetSession, rows: int) -> bool:
        """Reserve slots for a session, taking them from those that matter less."""
        while not session.kv.reserve(session.kv.length + rows):
            victim = max(self.running, key=lambda other: (self._priority(other), other.arrival))
            victim.kv.free()
            self._counters.preemptions += 1
            self.running.remove(victim)
            self.waiting.append(victim)
            if victim is session:
                return False
        return True

    def _priority(self, session: TargetSession) -> int:
        return session.request.priority if self._order == "priority" else 0
