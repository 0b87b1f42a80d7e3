"""The coordinator: turns requests into generations and knows the model behind them.

Both front doors, HTTP and gRPC, come here with the same meaning.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from deployments.config import AppConfig, CoordinatorThresholds
from deployments.lease import WorkerPool
from deployments.round import Generation, GenerationRequest, Speculation
from deployments.tokenizer import PromptTokenizer
from protos import speculation_pb2 as pb
from workers import limits
from workers.request import SamplingParams, StopRules
from workers.rpc import messages as m
from workers.rpc.errors import InvalidRequest, NotFound, ServiceError, Unavailable

logger = logging.getLogger(__name__)

AUTO = "auto"
LEARN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as its target introduced it."""

    info: m.WorkerInfo
    tokenizer: PromptTokenizer


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What a request says about speculation; None and empty mean the default."""

    enabled: bool = True
    drafters: tuple[str, ...] = ()
    max_draft_tokens: int | None = None
    tree: bool = True


@dataclass(frozen=True, slots=True)
class Options:
    """What a request says about its answer, alike for HTTP and gRPC; None means the default."""

    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    speculation: SpeculationOptions = SpeculationOptions()
    timeout_s: float | None = None


class Coordinator:
    """Serves one model: knows its tokenizer and limits, and starts generations.

    `model` raises Unavailable until a target has introduced itself.
    """

    def __init__(self, config: AppConfig, targets: WorkerPool, drafts: WorkerPool | None) -> None:
        self.config = config
        self.thresholds = CoordinatorThresholds()
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._targets = targets
        self._drafts = drafts
        self._model: ServedModel | None = None
        self._learning = asyncio.create_task(self._learn())

    @property
    def model(self) -> ServedModel:
        """The model that is served."""
        if self._model is None:
            raise Unavailable("no target worker has introduced itself yet; try again later")
        return self._model

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The drafters that requests may name."""
        return tuple(draft.name for draft in self.config.drafts)

    def check_model(self, name: str | None) -> None:
        """Raise NotFound unless `name` is the served model or left out."""
        if name and name != self.config.model_id:
            raise NotFound(
                f"the model {name!r} does not exist; this server has {self.config.model_id!r}"
            )

    def request(self, prompt: Sequence[int], options: Options) -> GenerationRequest:
        """A request within the model's limits; raises InvalidRequest naming the one it breaks."""
        model = self.model
        if not prompt:
            raise InvalidRequest("the prompt has no tokens", "prompt")
        highest = max(prompt)
        if highest >= model.info.vocab_size or min(prompt) < 0:
            raise InvalidRequest(
                f"prompt has token id {highest}; ids are below {model.info.vocab_size}", "prompt"
            )
        room = model.info.max_model_len - len(prompt)
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; the model's length is "
                f"{model.info.max_model_len} with at least one token of the answer",
                "prompt",
            )
        if options.max_tokens is not None and options.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens is {options.max_tokens}, but after a prompt of {len(prompt)} tokens the "
                f"model's length of {model.info.max_model_len} leaves {room}",
                "max_tokens",
            )
        if any(not 0 <= token < model.info.vocab_size for token in options.stop_token_ids):
            raise InvalidRequest(
                f"stop_token_ids must be from 0 to {model.info.vocab_size - 1}", "stop_token_ids"
            )
        try:
            stopping = StopRules(
                max_tokens=room if options.max_tokens is None else options.max_tokens,
                strings=options.stop,
                token_ids=frozenset(options.stop_token_ids),
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        limit = self.thresholds.request_limit_s
        return GenerationRequest(
            prompt=tuple(prompt),
            sampling=options.sampling,
            stopping=stopping,
            logprobs=options.logprobs,
            speculation=self._speculation(options.speculation),
            deadline=time.monotonic() + min(limit, options.timeout_s or limit),
        )

    def generation(self, request: GenerationRequest) -> Generation:
        """A generation for the request; it starts when its pieces are iterated."""
        return Generation(request, self._targets, self._drafts, self.thresholds.max_patience_ms)

    async def workers(self) -> list[tuple[m.WorkerInfo, str, pb.WorkerStatus]]:
        """(introduction, role, status) of the workers that are connected, at least one of each pool."""
        found = []
        for role, pool in (("target", self._targets), ("draft", self._drafts)):
            if pool is None:
                continue
            if not pool.connections():
                with contextlib.suppress(ServiceError):
                    async with pool.lease(time.monotonic() + LEARN_SECONDS):
                        pass
            for connection in pool.connections():
                with contextlib.suppress(grpc.aio.AioRpcError):
                    status = await connection.stub.GetStatus(
                        pb.GetStatusRequest(), timeout=LEARN_SECONDS
                    )
                    found.append((connection.info, role, status))
        return found

    async def _learn(self) -> None:
        """Get to know the model from the first target that answers."""
        while self._model is None:
            try:
                async with self._targets.lease() as lease:
                    connection = lease.connection
                    files = await connection.stub.GetTokenizer(
                        pb.GetTokenizerRequest(), timeout=LEARN_SECONDS
                    )
                    tokenizer = await asyncio.to_thread(PromptTokenizer, files)
                    self._model = ServedModel(connection.info, tokenizer)
            except Exception:
                # Whatever is wrong now, the next target may be right; /health says that none was yet.
                logger.exception("a target could not be asked for its model; trying again")
                await asyncio.sleep(1.0)
        logger.info("serving %s: %s", self.config.model_id, self._model.info)

    def _speculation(self, options: SpeculationOptions) -> Speculation:
        names = [name for name in options.drafters if name != AUTO] or self.drafter_names
        unknown = [name for name in names if name not in self.drafter_names]
        if unknown:
            raise InvalidRequest(
                f"there is no drafter {unknown[0]!r}; this server has "
                f"{', '.join(self.drafter_names) or 'none'}",
                "speculation.drafter",
            )
        allowed = self.model.info.max_tree_nodes
        wanted = allowed if options.max_draft_tokens is None else options.max_draft_tokens
        if not 0 <= wanted <= limits.MAX_TREE_NODES:
            raise InvalidRequest(
                f"max_draft_tokens must be from 0 to {limits.MAX_TREE_NODES}, not {wanted}",
                "speculation.max_draft_tokens",
            )
        return Speculation(
            drafters=tuple(names) if options.enabled else (),
            max_draft_tokens=min(wanted, allowed),
            tree=options.tree,
        )


def sampling_params(
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    choice: int = 0,
) -> SamplingParams:
    """Sampling with OpenAI's defaults for what is None; an unseeded request gets a seed of its own.

    Raises InvalidRequest for a value out of range.
    """
    try:
        return SamplingParams(
            temperature=1.0 if temperature is None else temperature,
            top_k=0 if top_k is None or top_k == -1 else top_k,
            top_p=1.0 if top_p is None else top_p,
            min_p=0.0 if min_p is None else min_p,
            seed=secrets.randbits(63) if seed is None else seed,
            choice=choice,
        )
    except ValueError as error:
        raise InvalidRequest(str(error), str(error).split(" ", 1)[0]) from error
