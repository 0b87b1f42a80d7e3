"""The coordinator: turns requests into generations and knows the models behind them.

Both front doors, HTTP and gRPC, come here with the same meaning.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

import grpc.aio

from deployments.choice import Records
from deployments.config import CoordinatorThresholds
from deployments.drafting import DraftPool
from deployments.keys import Counts, Gate
from deployments.lease import WorkerPool
from deployments.metrics import CoordinatorMetrics
from deployments.round import Generation, GenerationRequest, Speculation
from deployments.tokenizer import PromptTokenizer
from protos import speculation_pb2 as pb
from workers import limits
from workers.prediction import PREDICTION
from workers.request import Mode, SamplingParams, StopRules, Verification
from workers.rpc import messages as m
from workers.rpc.connection import Connection
from workers.rpc.errors import InvalidRequest, NotFound, ServiceError, Unavailable

logger = logging.getLogger(__name__)

AUTO = "auto"
LEARN_SECONDS = 5.0
REPORT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of one model."""

    model_id: str
    targets: WorkerPool
    drafts: tuple[DraftPool, ...]


@dataclass(frozen=True, slots=True)
class ConnectedWorker:
    """A worker: its introduction, "target" or "draft", and what it does now; None if it does not say."""

    info: m.WorkerInfo
    role: str
    status: pb.WorkerStatus | None


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool of workers: their role, the models that they work for, and what Serve says of them.

    `workers` are those that this coordinator is connected to; there may be more `replicas`.
    """

    role: str
    models: tuple[str, ...]
    health: str
    replicas: Mapping[str, int]
    workers: tuple[ConnectedWorker, ...]


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What a request says about speculation; None and empty mean the default."""

    enabled: bool = True
    drafters: tuple[str, ...] = ()
    max_draft_tokens: int | None = None
    tree: bool = True
    mode: Mode | None = None
    verification: Verification = "coupled"
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """What a request says about its answer, alike for HTTP and gRPC; None means the default.

    `sampling` holds the fields of SamplingParams that the request gives; `request_id` is the answer's own,
    `operation` is OpenTelemetry's name of the call, `prediction` are the tokens that the caller expects.
    """

    request_id: str
    operation: Literal["chat", "text_completion"]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    show_special_tokens: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    rounds: bool = False
    priority: int = 0
    grammar: str = ""
    speculation: SpeculationOptions = SpeculationOptions()
    prediction: tuple[int, ...] | None = None
    timeout_s: float | None = None


class Coordinator:
    """Serves models: `model` finds one by the name that a request gives."""

    def __init__(
        self, workers: Sequence[Workers], counts: Counts, metrics: CoordinatorMetrics
    ) -> None:
        self.thresholds = CoordinatorThresholds()
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.gate = Gate(counts, self.worker_id)
        self.metrics = metrics
        self.models = {of.model_id: ServedModel(of, self) for of in workers}

    async def model(self, name: str | None) -> "ServedModel":
        """The model of this name; left out, the only one.

        A coordinator that has just come waits for the first of its targets as long as an answer waits for
        another. Raises NotFound if there is no such model, Unavailable if nobody comes.
        """
        if not name and len(self.models) == 1:
            (name,) = self.models
        known = ", ".join(repr(model_id) for model_id in self.models)
        if not name:
            raise InvalidRequest(f"model is left out; this server has {known}", "model")
        if name not in self.models:
            raise NotFound(f"the model {name!r} does not exist; this server has {known}")
        model = self.models[name]
        try:
            async with asyncio.timeout(self.thresholds.failover_wait_s):
                await model.introduced.wait()
        except TimeoutError as error:
            raise Unavailable(
                f"no target worker of {name!r} has introduced itself; try again later"
            ) from error
        return model

    def reconfigure(self, thresholds: CoordinatorThresholds) -> None:
        """Take new thresholds. A key file that is unusable leaves the old keys in place.

        Raises OSError or ValueError if there are none yet: better nobody than everybody.
        """
        try:
            self.gate.read(thresholds.api_keys_file)
        except (OSError, ValueError) as error:
            if not self.gate.guarded:
                raise
            logger.error("the old API keys stay: %s", error)
        self.thresholds = thresholds

    async def report(self) -> None:
        """Record, every second, what goes over the connections; until cancelled."""
        while True:
            pools = [pool for _, pool in self._pools]
            self.metrics.record(itertools.chain(*(pool.connections() for pool in pools)))
            await asyncio.sleep(REPORT_SECONDS)

    @property
    def _pools(self) -> list[tuple[str, WorkerPool]]:
        """The pools of all models and their roles; models may share some."""
        pools = {
            id(pool): (role, pool) for model in self.models.values() for role, pool in model.pools
        }
        return list(pools.values())

    async def workers(self) -> list[ConnectedWorker]:
        """The workers that are connected, at least one of each pool."""
        found = await asyncio.gather(*(_workers_of(role, pool) for role, pool in self._pools))
        return [worker for workers in found for worker in workers]

    async def pools(self) -> list[PoolState]:
        """The pools of all models, and their workers."""
        return list(await asyncio.gather(*(self._pool(role, pool) for role, pool in self._pools)))

    async def _pool(self, role: str, pool: WorkerPool) -> PoolState:
        (health, replicas), workers = await asyncio.gather(pool.replicas(), _workers_of(role, pool))
        models = (
            name
            for name, model in self.models.items()
            if any(pool is other for _, other in model.pools)
        )
        return PoolState(role, tuple(models), health, replicas, tuple(workers))


async def _workers_of(role: str, pool: WorkerPool) -> list[ConnectedWorker]:
    if not pool.connections():
        with contextlib.suppress(ServiceError):
            async with pool.lease(time.monotonic() + LEARN_SECONDS):
                pass
    return list(await asyncio.gather(*(_ask(role, each) for each in pool.connections())))


async def _ask(role: str, connection: Connection) -> ConnectedWorker:
    try:
        status = await connection.stub.GetStatus(
            pb.GetStatusRequest(), timeout=LEARN_SECONDS, metadata=connection.metadata
        )
    except grpc.aio.AioRpcError:
        status = None
    return ConnectedWorker(connection.info, role, status)


class ServedModel:
    """One model: its tokenizer and limits, as a target introduced them, and its answers."""

    info: m.WorkerInfo
    tokenizer: PromptTokenizer

    def __init__(self, workers: Workers, coordinator: Coordinator) -> None:
        self.model_id = workers.model_id
        self.introduced = asyncio.Event()
        self._workers = workers
        self._coordinator = coordinator
        self._records = Records()
        self._learning = asyncio.create_task(self._learn())

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The drafters of the config: those beside the target, and those of the draft pools."""
        beside = [drafter.name for drafter in self.info.drafters if drafter.name != PREDICTION]
        return (*beside, *(name for pool in self._workers.drafts for name in sorted(pool.drafters)))

    @property
    def pools(self) -> list[tuple[str, WorkerPool]]:
        """The pools of its workers, and their roles."""
        drafts = [("draft", pool.workers) for pool in self._workers.drafts]
        return [("target", self._workers.targets), *drafts]

    def requests(
        self, prompt: Sequence[int], options: Options, key_id: str = "", choices: int = 1
    ) -> list[GenerationRequest]:
        """The requests of `choices` answers to one prompt, within the model's limits, for a caller's key.

        Raises InvalidRequest naming the limit that is broken.
        """
        if options.truncate_prompt_tokens is not None:
            keep = options.truncate_prompt_tokens
            prompt = prompt[-(self.info.max_model_len - 1 if keep == -1 else keep) :]
        self._check_prompt(prompt)
        room = self.info.max_model_len - len(prompt)
        max_tokens = options.max_tokens
        if max_tokens is None:
            max_tokens = min(
                room, int(self.tokenizer.sampling_defaults.get("max_new_tokens", room))
            )
        if max_tokens > room:
            raise InvalidRequest(
                f"max_tokens is {max_tokens}, but after a prompt of {len(prompt)} tokens the model's "
                f"length of {self.info.max_model_len} leaves {room}",
                "max_tokens",
            )
        if options.priority and not self.info.obeys_priority:
            raise InvalidRequest(
                "priority needs a target with scheduling_policy: priority", "priority"
            )
        self.check_ids("stop_token_ids", options.stop_token_ids)
        _check_structure(options)
        # A request without a seed gets one, so that whoever goes on with it goes on with the same.
        seed = secrets.randbits(63)
        try:
            stopping = StopRules(
                max_tokens=max_tokens or 1,
                strings=options.stop,
                token_ids=frozenset(options.stop_token_ids),
                min_tokens=options.min_tokens,
                ignore_eos=options.ignore_eos,
                include_stop=options.include_stop,
            )
            sampling = [
                SamplingParams(**{"seed": seed, **self._sampling(options), "choice": choice})
                for choice in range(choices)
            ]
        except ValueError as error:
            # Our own messages begin with the name of the parameter.
            raise InvalidRequest(str(error), str(error).split(" ", 1)[0]) from error
        limit = self._coordinator.thresholds.request_limit_s
        return [
            GenerationRequest(
                prompt=tuple(prompt),
                sampling=params,
                stopping=stopping,
                logprobs=options.logprobs,
                prompt_logprobs=options.prompt_logprobs,
                prompt_only=max_tokens == 0,
                show_special_tokens=options.show_special_tokens,
                rounds=options.rounds,
                priority=options.priority,
                grammar=options.grammar,
                key_id=key_id,
                model_id=self.model_id,
                operation=options.operation,
                request_id=options.request_id,
                speculation=self._speculation(options.speculation, options.prediction or ()),
                deadline=time.monotonic() + min(limit, options.timeout_s or limit),
            )
            for params in sampling
        ]

    def generation(self, request: GenerationRequest) -> Generation:
        """A generation for the request; it starts when its pieces are iterated."""
        return Generation(
            request,
            self._workers.targets,
            self._workers.drafts,
            self._coordinator.thresholds,
            self._records,
            partial(self._coordinator.metrics.ended, self.model_id),
        )

    async def _learn(self) -> None:
        """Get to know the model from the first target that answers."""
        while not self.introduced.is_set():
            try:
                async with self._workers.targets.lease() as lease:
                    connection = lease.connection
                    files = await connection.stub.GetTokenizer(
                        pb.GetTokenizerRequest(),
                        timeout=LEARN_SECONDS,
                        metadata=connection.metadata,
                    )
                    self.tokenizer = await asyncio.to_thread(PromptTokenizer, files)
                    self.info = connection.info
                    self.introduced.set()
            except Exception:
                # Whatever is wrong now, the next target may be right; /health says that none was yet.
                logger.exception("a target could not be asked for its model; trying again")
                await asyncio.sleep(1.0)
        logger.info("serving %s: %s", self.model_id, self.info)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        info = self.info
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        self.check_ids("prompt", prompt)
        if len(prompt) >= info.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; the model's length is {info.max_model_len} "
                "with at least one token of the answer",
                "prompt",
            )

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Raise InvalidRequest, naming the parameter, unless these are ids of the model's tokens."""
        vocab_size = self.info.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"{name} has token id {token}; ids are from 0 to {vocab_size - 1}", name
                )

    def _sampling(self, options: Options) -> dict[str, Any]:
        """Fields of SamplingParams: the model's own defaults, and over them what the request gives."""
        known = {field.name for field in fields(SamplingParams)}
        defaults = self.tokenizer.sampling_defaults
        merged: dict[str, Any] = {
            name: int(value) if name == "top_k" else value
            for name, value in defaults.items()
            if name in known
        }
        merged.update((k, v) for k, v in options.sampling.items() if v is not None)
        if merged.get("top_k") == -1:
            merged["top_k"] = 0
        bias = sorted(dict(merged.get("logit_bias") or {}).items())
        self.check_ids("logit_bias", [token for token, _ in bias])
        merged["logit_bias"] = tuple(bias)
        return merged

    def _speculation(self, options: SpeculationOptions, prediction: tuple[int, ...]) -> Speculation:
        auto = AUTO in options.drafters or not options.drafters
        known = (*self.drafter_names, *([PREDICTION] if prediction else []))
        names = [name for name in options.drafters if name != AUTO] or known
        unknown = [name for name in names if name not in known]
        if PREDICTION in unknown:
            raise InvalidRequest(
                f"the drafter {PREDICTION!r} drafts from the request's prediction, but it has none",
                "speculation.drafter",
            )
        if unknown:
            raise InvalidRequest(
                f"there is no drafter {unknown[0]!r}; this server has "
                f"{', '.join(self.drafter_names) or 'none'}",
                "speculation.drafter",
            )
        allowed = self.info.max_tree_nodes
        wanted = allowed if options.max_draft_tokens is None else options.max_draft_tokens
        if not 0 <= wanted <= limits.MAX_TREE_NODES:
            raise InvalidRequest(
                f"max_draft_tokens must be from 0 to {limits.MAX_TREE_NODES}, not {wanted}",
                "speculation.max_draft_tokens",
            )
        if options.verification == "typical" and not options.lossy:
            raise InvalidRequest(
                "verification typical changes the answer's law: set speculation.lossy to consent, or take "
                "coupled, rejection or block",
                "speculation.verification",
            )
        if not options.enabled or not wanted:
            return Speculation()
        predicted = PREDICTION in names
        most_predicted = limits.MAX_PREDICTED_NODES if options.max_draft_tokens is None else wanted
        return Speculation(
            drafters=tuple(names),
            max_draft_tokens=min(wanted, allowed),
            # A block is a chain.
            tree=options.tree and options.verification != "block",
            verification=options.verification,
            auto=auto,
            mode=options.mode or self._coordinator.thresholds.mode,
            prediction=prediction if predicted else (),
            max_predicted_tokens=most_predicted if predicted else 0,
        )


def _check_structure(options: Options) -> None:
    """An answer with a structure ends where that does, and nowhere else."""
    contradictions = {"ignore_eos": options.ignore_eos, "min_tokens": options.min_tokens}
    for name, value in contradictions.items():
        if options.grammar and value:
            raise InvalidRequest(
                f"{name} {value} contradicts the answer's structure, which says when it ends: leave {name} "
                "out",
                name,
            )
