"""One answer, from its prompt to its last token: propose → verify → commit → emit.

The target leads: it commits a round whenever it can, with a proposal or without. Each message from one
peer is passed on at once from where it arrives, so no await on one peer stands between two others:

    a proposal arrives from a drafter   →  it goes to the target             (propose)
    the target verifies and commits     →  the drafter hears what is new     (commit)
                                        →  the client gets it                (emit)

Drafters are on draft workers (drafting.py) or beside the target; those hear of commits and propose on the
spot, and tell what they propose here as well.
Losing every drafter changes nothing but the speed. Losing the target makes a pause: another with the same
weights goes on behind the tokens that are there.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from deployments.choice import Choice, Records
from deployments.config import CoordinatorThresholds
from deployments.drafting import DraftPool, Seat
from deployments.lease import WorkerPool, tell_when_ended
from deployments.stats import RequestStats
from deployments.tracing import AnswerTrace
from workers.grammar import GRAMMAR
from workers.prediction import PREDICTION
from workers.request import DEFAULT_MODE, DRAWN, Mode, SamplingParams, StopRules, Verification
from workers.rpc import messages as m
from workers.rpc.connection import Channel
from workers.rpc.errors import (
    DeadlineExceeded,
    NoCapacity,
    ServiceError,
    Unavailable,
    from_code,
)

logger = logging.getLogger(__name__)

REMEMBERED_COMMITS = 64
LOSSES_IN_A_ROW: Final = 5
"""An answer that loses so many targets without a token in between may be what they die of."""

_SAID: Final = frozenset([PREDICTION])
"""Drafters that draft what the request says."""

_LOST: Final = frozenset(["UNAVAILABLE", "CANCELLED", "FAILED_PRECONDITION"])
"""What a target says when it ends, takes a lease back, or has never granted it: another one can go on."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Per-request control of speculation; only `verification` changes the answer.

    `drafters` are names; an empty tuple turns drafting off, as `max_draft_tokens` 0 does. With `auto` the
    best of them and of their sets are chosen as the answer goes. If PREDICTION is among them, they follow
    `prediction`, and a round verifies up to `max_predicted_tokens` then.
    """

    drafters: tuple[str, ...] = ()
    max_draft_tokens: int = 0
    tree: bool = True
    auto: bool = False
    mode: Mode = DEFAULT_MODE
    verification: Verification = "coupled"
    prediction: tuple[int, ...] = ()
    max_predicted_tokens: int = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is drafted."""
        return bool(self.drafters) and self.max_draft_tokens > 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer that is asked for; `deadline` is on time.monotonic's clock.

    With `prompt_only` nothing is answered: only the prompt's log-probabilities are wanted. With `rounds` its
    pieces hold what each round drafted. `grammar` is what the answer may look like (workers.grammar); empty:
    anything.
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
    rounds: bool = False
    priority: int = 0
    grammar: str = ""
    key_id: str = ""
    model_id: str = ""
    operation: str = "text_completion"
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """What was committed at once; `proposals` have come since the round before, `hits` of them at once."""

    committed: m.Committed
    proposals: int
    hits: int


@dataclass(slots=True)
class Piece:
    """What is new since the last piece; the last one has `finished`."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[m.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[m.TokenLogprobs] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finished: m.Finished | None = None


class Generation:
    """Makes one answer. `pieces` may be iterated once; `stats` count as it goes."""

    def __init__(
        self,
        request: GenerationRequest,
        targets: WorkerPool,
        drafts: Sequence[DraftPool],
        thresholds: CoordinatorThresholds,
        records: Records,
        ended: Callable[[RequestStats], None],
    ) -> None:
        self.request = request
        self._trace = AnswerTrace(
            request.operation,
            request.model_id,
            request.request_id,
            request.sampling,
            request.stopping,
        )
        self.stats = RequestStats()
        self.tokens = list(request.prompt)
        self._targets = targets
        self._thresholds = thresholds
        self._ended = ended
        self._target: Channel
        self._info: m.WorkerInfo
        self._weights = ""
        self._losses = 0
        self._beside: frozenset[str] = frozenset()
        wanted = frozenset(request.speculation.drafters if request.speculation.enabled else ())
        self._seats = [Seat(self, pool) for pool in drafts if pool.drafters & wanted]
        self._choice = Choice(
            records, request.speculation.auto, request.speculation.max_draft_tokens
        )
        self._asked = m.Asked(frozenset(), frozenset())
        self._features_flow = False
        self._committed_at: dict[int, float] = {}
        self._cheaper = asyncio.Event()
        self._piece = Piece()
        self._shown = (0, 0)
        self._error: ServiceError | None = None
        self._lost: ServiceError | None = None
        self._news = asyncio.Event()

    async def pieces(self) -> AsyncGenerator[Piece]:
        """The answer as it grows; rounds are merged while the previous piece is not taken yet.

        Raises a ServiceError if the answer cannot be made. Whatever ends the iteration, nothing is left
        running on the workers.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.push(self._over)
            for seat in self._seats:
                stack.callback(asyncio.create_task(seat.hold()).cancel)
            deadline = self.request.deadline
            while True:
                async with self._on_a_target(deadline):
                    while True:
                        await self._wait_for_news()
                        piece, self._piece = self._piece, Piece()
                        # What was committed before an error still belongs to the client.
                        if piece.tokens or piece.finished is not None:
                            yield piece
                        if piece.finished is not None:
                            self.stats.finish_reason = piece.finished.reason
                            return
                        if self._error is not None:
                            raise self._error
                        if self._lost is not None:
                            break
                # A failover has its own limit; until then the request's holds.
                wait_s = self._thresholds.failover_wait_s
                deadline = min(self.request.deadline, time.monotonic() + wait_s)

    @contextlib.asynccontextmanager
    async def _on_a_target(self, deadline: float) -> AsyncIterator[None]:
        """Have a session on a target; after a loss on one with the same weights, behind what there is."""
        lost, self._lost = self._lost, None
        async with contextlib.AsyncExitStack() as stack:
            try:
                lease = await stack.enter_async_context(
                    self._targets.lease(deadline, self._weights)
                )
            except (NoCapacity, Unavailable) as error:
                if lost is None:
                    raise
                raise Unavailable(
                    f"the target was lost ({lost}), and no other with the same weights took over in "
                    f"{self._thresholds.failover_wait_s:g} s: {error}"
                ) from error
            self._info = lease.connection.info
            self.stats.placed()
            self._trace.leased(self._info.worker_id)
            self._weights = self._info.weights_fingerprint
            self._choice.lose(self._beside)
            self._beside = self.usable(self._info)
            self._join(self._beside)
            # Those beside the target begin with the session; features flow when they are asked for.
            self._asked = m.Asked(self._beside, frozenset())
            self._features_flow = False
            for seat in self._seats:
                seat.features_asked(False)
            try:
                self._target = lease.connection.open(
                    self._open_target(lease.lease_id), lambda channel: _TargetSide(self)
                )
            except Unavailable as error:
                self.target_lost(error)
            else:
                stack.callback(self._target.close)
                watch = asyncio.create_task(tell_when_ended(lease, self.target_lost))
                stack.callback(watch.cancel)
                self._cheaper.set()
                self._ask(self._choice.asked)
            yield

    def _over(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Tell who watches: metrics, the trace, the log. Prompts and answers are in none of them."""
        if isinstance(error, ServiceError):
            self.stats.finish_reason = error.code.name.lower()
        self._ended(self.stats)
        self._trace.ended(self.stats, len(self.request.prompt))
        logger.info(
            "%s: %s after %d tokens",
            self.request.request_id,
            self.stats.finish_reason,
            self.stats.tokens,
            extra={
                "answer_id": self.request.request_id,
                "model": self.request.model_id,
                "finish_reason": self.stats.finish_reason,
                "prompt_tokens": len(self.request.prompt),
                "completion_tokens": self.stats.tokens,
                "drafter": self.stats.drafter,
                "rounds": self.stats.rounds,
                "accepted_tokens": self.stats.accepted_tokens,
                "first_token_s": self.stats.first_token_s,
                "request_s": self.stats.request_s,
            },
        )

    def proposed(self, proposal: m.Proposal) -> None:
        """Propose: what a drafter offers goes to the target, unless the answer has left it already."""
        if proposal.base_len > len(self.tokens):
            return  # For tokens that nobody has committed.
        if not proposal.again:
            self._count(proposal)
        if proposal.drafter not in self._asked.elsewhere:
            return
        late = proposal.base_len < len(self.tokens)
        if not late or proposal.tree.rebase(self.tokens[proposal.base_len :]):
            self._target.send(m.Propose(proposal.drafter, proposal.base_len, proposal.tree))

    def _count(self, proposal: m.Proposal) -> None:
        """The first answer of a drafter to a commit says what it finds, and how long it takes."""
        self.stats.proposed(proposal)
        since = self._committed_at.get(proposal.base_len)
        delay_s = None if since is None else time.monotonic() - since
        if proposal.drafter in self._beside:
            # The target has it already; what counts is how long it took there.
            delay_s = (proposal.wait_ns + proposal.draft_ns) / 1e9
        if proposal.drafter not in _SAID:
            self._choice.proposed(proposal.drafter, proposal.base_len, proposal.tree, delay_s)

    def committed(self, committed: m.Committed) -> None:
        """Commit: what the target verified goes to the drafters. Emit: and to the client."""
        if committed.base_len < len(self.tokens):
            self.stats.faults["duplicate"] += 1
            return
        if committed.base_len > len(self.tokens):
            self._missed(committed.base_len)
            return
        first = len(self.tokens) == len(self.request.prompt)
        self._losses = 0
        self.tokens += committed.tokens
        self.stats.came(len(committed.tokens))
        if first:
            self._trace.prefilled(len(self.request.prompt))
        else:
            self.stats.committed(committed)
            self._trace.round(committed, self.stats)
            self._choice.committed(self.tokens, committed)
            if not self._choice.priced_out:
                self._cheaper.set()
        if self._choice.drafters:
            self._tell_drafters(committed)
        if self.request.prompt_only:
            return
        self._piece.tokens += committed.tokens
        self._piece.text += committed.text
        self._piece.logprobs += committed.logprobs
        if self.request.rounds:
            self._piece.rounds.append(self._round(committed))
        self._news.set()

    def _round(self, committed: m.Committed) -> Round:
        proposals, hits = self._shown
        self._shown = self.stats.proposals, self.stats.hits
        # Features are for drafters, and large.
        return Round(
            replace(committed, features=None),
            self.stats.proposals - proposals,
            self.stats.hits - hits,
        )

    def prompt_scored(self, scored: m.PromptLogprobs) -> None:
        """Log-probabilities of a part of the prompt; they leave with the first token."""
        come = len(self._piece.prompt_logprobs)
        # The first token of a prompt has none.
        if scored.first_position == come + 1:
            self._piece.prompt_logprobs += scored.logprobs
        elif scored.first_position > come + 1:
            self._missed(scored.first_position)

    def featured(self, features: m.Features) -> None:
        """Features of what was committed before a drafter came, or while it was not asked."""
        for seat in self._seats:
            seat.feature(features)

    def finished(self, finished: m.Finished) -> None:
        """The answer is complete."""
        if finished.length != len(self.tokens):
            self._missed(finished.length)
            return
        if self.request.prompt_only:
            finished = m.Finished("length", finished.length)
        self._piece.finished = finished
        self._news.set()

    def failed(self, error: ServiceError) -> None:
        """The answer cannot go on."""
        self._error = error
        self._news.set()

    def target_lost(self, error: ServiceError) -> None:
        """The target cannot go on; another may."""
        if self._piece.finished is not None or self._lost is not None:
            return
        logger.warning("after %d tokens a target is lost: %s", len(self.tokens), error)
        self._losses += 1
        self.stats.faults["target_lost"] += 1
        if self._losses >= LOSSES_IN_A_ROW:
            self.failed(
                Unavailable(f"{self._losses} targets in a row were lost over this answer: {error}")
            )
            return
        if len(self.tokens) == len(self.request.prompt):
            # Those of the prompt are computed anew.
            self._piece.prompt_logprobs.clear()
        self._lost = error
        self._news.set()

    def _missed(self, length: int) -> None:
        """What the target said does not join what is here."""
        self.stats.faults["gap"] += 1
        self._target.close()
        self.target_lost(
            Unavailable(f"a message got lost: it goes on at {length}, not {len(self.tokens)}")
        )

    def drafter_failed(self, failed: m.Failed) -> None:
        """One of several drafters is gone; the others go on."""
        logger.info("drafter %s: %s", failed.drafter, failed.message)
        self.stats.faults["drafter_failed"] += 1
        self.left(frozenset([failed.drafter]))

    def joined(self, seat: Seat) -> None:
        """See Drafted."""
        self._join(seat.drafters)
        self._ask(self._choice.asked)

    def left(self, drafters: frozenset[str]) -> None:
        """See Drafted."""
        self._choice.lose(drafters)
        self._ask(self._choice.asked)

    def draft_lost(self, error: ServiceError) -> None:
        """See Drafted."""
        logger.info("drafting stops for now: %s", error)
        self.stats.faults["draft_lost"] += 1

    async def until_worthwhile(self) -> None:
        """See Drafted."""
        while not self._weights or self._choice.priced_out:
            self._cheaper.clear()
            await self._cheaper.wait()

    def usable(self, worker: m.WorkerInfo) -> frozenset[str]:
        """See Drafted."""
        if not self.request.speculation.enabled:
            return frozenset()
        return frozenset(
            drafter.name
            for drafter in worker.drafters
            if drafter.name in self.request.speculation.drafters
            and drafter.vocabulary_fingerprint in ("", self._info.vocabulary_fingerprint)
            and drafter.feature_width in (0, self._info.feature_width)
        )

    def _join(self, drafters: frozenset[str]) -> None:
        # What a request says itself needs no choice: it takes no time, and its rows have their price.
        self._choice.join(drafters - _SAID)
        said = (
            {GRAMMAR}
            if self.request.grammar and self.request.speculation.max_draft_tokens
            else set()
        )
        names = self._choice.drafters | (self._beside & _SAID) | said
        self.stats.drafter = "+".join(sorted(names))

    def _tell_drafters(self, committed: m.Committed) -> None:
        """Who is to propose, and what was committed; those beside the target know the second already.

        A draft worker where nobody is asked hears nothing until somebody is.
        """
        self._ask(self._choice.asked)
        self._committed_at[len(self.tokens)] = time.monotonic()
        if len(self._committed_at) > REMEMBERED_COMMITS:
            del self._committed_at[next(iter(self._committed_at))]
        for seat in self._seats:
            asked = seat.drafters & self._asked.elsewhere
            if asked:
                seat.commit(committed, asked)
        self._want_features()

    def _ask(self, drafters: frozenset[str]) -> None:
        """These are to answer commits from now on; the target waits for nobody else."""
        asked = m.Asked((drafters | _SAID) & self._beside, drafters - self._beside)
        if asked != self._asked:
            self._asked = asked
            self._target.send(asked)
            self._want_features()

    def _want_features(self) -> None:
        """Ask for the features that the drafters elsewhere have not got, and for those to come."""
        readers = [
            seat
            for seat in self._seats
            if seat.reads_features and seat.drafters & self._asked.elsewhere
        ]
        missing = {seat: first for seat in readers if (first := seat.missing_features) is not None}
        if missing:
            self._target.send(m.FeaturesWanted(min(missing.values())))
            for seat in missing:
                seat.features_asked(True)
        elif self._features_flow and not readers:
            self._target.send(m.FeaturesWanted(None))
            for seat in self._seats:
                seat.features_asked(False)
        self._features_flow = bool(readers)

    async def _wait_for_news(self) -> None:
        try:
            async with asyncio.timeout(self.request.deadline - time.monotonic()):
                await self._news.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the request ran for {self.stats.request_s:.0f} s, longer than it may: the limit is the "
                "server's request_limit_s, or a gRPC call's timeout_ms where that is less"
            ) from error
        if self._error is None:
            self._news.clear()

    def _open_target(self, lease_id: str) -> m.OpenTarget:
        begun = len(self.tokens) > len(self.request.prompt)
        return m.OpenTarget(
            lease_id=lease_id,
            tokens=tuple(self.tokens),
            prompt_len=len(self.request.prompt),
            sampling=self.request.sampling,
            stopping=self.request.stopping,
            logprobs=self.request.logprobs,
            # They left with the first token.
            prompt_logprobs=None if begun else self.request.prompt_logprobs,
            show_special_tokens=self.request.show_special_tokens,
            priority=self.request.priority,
            key_id=self.request.key_id,
            patience_ms=self._thresholds.max_patience_ms,
            drafters=tuple(sorted(self._beside)),
            max_nodes=self.request.speculation.max_draft_tokens,
            chain=not self.request.speculation.tree,
            mode=self.request.speculation.mode,
            verification=self.request.speculation.verification,
            insists=not self.request.speculation.auto,
            grammar=self.request.grammar,
            traceparent=self._trace.traceparent,
            prediction=self.request.speculation.prediction,
            max_predicted=self.request.speculation.max_predicted_tokens,
            show_drafts=self.request.rounds,
        )

    def open_draft(self, lease_id: str, drafters: frozenset[str]) -> m.OpenDraft:
        """See Drafted."""
        speculation = self.request.speculation
        return m.OpenDraft(
            lease_id=lease_id,
            tokens=tuple(self.tokens),
            sampling=self.request.sampling,
            drafters=tuple(sorted(drafters)),
            max_nodes=speculation.max_draft_tokens,
            chain=not speculation.tree,
            drawn=speculation.verification in DRAWN,
            max_len=len(self.request.prompt) + self.request.stopping.max_tokens,
            mode=speculation.mode,
            traceparent=self._trace.traceparent,
            key_id=self.request.key_id,
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
            case m.Failed(code, text) if code in _LOST:
                self._generation.target_lost(from_code(code, text))
            case m.Failed(code, text):
                self._generation.failed(from_code(code, text))

    def disconnected(self, error: ServiceError) -> None:
        self._generation.target_lost(error)
