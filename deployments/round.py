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
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

from deployments.choice import Choice, Records
from deployments.lease import WorkerPool
from deployments.stats import RequestStats
from workers.request import DEFAULT_MODE, Mode, SamplingParams, StopRules
from workers.rpc import messages as m
from workers.rpc.connection import Channel
from workers.rpc.errors import DeadlineExceeded, FailedPrecondition, ServiceError, from_code

logger = logging.getLogger(__name__)

DRAFT_RETRY_SECONDS = 1.0
REMEMBERED_COMMITS = 64


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
    mode: Mode = DEFAULT_MODE

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
        ended: Callable[[RequestStats], None],
    ) -> None:
        self.request = request
        self.stats = RequestStats()
        self._targets = targets
        self._drafts = drafts
        self._max_patience_ms = max_patience_ms
        self._ended = ended
        self._tokens = list(request.prompt)
        self._target: Channel
        self._vocabulary = ""
        self._draft: Channel | None = None
        self._beside: frozenset[str] = frozenset()
        self._choice = Choice(
            records, request.speculation.auto, request.speculation.max_draft_tokens
        )
        self._asked = m.Asked(frozenset(), frozenset())
        self._drafted_to = 0
        self._reads_features = self._features_come = False
        self._features_from = 0
        self._committed_at: dict[int, float] = {}
        self._draft_lost = asyncio.Event()
        self._cheaper = asyncio.Event()
        self._piece = Piece()
        self._error: ServiceError | None = None
        self._news = asyncio.Event()

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The answer as it grows; rounds are merged while the previous piece is not taken yet.

        Raises a ServiceError if the answer cannot be made. Whatever ends the iteration, nothing is left
        running on the workers.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(lambda: self._ended(self.stats))
            lease = await stack.enter_async_context(self._targets.lease(self.request.deadline))
            self._vocabulary = lease.connection.info.vocabulary_fingerprint
            self._beside = self._usable(lease.connection.info)
            self._join(self._beside)
            # Those beside the target begin with the session.
            self._asked = m.Asked(self._beside, frozenset())
            self._target = lease.connection.open(
                self._open_target(lease.lease_id), lambda channel: _TargetSide(self)
            )
            stack.callback(self._target.close)
            self._ask(self._choice.asked)
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
        """Propose: what a drafter offers goes to the target, unless the answer has left it already."""
        if proposal.base_len > len(self._tokens):
            return  # For tokens that nobody has committed.
        if not proposal.again:
            self._count(proposal)
        if proposal.drafter not in self._asked.elsewhere:
            return
        late = proposal.base_len < len(self._tokens)
        if not late or proposal.tree.rebase(self._tokens[proposal.base_len :]):
            self._target.send(m.Propose(proposal.drafter, proposal.base_len, proposal.tree))

    def _count(self, proposal: m.Proposal) -> None:
        """The first answer of a drafter to a commit says what it finds, and how long it takes."""
        self.stats.proposed(proposal)
        since = self._committed_at.get(proposal.base_len)
        delay_s = None if since is None else time.monotonic() - since
        if proposal.drafter in self._beside:
            # The target has it already; what counts is how long it took there.
            delay_s = (proposal.wait_ns + proposal.draft_ns) / 1e9
        self._choice.proposed(proposal.drafter, proposal.base_len, proposal.tree, delay_s)

    def committed(self, committed: m.Committed) -> None:
        """Commit: what the target verified goes to the drafter. Emit: and to the client."""
        first = len(self._tokens) == len(self.request.prompt)
        self._tokens += committed.tokens
        if not first:
            self.stats.committed(committed)
            self._choice.committed(self._tokens, committed)
            if not self._choice.priced_out:
                self._cheaper.set()
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
        """Features of what was committed before the drafter came, or while it was not asked."""
        if self._draft is not None:
            self._features_from = features.end
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
        """Who is to propose, and what was committed; those beside the target know the second already.

        A draft worker where nobody is asked hears nothing until somebody is.
        """
        self._ask(self._choice.asked)
        now = time.monotonic()
        self._committed_at[len(self._tokens)] = now
        if len(self._committed_at) > REMEMBERED_COMMITS:
            del self._committed_at[next(iter(self._committed_at))]
        if self._draft is None or not self._asked.elsewhere:
            return
        features: tuple[m.Features, ...] = ()
        if not self._features_come:
            self._want_features()
        elif committed.features is not None:
            features = (committed.features,)
            self._features_from = committed.features.end
        tokens = tuple(self._tokens[self._drafted_to :])
        self._draft.send(
            m.Commit(
                self._drafted_to,
                tokens,
                features,
                self._asked.elsewhere,
                committed.price,
                committed.pace,
            )
        )
        self._drafted_to = len(self._tokens)

    def _ask(self, drafters: frozenset[str]) -> None:
        """These are to answer commits from now on; the target waits for nobody else."""
        asked = m.Asked(drafters & self._beside, drafters - self._beside)
        if asked == self._asked:
            return
        if self._features_come and not asked.elsewhere:
            self._features_come = False
            self._target.send(m.FeaturesWanted(None))
        self._asked = asked
        self._target.send(asked)

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
            # Where nothing would be verified, not even a place is taken.
            while self._choice.priced_out:
                self._cheaper.clear()
                await self._cheaper.wait()
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
                    self._drafted_to = len(self._tokens)
                    infos = [d for d in lease.connection.info.drafters if d.name in joining]
                    self._reads_features = any(info.needs_features for info in infos)
                    self._features_come = False
                    window = max(info.feature_window for info in infos)
                    self._features_from = max(0, len(self._tokens) - window)
                    self._join(joining)
                    self._ask(self._choice.asked)
                    self._want_features()
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

    def _want_features(self) -> None:
        """Ask for the features that the drafters elsewhere have not got, and for those to come."""
        if self._reads_features and self._asked.elsewhere:
            self._features_come = True
            self._target.send(m.FeaturesWanted(self._features_from))

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
        self.stats.drafter = "+".join(sorted(self._choice.drafters))

    def _lose(self, drafters: Iterable[str]) -> None:
        self._choice.lose(drafters)
        self._ask(self._choice.asked)

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
            patience_ms=self._max_patience_ms,
            drafters=tuple(sorted(self._beside)),
            max_nodes=self.request.speculation.max_draft_tokens,
            chain=not self.request.speculation.tree,
            mode=self.request.speculation.mode,
            insists=not self.request.speculation.auto,
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
            mode=speculation.mode,
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
