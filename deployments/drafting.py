"""Where an answer's drafters are that are not beside its target: a seat on each pool of draft workers."""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from deployments.lease import WorkerPool, tell_when_ended
from workers.rpc import messages as m
from workers.rpc.connection import Channel
from workers.rpc.errors import FailedPrecondition, ServiceError, from_code

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class DraftPool:
    """Draft workers, and the names of the drafters that each of them has."""

    workers: WorkerPool
    drafters: frozenset[str]


class Drafted(Protocol):
    """The answer that a seat drafts for."""

    @property
    def tokens(self) -> list[int]:
        """All committed tokens."""

    def open_draft(self, lease_id: str, drafters: frozenset[str]) -> m.OpenDraft:
        """What begins a session with these drafters, behind what is committed."""

    def usable(self, worker: m.WorkerInfo) -> frozenset[str]:
        """The drafters of a worker that the answer wants and that fit its target."""

    async def until_worthwhile(self) -> None:
        """Wait while nothing would be verified."""

    def joined(self, seat: "Seat") -> None:
        """The seat's drafters have come."""

    def left(self, drafters: frozenset[str]) -> None:
        """These drafters of a seat are gone."""

    def drafter_failed(self, failed: m.Failed) -> None:
        """One drafter is gone."""

    def proposed(self, proposal: m.Proposal) -> None:
        """A drafter offers a tree."""

    def draft_lost(self, error: ServiceError) -> None:
        """A seat has lost its session."""


class Seat:
    """An answer's session on one pool. A session that is lost is followed by another after a while.

    `drafters` are those that are there now.
    """

    def __init__(self, answer: Drafted, pool: DraftPool) -> None:
        self.drafters: frozenset[str] = frozenset()
        self._answer = answer
        self._pool = pool
        self._channel: Channel | None = None
        self._told_to = 0
        self._features_to: int | None = None
        self._behind = self._asked_features = False
        self._lost = asyncio.Event()

    @property
    def reads_features(self) -> bool:
        """Whether a drafter there reads features."""
        return self._features_to is not None

    @property
    def missing_features(self) -> int | None:
        """The first position whose features the worker lacks and nobody has asked for."""
        return self._features_to if self._behind and not self._asked_features else None

    def features_asked(self, asked: bool) -> None:
        """The target was asked for what is missing, or told to send no more."""
        self._asked_features = asked
        self._behind = self._behind or not asked

    async def hold(self) -> None:
        """Keep a session on the pool, until cancelled."""
        while True:
            # Where nothing would be verified, not even a place is taken.
            await self._answer.until_worthwhile()
            try:
                await self._sit()
            except ServiceError as error:
                logger.info("no drafting for now: %s", error)
            await asyncio.sleep(RETRY_SECONDS)

    def commit(self, committed: m.Committed, asked: frozenset[str]) -> None:
        """Tell the worker all that was committed since it was told last; `asked` are to propose."""
        if self._channel is None:
            return
        features = self._news(committed.features)
        tokens = tuple(self._answer.tokens[self._told_to :])
        commit = m.Commit(self._told_to, tokens, features, asked, committed.price, committed.pace)
        self._channel.send(commit)
        self._told_to += len(tokens)

    def feature(self, features: m.Features) -> None:
        """Features of what was committed before."""
        if self._channel is not None:
            for news in self._news(features):
                self._channel.send(news)

    def proposed(self, proposal: m.Proposal) -> None:
        """A drafter there offers a tree; nobody there speaks for others."""
        if proposal.drafter in self.drafters:
            self._answer.proposed(proposal)

    def lose(self, error: ServiceError) -> None:
        """The session is over, whoever ended it."""
        if not self._lost.is_set():
            self._lost.set()
            self._answer.draft_lost(error)

    def lose_drafter(self, failed: m.Failed) -> None:
        """One of several drafters is gone; the others go on."""
        self.drafters -= {failed.drafter}
        self._answer.drafter_failed(failed)
        if not self.drafters:
            self._lost.set()

    async def _sit(self) -> None:
        async with self._pool.workers.lease() as lease:
            info = lease.connection.info
            usable = self._answer.usable(info) & self._pool.drafters
            if not usable:
                raise FailedPrecondition(
                    f"draft worker {info.worker_id} has none of the drafters "
                    f"{', '.join(sorted(self._pool.drafters))} for this target"
                )
            self._lost.clear()
            opened = self._answer.open_draft(lease.lease_id, usable)
            self._channel = lease.connection.open(opened, lambda channel: _Receiver(self))
            self._told_to = len(opened.tokens)
            windows = [d.feature_window for d in info.drafters if d.name in usable]
            self._features_to = max(0, self._told_to - max(windows)) if any(windows) else None
            self._behind, self._asked_features = True, False
            self.drafters = usable
            self._answer.joined(self)
            watch = asyncio.create_task(tell_when_ended(lease, self.lose))
            try:
                await self._lost.wait()
            finally:
                watch.cancel()
                self._channel.close()
                self._channel = None
                left, self.drafters = self.drafters, frozenset()
                self._answer.left(left)

    def _news(self, features: m.Features | None) -> tuple[m.Features, ...]:
        """Those that the worker has not got; none if others would be missing before them."""
        known = self._features_to
        if known is None or (features is not None and features.end <= known):
            return ()
        if features is None or features.first_position > known:
            self._behind = True
            return ()
        self._features_to = features.end
        self._behind = self._asked_features = False
        return (features.since(known),)


class _Receiver:
    """What a draft worker says."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def receive(self, message: m.FromDraftMessage) -> None:
        match message:
            case m.Proposal():
                self._seat.proposed(message)
            case m.Failed(drafter=name) if name:
                self._seat.lose_drafter(message)
            case m.Failed(code, text):
                self._seat.lose(from_code(code, text))

    def disconnected(self, error: ServiceError) -> None:
        self._seat.lose(error)
