"""One answer, from its prompt to its last token: propose → verify → commit → emit.

The target leads: it commits a round whenever it can, with a proposal or without. Each message from one
peer is passed on at once from where it arrives, so no await on one peer stands between two others:

    a proposal arrives from a drafter   →  it goes to the target             (propose)
    the target verifies and commits     →  the drafter hears what is new     (commit)
                                        →  the client gets it                (emit)

Drafters are on a draft worker or beside the target; those hear of commits and propose on the spot, and tell
what they propose here as well.
Losing every drafter changes nothing but the speed.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from deployments.choice import Choice, Records
from deployments.lease import WorkerPool
from deployments.patience import Patience
from deployments.stats import RequestStats
from workers.request import SamplingParams, StopRules
from workers.rpc import messages as m
from workers.rpc.connection import Channel
from workers.rpc.errors import DeadlineExceeded, FailedPrecondition, ServiceError, from_code
from workers.tree import TokenTree

logger = logging.getLogger(__name__)

DRAFT_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Speculation:
    """Per-request control of speculation; none of it changes the answer.

    `drafters` are names; an empty tuple turns drafting off, as `max_draft_tokens` 0 does. With `auto` the
    best of them and of their sets are chosen as the answer goes.
    """

    drafters: tuple[str, ...] = ()
    max_draft_tokens: int = 0
    tree: bool = True
    auto: bool = False

    @property
    def enabled(self) -> bool:
        """Whether anything is drafted."""
        return bool(self.drafters) and self.max_draft_tokens > 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer that is asked for; `deadline` is on time.monotonic's clock.

    With `prompt_only` nothing is answered: only the prompt's log-probabilities are wanted.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    stopping: StopRules
    deadline: float
    speculation: Speculation = Speculation()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    show_special_tokens: bool = False
    priority: int = 0


@dataclass(slots=True)
class Piece:
    """What is new since the last piece; the last one has `finished`."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[m.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[m.TokenLogprobs] = field(default_factory=list)
    finished: m.Finished | None = None


class Generation:
    """Makes one answer. `pieces` may be iterated once; `stats` count as it goes."""

    def __init__(
        self,
        request: GenerationRequest,
        targets: WorkerPool,
        drafts: WorkerPool | None,
        max_patience_ms: float,
        records: Records,
    ) -> None:
        self.request = request
        self.stats = RequestStats()
        self._targets = targets
        self._drafts = drafts
        self._patience = Patience(max_patience_ms)
        self._tokens = list(request.prompt)
        self._target: Channel
        self._vocabulary = ""
        self._draft: Channel | None = None
        self._beside: frozenset[str] = frozenset()
        self._choice = Choice(records, request.speculation.auto)
        self._told: tuple[frozenset[str], bool] = (frozenset(), True)
        self._expected: frozenset[str] = frozenset()
        self._committed_at: dict[int, float] = {}
        self._offers: dict[str, m.Proposal] = {}
        self._draft_lost = asyncio.Event()
        self._piece = Piece()
        self._error: ServiceError | None = None
        self._news = asyncio.Event()

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The answer as it grows; rounds are merged while the previous piece is not taken yet.

        Raises a ServiceError if the answer cannot be made. Whatever ends the iteration, nothing is left
        running on the workers.
        """
        async with contextlib.AsyncExitStack() as stack:
            lease = await stack.enter_async_context(self._targets.lease(self.request.deadline))
            self._vocabulary = lease.connection.info.vocabulary_fingerprint
            self._beside = self._usable(lease.connection.info)
            self._join(self._beside)
            self._told = (self._beside, True)
            self._target = lease.connection.open(
                self._open_target(lease.lease_id), lambda channel: _TargetSide(self)
            )
            stack.callback(self._target.close)
            elsewhere = frozenset(self.request.speculation.drafters) - self._beside
            if self._drafts is not None and elsewhere and self.request.speculation.enabled:
                drafting = asyncio.create_task(self._keep_drafting(self._drafts))
                stack.callback(drafting.cancel)
            while True:
                await self._wait_for_news()
                piece, self._piece = self._piece, Piece()
                # What was committed before an error still belongs to the client.
                if piece.tokens or piece.finished is not None:
                    yield piece
                if piece.finished is not None:
                    return
                if self._error is not None:
                    raise self._error

    def proposed(self, proposal: m.Proposal) -> None:
        """Propose: what the drafters offer for what is committed now goes to the target as one tree."""
        if proposal.base_len > len(self._tokens):
            return  # For tokens that nobody has committed.
        self.stats.proposed(proposal)
        since = self._committed_at.get(proposal.base_len)
        delay_s = None if since is None else time.monotonic() - since
        if proposal.drafter in self._beside:
            # The target has it already; what counts is how long it took there.
            delay_s = (proposal.wait_ns + proposal.draft_ns) / 1e9
        self._choice.proposed(proposal.drafter, proposal.base_len, proposal.tree, delay_s)
        if proposal.drafter not in self._expected:
            return
        self._offers[proposal.drafter] = proposal
        tree = TokenTree()
        for drafter, offer in list(self._offers.items()):
            rest = offer.tree.rebase(self._tokens[offer.base_len :])
            if rest is None or not (rest or offer.base_len == len(self._tokens)):
                # The answer has left it, or outgrown it.
                del self._offers[drafter]
            else:
                tree = tree.merge(rest)
        answered = {d for d, o in self._offers.items() if o.base_len == len(self._tokens)}
        partial = not self._expected <= answered
        if tree or not partial:
            self._target.send(m.Propose(len(self._tokens), tree, partial))

    def committed(self, committed: m.Committed) -> None:
        """Commit: what the target verified goes to the drafter. Emit: and to the client."""
        first = len(self._tokens) == len(self.request.prompt)
        self._tokens += committed.tokens
        if not first:
            self.stats.committed(committed)
            step_s = committed.timings.step_ns / 1e9
            self._choice.committed(self._tokens, step_s, committed.drafted > 0)
        if self._choice.drafters:
            self._tell_drafters(committed)
        if self.request.prompt_only:
            return
        self._piece.tokens += committed.tokens
        self._piece.text += committed.text
        self._piece.logprobs += committed.logprobs
        self._news.set()

    def prompt_scored(self, scored: m.PromptLogprobs) -> None:
        """Log-probabilities of a part of the prompt; they leave with the first token."""
        self._piece.prompt_logprobs += scored.logprobs

    def featured(self, features: m.Features) -> None:
        """Features of what was committed before the drafter came."""
        if self._draft is not None:
            self._draft.send(features)

    def finished(self, finished: m.Finished) -> None:
        """The answer is complete."""
        self._piece.finished = m.Finished("length") if self.request.prompt_only else finished
        self._news.set()

    def failed(self, error: ServiceError) -> None:
        """The target cannot go on."""
        self._error = error
        self._news.set()

    def drafter_failed(self, failed: m.Failed) -> None:
        """One of several drafters is gone; the others go on."""
        logger.info("drafter %s: %s", failed.drafter, failed.message)
        self._lose({failed.drafter})
        if not self._choice.drafters - self._beside:
            self._draft_lost.set()

    def draft_lost(self, error: ServiceError) -> None:
        """Drafting is over for now: the target must not wait for it."""
        logger.info("drafting stops for now: %s", error)
        self._draft_lost.set()

    def _tell_drafters(self, committed: m.Committed) -> None:
        """What was committed, and who is to propose; those beside the target know the first already."""
        asked = self._choice.asked
        if self._draft is not None:
            features = () if committed.features is None else (committed.features,)
            self._draft.send(m.Commit(committed.base_len, committed.tokens, features, asked))
        told = (asked & self._beside, bool(asked - self._beside))
        if self._beside and told != self._told:
            self._told = told
            self._target.send(m.Asked(*told))
        self._expected = asked - self._beside
        for drafter in self._offers.keys() - self._expected:
            del self._offers[drafter]
        self._committed_at = {len(self._tokens): time.monotonic()} | {
            base: at for base, at in self._committed_at.items() if base > len(self._tokens) - 64
        }
        if asked:
            worth_s = self._choice.worth_s()
            if worth_s is None:
                worth_s = committed.timings.step_ns / 1e9
            self._set_patience(self._patience.committed(worth_s, self._choice.delay_s()))
        else:
            self._set_patience(self._patience.lost())

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(self.request.deadline - time.monotonic()):
                await self._news.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("the request ran longer than it may") from error
        if self._error is None:
            self._news.clear()

    async def _keep_drafting(self, drafts: WorkerPool) -> None:
        """Hold a session on a draft worker; when it is lost, take another after a while."""
        while True:
            try:
                async with drafts.lease() as lease:
                    self._draft_lost.clear()
                    joining = self._usable(lease.connection.info) - self._beside
                    if not joining:
                        raise FailedPrecondition(
                            f"draft worker {lease.connection.info.worker_id} has no drafter for the "
                            f"target's vocabulary among {', '.join(self.request.speculation.drafters)}"
                        )
                    self._draft = lease.connection.open(
                        self._open_draft(lease.lease_id, joining), lambda channel: _DraftSide(self)
                    )
                    self._join(joining)
                    self._want_features(lease.connection.info)
                    try:
                        await self._draft_lost.wait()
                    finally:
                        self._draft.close()
            except ServiceError as error:
                logger.info("no drafting for now: %s", error)
            finally:
                self._draft = None
                self._lose(self._choice.drafters - self._beside)
            await asyncio.sleep(DRAFT_RETRY_SECONDS)

    def _want_features(self, worker: m.WorkerInfo) -> None:
        windows = [
            drafter.feature_window
            for drafter in worker.drafters
            if drafter.name in self._choice.drafters and drafter.needs_features
        ]
        if windows:
            first = max(0, len(self._tokens) - max(windows))
            self._target.send(m.FeaturesWanted(first))

    def _usable(self, worker: m.WorkerInfo) -> frozenset[str]:
        """The drafters of a worker that this request wants and that work on the target's vocabulary."""
        if not self.request.speculation.enabled:
            return frozenset()
        return frozenset(
            drafter.name
            for drafter in worker.drafters
            if drafter.name in self.request.speculation.drafters
            and drafter.vocabulary_fingerprint in ("", self._vocabulary)
        )

    def _join(self, drafters: frozenset[str]) -> None:
        self._choice.join(drafters)
        self._expected = self._choice.asked - self._beside
        self.stats.drafter = "+".join(sorted(self._choice.drafters))

    def _lose(self, drafters: Iterable[str]) -> None:
        self._choice.lose(drafters)
        self._expected &= self._choice.drafters
        for drafter in self._offers.keys() - self._choice.drafters:
            del self._offers[drafter]
        if not self._choice.drafters:
            self._set_patience(self._patience.lost())

    def _set_patience(self, milliseconds: float | None) -> None:
        if milliseconds is not None:
            self._target.send(m.Patience(milliseconds))

    def _open_target(self, lease_id: str) -> m.OpenTarget:
        return m.OpenTarget(
            lease_id=lease_id,
            tokens=tuple(self._tokens),
            prompt_len=len(self.request.prompt),
            sampling=self.request.sampling,
            stopping=self.request.stopping,
            logprobs=self.request.logprobs,
            prompt_logprobs=self.request.prompt_logprobs,
            show_special_tokens=self.request.show_special_tokens,
            priority=self.request.priority,
            drafters=tuple(sorted(self._beside)),
            max_nodes=self.request.speculation.max_draft_tokens,
            chain=not self.request.speculation.tree,
        )

    def _open_draft(self, lease_id: str, drafters: frozenset[str]) -> m.OpenDraft:
        speculation = self.request.speculation
        return m.OpenDraft(
            lease_id=lease_id,
            tokens=tuple(self._tokens),
            sampling=self.request.sampling,
            drafters=tuple(sorted(drafters)),
            max_nodes=speculation.max_draft_tokens,
            chain=not speculation.tree,
            max_len=len(self.request.prompt) + self.request.stopping.max_tokens,
        )


class _TargetSide:
    """What the target says."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def receive(self, message: m.FromTargetMessage) -> None:
        match message:
            case m.Committed():
                self._generation.committed(message)
            case m.Features():
                self._generation.featured(message)
            case m.PromptLogprobs():
                self._generation.prompt_scored(message)
            case m.Proposal():
                self._generation.proposed(message)
            case m.Failed(drafter=name) if name:
                self._generation.drafter_failed(message)
            case m.Finished():
                self._generation.finished(message)
            case m.Failed(code, text):
                self._generation.failed(from_code(code, text))

    def disconnected(self, error: ServiceError) -> None:
        self._generation.failed(error)


class _DraftSide:
    """What the drafter says."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def receive(self, message: m.FromDraftMessage) -> None:
        match message:
            case m.Proposal():
                self._generation.proposed(message)
            case m.Failed(drafter=name) if name:
                self._generation.drafter_failed(message)
            case m.Failed(code, text):
                self._generation.draft_lost(from_code(code, text))

    def disconnected(self, error: ServiceError) -> None:
        self._generation.draft_lost(error)
