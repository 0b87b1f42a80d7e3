"""A coordinator's round, a target worker and a draft worker in one process: real gRPC, no Ray."""

import asyncio
import contextlib
import dataclasses
import multiprocessing
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn

from deployments.choice import Records
from deployments.config import CoordinatorThresholds
from deployments.coordinator import Coordinator, Workers
from deployments.keys import Limits
from deployments.metrics import CoordinatorMetrics
from deployments.openai.routes import make_app
from deployments.round import Generation, GenerationRequest, Piece, Speculation
from deployments.stats import RequestStats
from loadtest.cluster import free_port
from loadtest.inside.faults import Faults, FaultyLink
from loadtest.inside.workers import LocalPool
from workers import limits
from workers.draft.config import (
    DraftConfig,
    DrafterConfig,
    EagleConfig,
    LookupConfig,
    MaskConfig,
    MedusaConfig,
)
from workers.draft.drafter import Ask, Drafter
from workers.draft.server import DraftWorker
from workers.engine.rows import RowBatch
from workers.prediction import PREDICTION
from workers.pricing import StepTimes
from workers.request import DEFAULT_MODE, Mode, SamplingParams, StopRules, Verification
from workers.rpc import messages as m
from workers.rpc.connection import DRAFT, TARGET
from workers.rpc.security import LOCAL, Security
from workers.target.config import TargetConfig
from workers.target.counters import Counters
from workers.target.policy import Policy
from workers.target.ranks import follow
from workers.target.server import TargetWorker
from workers.target.session import TargetSession
from workers.tree import ANCHOR, TokenTree


@dataclass
class Answer:
    """A whole answer and how it came."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[m.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[m.TokenLogprobs] = field(default_factory=list)
    finished: m.Finished | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    pieces: list[Piece] = field(default_factory=list)

    def same_as(self, other: "Answer") -> None:
        """Assert what speculation must not change (oracle K1)."""
        assert self.tokens == other.tokens
        assert self.text == other.text
        assert self.finished == other.finished
        assert self.logprobs == other.logprobs
        assert self.prompt_logprobs == other.prompt_logprobs

    def check_stats(self) -> None:
        """Assert the equation that every answer's statistics keep."""
        stats = self.stats
        cut = 1 + stats.rounds + stats.accepted_tokens - len(self.tokens)
        assert cut in (0, 1)
        if cut:
            assert self.finished is not None
            assert self.finished.reason == "stop"
        assert stats.committed_tokens == len(self.tokens) - 1
        assert stats.accepted_tokens <= stats.draft_tokens
        assert all(0 <= rate <= 1 for rate in stats.acceptance_by_depth)


class PatientPolicy(Policy):
    """Waits for every drafter and verifies all that it proposes, so that a test sees what it drafts."""

    def __init__(self, times: StepTimes, counters: Counters) -> None:
        super().__init__(times, counters)
        self._joined: set[TargetSession] = set()

    def start(self, sessions: Sequence[TargetSession], now: float) -> float:
        until = now
        for session in sessions:
            session.open_mailbox()
            # Before a draft worker has joined, nobody is named whom one could wait for.
            if session.proposals.elsewhere or session.beside is not None:
                self._joined.add(session)
            if session.request.max_nodes and (
                session.proposals.missing or session not in self._joined
            ):
                until = max(until, session.ready_since + 10.0)
        return until

    def lets_draft(self, sessions: Sequence[TargetSession]) -> bool:
        return True

    @property
    def resting(self) -> bool:
        return False

    def price(self, sessions: int) -> tuple[float, float]:
        return 0.0, 0.0

    def select(
        self, sessions: Sequence[TargetSession], other_rows: int, most: int
    ) -> dict[TargetSession, TokenTree]:
        super().select(sessions, other_rows, most)
        trees = {}
        for session in sessions:
            trees[session] = session.candidates().cut(max(0, most), most)
            most -= len(trees[session])
        return trees


class ReplayDrafter(Drafter):
    """Drafts from known answers, with mistakes of a chosen style.

    "true" proposes what will come, "wrong" what will not, "mixed" true tokens hidden among wrong ones,
    some left out.
    """

    def __init__(self, style: str, vocab_size: int) -> None:
        self.style = style
        self.answers: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self.delay_s = 0.0
        self.fail = False
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self._sessions: dict[int, tuple[list[int], int, list[int]]] = {}

    def learn(self, request: GenerationRequest, answer: Answer) -> None:
        self.answers[request.prompt, request.sampling.seed] = answer.tokens

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        for (prompt, seed), answer in self.answers.items():
            if seed == sampling.seed and tuple(tokens[: len(prompt)]) == prompt:
                self._sessions[session] = (list(tokens), len(prompt), answer)
                return
        self._sessions[session] = (list(tokens), len(tokens), [])

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[m.Features]) -> None:
        self._sessions[session][0].extend(tokens)

    def close(self, session: int) -> None:
        del self._sessions[session]

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        time.sleep(self.delay_s)
        if self.fail:
            raise RuntimeError("told to fail")
        return [self._tree(ask).cut(ask.max_nodes, ask.max_depth) for ask in asks]

    def _tree(self, ask: Ask) -> TokenTree:
        known, prompt_len, answer = self._sessions[ask.session]
        future = answer[len(known) - prompt_len :][:5]
        tokens: list[int] = []
        parents: list[int] = []
        parent = ANCHOR
        for true in future:
            wrong = [(true + k) % self._vocab_size for k in (1, 2)]
            level = {"true": [true], "wrong": wrong, "mixed": [*wrong, true]}[self.style]
            if self.style == "mixed":
                self._rng.shuffle(level)
                level = level[: 2 if self._rng.random() < 0.3 else 3]
            if ask.chain:
                level = level[:1]
            nodes = range(len(tokens), len(tokens) + len(level))
            tokens += level
            parents += [parent] * len(level)
            parent = next((n for n in nodes if tokens[n] == true), nodes[0])
        scores = [0.99**node for node in range(len(tokens))]
        return TokenTree(tuple(tokens), tuple(parents), tuple(scores))


class Harness:
    """Runs generations against one target and one draft worker."""

    def __init__(
        self,
        targets: LocalPool,
        drafts: LocalPool,
        drafters: Mapping[str, Drafter | None],
        links: Sequence[FaultyLink],
    ) -> None:
        self.links = links
        self.targets = targets
        self.drafts = drafts
        self.drafters = drafters
        self.records = Records()
        self.thresholds = CoordinatorThresholds(max_patience_ms=1000.0)

    @property
    def target(self) -> TargetWorker:
        assert isinstance(self.targets.workers[0], TargetWorker)
        return self.targets.workers[0]

    def request(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 40,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        logprobs: int | None = None,
        tree: bool = True,
        max_draft_tokens: int = 12,
        timeout_s: float = 60.0,
        prompt_logprobs: int | None = None,
        show_special_tokens: bool = False,
        priority: int = 0,
        auto: bool = False,
        mode: Mode = DEFAULT_MODE,
        verification: Verification = "coupled",
        prediction: Sequence[int] = (),
        grammar: str = "",
        **others: Any,
    ) -> GenerationRequest:
        """A request; what is neither named here nor a stop rule is a sampling parameter."""
        rules = {
            name: others.pop(name)
            for name in ("min_tokens", "ignore_eos", "include_stop")
            if name in others
        }
        return GenerationRequest(
            prompt=tuple(prompt),
            sampling=SamplingParams(**{"temperature": 0.0, **others}),
            stopping=StopRules(max_tokens, tuple(stop), frozenset(stop_token_ids), **rules),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            show_special_tokens=show_special_tokens,
            priority=priority,
            grammar=grammar,
            speculation=Speculation(
                (*self.drafters, *([PREDICTION] if prediction else [])),
                max_draft_tokens,
                tree,
                auto,
                mode,
                verification,
                tuple(prediction),
                limits.MAX_PREDICTED_NODES if prediction else 0,
            ),
            deadline=time.monotonic() + timeout_s,
        )

    async def generate(self, request: GenerationRequest, speculate: bool = True) -> Answer:
        if not speculate:
            request = dataclasses.replace(request, speculation=Speculation())
        generation = self.generation(request)
        answer = Answer(stats=generation.stats)
        async for piece in generation.pieces():
            answer.pieces.append(piece)
            answer.tokens += piece.tokens
            answer.text += piece.text
            answer.logprobs += piece.logprobs
            answer.prompt_logprobs += piece.prompt_logprobs
            answer.finished = piece.finished
        answer.check_stats()
        return answer

    def generation(self, request: GenerationRequest) -> Generation:
        return Generation(
            request,
            self.targets,  # type: ignore[arg-type]
            [self.drafts.draft_pool],
            thresholds=self.thresholds,
            records=self.records,
            ended=lambda stats: None,
        )

    async def idle(self, within_s: float = 1.0) -> None:
        """Assert that no session, lease or slot is held on either worker within a time."""
        deadline = time.monotonic() + within_s
        while (held := self._held()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert not held, held
        for worker in self.targets.workers:
            worker._pool.check_integrity()

    def _held(self) -> dict[str, int]:
        draft = self.drafts.workers[0]
        counts = {"draft leases": len(draft.leases), "draft sessions": draft.num_sessions}
        for number, worker in enumerate(self.targets.workers):
            scheduler, pool = worker._scheduler, worker._pool
            counts |= {
                f"running on {number}": len(scheduler.running),
                f"waiting on {number}": len(scheduler.waiting),
                f"slots of {number}": pool.num_slots - pool.available_slots,
                f"leases of {number}": len(worker.leases),
                f"sessions beside {number}": worker._beside.num_sessions,
            }
        return {name: count for name, count in counts.items() if count}


def _slow_down(worker: TargetWorker, seconds: float) -> None:
    """Give a tiny target's steps the length of a small model's: else it is done before anyone drafts."""
    forward = worker._model.forward

    def slow(batch: RowBatch) -> torch.Tensor:
        time.sleep(seconds)
        return forward(batch)

    worker._model.forward = slow  # type: ignore[method-assign]


async def no_metrics() -> str:
    """Only Ray's exporter shows them."""
    return ""


@contextlib.asynccontextmanager
async def http_client(h: Harness, keys: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP front door before the harness' workers, without Ray and sockets in front."""
    workers = Workers("tiny", h.targets, (h.drafts.draft_pool,))  # type: ignore[arg-type]
    async with front_door(workers, CoordinatorThresholds(api_keys_file=keys)) as client:
        while (await client.get("/health")).is_error:
            await asyncio.sleep(0.01)
        yield client


@contextlib.asynccontextmanager
async def front_door(
    workers: Workers, thresholds: CoordinatorThresholds
) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP front door before such workers."""
    coordinator = Coordinator([workers], Limits(), CoordinatorMetrics())
    coordinator.reconfigure(thresholds)
    transport = httpx.ASGITransport(app=make_app(lambda: coordinator, no_metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@contextlib.asynccontextmanager
async def served(h: Harness) -> AsyncIterator[str]:
    """The HTTP front door on a port of this machine, for clients with sockets of their own; its address."""
    workers = Workers("tiny", h.targets, (h.drafts.draft_pool,))  # type: ignore[arg-type]
    coordinator = Coordinator([workers], Limits(), CoordinatorMetrics())
    coordinator.reconfigure(CoordinatorThresholds())
    app = make_app(lambda: coordinator, no_metrics)
    port = free_port()
    config = uvicorn.Config(app, "127.0.0.1", port, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    await running


@contextlib.contextmanager
def followers(config: TargetConfig, folder: Path) -> Iterator[None]:
    """The ranks other than 0 of a target, which meet in a folder; the pid of the last is there, too."""
    context = multiprocessing.get_context("spawn")
    processes = []
    for rank in range(1, config.tensor_parallel_size):
        process = context.Process(target=follow, args=(config, rank, folder))
        process.start()
        (folder / "follower").write_text(str(process.pid))
        processes.append(process)
    try:
        yield
    finally:
        for process in processes:
            process.join(10)
            process.kill()


@contextlib.asynccontextmanager
async def harness(
    folder: Path,
    drafter: Drafter | Mapping[str, Drafter] | EagleConfig | MedusaConfig | MaskConfig,
    patient: bool = True,
    slow: float = 0.002,
    beside: Mapping[str, Drafter] | Sequence[DrafterConfig] = (),
    others: Sequence[Path] = (),
    target_faults: Faults | None = None,
    draft_faults: Faults | None = None,
    ranks_meet_in: Path | None = None,
    security: Security = LOCAL,
    **target: object,
) -> AsyncIterator[Harness]:
    """A target with the model in `folder`, and a draft worker with drafters by name; one alone is "test".

    Those of `beside` are in the target's process, given or made there. A step takes `slow` seconds longer
    than the model's. There is one more target for each folder of `others`, and links with faults to the
    workers if some are given.
    """
    beside_made = beside if isinstance(beside, Mapping) else None
    beside_configs = (
        tuple(LookupConfig(name) for name in beside)
        if isinstance(beside, Mapping)
        else tuple(beside)
    )
    made: Mapping[str, Drafter] | None
    configs: tuple[DrafterConfig, ...]
    if isinstance(drafter, EagleConfig | MedusaConfig | MaskConfig):
        made, configs = None, (drafter,)
    else:
        made = drafter if isinstance(drafter, Mapping) else {"test": drafter}
        configs = tuple(LookupConfig(name) for name in made)
    options: dict[str, Any] = {
        "dtype": "auto",
        "device": "cpu",
        "tensor_parallel_size": 1,
        "max_model_len": 0,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": True,
        "scheduling_policy": "fcfs",
        "max_draft_tokens": 16,
        "gpu_memory_utilization": 0.1,
        "num_gpu_blocks_override": 0,
        "num_threads": 1,
        "features": None,
        "chat_template": None,
        "tool_call_parser": None,
        "drafters": beside_configs,
    }
    target_workers = []
    async with contextlib.AsyncExitStack() as stack:
        for each in (folder, *others):
            config = TargetConfig(str(each), "tiny", **{**options, **target})
            if config.tensor_parallel_size > 1:
                if ranks_meet_in is None:
                    ranks_meet_in = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                stack.enter_context(followers(config, ranks_meet_in))
            target_workers.append(TargetWorker(config, beside_made, ranks_meet_in, security))
        draft_worker = DraftWorker(DraftConfig(configs, str(folder)), made, security)
        for worker in (*target_workers, draft_worker):
            await worker.start()
            stack.push_async_callback(worker.stop)
        for worker in target_workers:
            if patient:
                policy = worker._scheduler.policy
                worker._scheduler.policy = PatientPolicy(policy.times, worker._counters)
            _slow_down(worker, slow)
        links = []
        via = {}
        for kind, workers, faults in (
            (TARGET, target_workers, target_faults),
            (DRAFT, [draft_worker], draft_faults),
        ):
            for worker in workers if faults is not None else ():
                links.append(FaultyLink(kind, worker.address, faults))
                via[worker.address] = await links[-1].start()
                stack.push_async_callback(links[-1].stop)
        targets = LocalPool(TARGET, *target_workers, via=via, security=security)
        drafts = LocalPool(DRAFT, draft_worker, via=via, security=security)
        stack.push_async_callback(targets.close)
        stack.push_async_callback(drafts.close)
        named = made or {config.name: None for config in configs}
        named_beside = beside_made or {config.name: None for config in beside_configs}
        yield Harness(targets, drafts, {**named, **named_beside}, links)
