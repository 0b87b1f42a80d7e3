"""The target worker's server: sessions on streams, one model behind them."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import grpc.aio
import torch
from transformers import AutoTokenizer

from protos import speculation_pb2 as pb
from protos import speculation_pb2_grpc as pb_grpc
from workers import checkpoint
from workers.draft.config import PredictionConfig
from workers.draft.drafter import Drafter
from workers.draft.group import DrafterGroup
from workers.engine.kv_cache import KVPool
from workers.engine.loading import load_model
from workers.engine.model import Model
from workers.engine.prefix_cache import PrefixCache
from workers.engine.tensor_parallel import Leader, Place, Ranks
from workers.engine.threads import use_threads
from workers.grammar import GrammarError, Grammars
from workers.leases import LeasedReceiver, LeaseTable
from workers.memory import available_bytes
from workers.rpc import codec
from workers.rpc import messages as m
from workers.rpc.connection import Channel, Sessions, serve_stream
from workers.rpc.errors import InvalidRequest, ProtocolError
from workers.rpc.security import LOCAL, Security
from workers.rpc.server import WorkerServer, new_worker_id
from workers.target import ranks
from workers.target.beside import BesideSession
from workers.target.config import TargetConfig
from workers.target.counters import Counters
from workers.target.loop import TargetLoop
from workers.target.measure import measure_step_times
from workers.target.policy import Policy
from workers.target.ranks import Watchdog
from workers.target.scheduler import Scheduler
from workers.target.session import NO_FEATURES, TargetSession
from workers.vocabulary import vocabulary_fingerprint

logger = logging.getLogger(__name__)


class TargetWorker(pb_grpc.TargetWorkerServicer):
    """A model, the loop that runs it, and the server in front.

    `start` listens and returns; everything but the model's thread runs on the calling event loop.
    Leases are granted by `leases.hold`; a session starts with an Open that carries one.
    """

    def __init__(
        self,
        config: TargetConfig,
        made: Mapping[str, Drafter] | None = None,
        ranks_meet_in: Path | None = None,
        security: Security = LOCAL,
    ) -> None:
        """Load the model and the drafters beside it, or take those given by name.

        Where the model is split, this is rank 0, and meets the others in a folder; see workers.target.ranks.

        Slow; raises CheckpointError or ValueError if the model cannot be served.
        """
        use_threads(config.num_threads)
        folder = checkpoint.resolve(config.model)
        self._ranks: Ranks | None = None
        if ranks_meet_in is not None:
            place = Place(0, config.tensor_parallel_size, ranks_meet_in)
            self._ranks = Ranks(place, config.device)
        self._model = load_model(folder, config.dtype, config.device, self._ranks)
        if config.features is not None:
            self._model.keep_features(config.features)
        info = self._model.info
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._eos_token_ids = info.eos_token_ids | {self._tokenizer.eos_token_id} - {None}
        self._grammars = Grammars(
            self._tokenizer.backend_tokenizer, info.vocab_size, frozenset(self._eos_token_ids)
        )
        self._max_model_len = config.max_model_len or info.max_model_len
        if self._max_model_len > info.max_model_len:
            raise ValueError(
                f"max_model_len {self._max_model_len} is more than the model's {info.max_model_len}"
            )
        self._pool = self._model.pool(_num_slots(self._model, config, self._max_model_len))
        self._counters = Counters()
        self._prefix_cache = PrefixCache(self._pool) if config.enable_prefix_caching else None
        times = measure_step_times(self._model, self._pool, config.max_num_batched_tokens)
        self._scheduler = Scheduler(
            self._pool,
            self._prefix_cache,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.scheduling_policy,
            Policy(times, self._counters),
            self._counters,
        )
        # Never started: they take turns with the model, on its thread.
        self._beside = DrafterGroup(
            (*config.drafters, PredictionConfig()),
            config.model,
            lambda send: send(),
            made,
            # Of a split model only a part is here.
            self._model if self._ranks is None else None,
        )
        self._loop = TargetLoop(
            self._model,
            self._scheduler,
            self._deliver_soon,
            self._counters,
            config.num_threads,
            self._beside.turn,
            None if self._ranks is None else Watchdog(ranks.STEP_SECONDS),
        )
        if config.chat_template is not None:
            self._tokenizer.chat_template = Path(config.chat_template).read_text()
        self._tokenizer_files = _tokenizer_files(
            self._tokenizer, info.sampling_defaults, config.tool_call_parser
        )
        self.leases = LeaseTable()
        self.info = m.WorkerInfo(
            worker_id=new_worker_id(),
            process_id=os.getpid(),
            host=socket.gethostname(),
            max_sessions=config.max_num_seqs,
            max_tree_nodes=config.max_draft_tokens,
            model_id=config.model_id,
            weights_fingerprint=info.weights_fingerprint,
            vocabulary_fingerprint=vocabulary_fingerprint(self._tokenizer.backend_tokenizer),
            vocab_size=info.vocab_size,
            max_model_len=self._max_model_len,
            dtype=info.dtype,
            row_invariant=info.row_invariant,
            feature_width=self._model.kv_shape.feature_width,
            drafters=self._beside.infos,
            obeys_priority=config.scheduling_policy == "priority",
        )
        self._server = WorkerServer(
            security,
            lambda server: pb_grpc.add_TargetWorkerServicer_to_server(self, server),
        )
        self._event_loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> str:
        """Where the worker listens; empty before `start`."""
        return self._server.address

    async def start(self) -> None:
        """Start the loop and listen."""
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()
        await self._server.start()
        logger.info(
            "target %s on %s: %s, %d KV slots, max_model_len %d",
            self.info.model_id,
            self.address,
            self.info.dtype,
            self._pool.num_slots,
            self._max_model_len,
        )

    async def stop(self) -> None:
        """Stop listening, end all sessions and the loop."""
        await self._server.stop()
        self._loop.stop()
        self._beside.stop()
        if self._ranks is not None:
            cast(Leader, self._model.backend).stop()
            self._ranks.leave()

    async def reload(self, weights: Mapping[str, str]) -> None:
        """See DrafterGroup.reload, for the drafters beside the target."""
        await self._beside.reload(weights)

    def check_health(self) -> None:
        """Raise RuntimeError if a thread died."""
        if not self._loop.alive:
            raise RuntimeError("the target's loop thread is dead")

    def recent_steps(self) -> list[tuple[float, int]]:
        """See TargetLoop."""
        return self._loop.recent_steps()

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.Tokenizer:
        """See speculation.proto."""
        return self._tokenizer_files

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WorkerStatus:
        """See speculation.proto."""
        return self.status()

    def status(self) -> pb.WorkerStatus:
        """What the worker holds and has done."""
        running = len(self._scheduler.running)
        price, pace = self._scheduler.policy.price(running)
        return pb.WorkerStatus(
            running_sessions=running,
            waiting_sessions=len(self._scheduler.waiting),
            leases=len(self.leases),
            kv_slots=self._pool.num_slots,
            kv_free_slots=self._pool.available_slots,
            prefix_queries=self._prefix_cache.queries if self._prefix_cache else 0,
            prefix_hits=self._prefix_cache.hits if self._prefix_cache else 0,
            **asdict(self._counters),
            price=price,
            rate=pace * running,
            drift=self._scheduler.policy.times.drift,
            **self._beside.counters,
        )

    async def Connect(
        self,
        request_iterator: AsyncIterator[pb.ToTarget],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.FromTarget]:
        """See speculation.proto."""
        sessions = Sessions(
            codec.from_target_codec(),
            codec.to_target_codec(self.info.vocab_size),
        )
        hello = pb.FromTarget(info=codec.encode_info(self.info))
        async for frame in serve_stream(request_iterator, context, sessions, hello, self._open):
            yield frame

    def _open(self, channel: Channel, request: m.OpenTarget) -> "_TargetReceiver":
        if len(request.tokens) >= self._max_model_len:
            raise InvalidRequest(
                f"{len(request.tokens)} tokens leave no room below the model's length of "
                f"{self._max_model_len}"
            )
        if request.drafters:
            self._beside.check(request.drafters)
        session = TargetSession(
            request,
            self._pool.sequence(),
            self._tokenizer.backend_tokenizer,
            self._eos_token_ids,
            self._max_model_len,
            self.info.max_tree_nodes,
            self._counters,
            self._scheduler.policy.outlooks,
        )
        receiver = _TargetReceiver(channel, self.leases, request.lease_id, self._loop, session)
        if session.finished is not None:
            # Only the news that the answer is complete got lost.
            receiver.send(session.finished)
            return receiver
        if request.drafters:
            session.beside = BesideSession.open(self._beside, request, receiver.drafted)
        if request.grammar:
            receiver.compiling = asyncio.create_task(self._compile(session))
        else:
            self._loop.submit(session)
        return receiver

    async def _compile(self, session: TargetSession) -> None:
        """Submit a session once its grammar is there: neither the event loop nor a step waits for that."""
        try:
            grammar = await asyncio.to_thread(self._grammars.start, session.request.grammar)
            session.obey(grammar)
        except GrammarError as error:
            session.send(m.Failed("INVALID_ARGUMENT", str(error)))
        else:
            self._loop.submit(session)

    def _deliver_soon(self, results: Sequence[tuple[TargetSession, Any]]) -> None:
        self._event_loop.call_soon_threadsafe(_deliver, results)


def _deliver(results: Sequence[tuple[TargetSession, Any]]) -> None:
    for session, message in results:
        session.send(message)


class _TargetReceiver(LeasedReceiver):
    """What the coordinator says to one session."""

    def __init__(
        self,
        channel: Channel,
        leases: LeaseTable,
        lease_id: str,
        loop: TargetLoop,
        session: TargetSession,
    ) -> None:
        super().__init__(channel, leases, lease_id)
        self._loop = loop
        self.session = session
        self.compiling: asyncio.Task[None] | None = None
        session.send = self.send

    def handle(self, message: Any) -> None:
        match message:
            case m.Propose(drafter, base_len, tree):
                self.session.proposals.put(drafter, base_len, tree)
            case m.FeaturesWanted(first_position):
                self.session.features_from = (
                    NO_FEATURES if first_position is None else first_position
                )
            case m.Asked(beside, elsewhere):
                self.session.proposals.elsewhere = elsewhere
                if self.session.beside is not None:
                    self.session.beside.asked = beside
            case _:
                raise ProtocolError(f"{type(message).__name__} for a session that is open")
        self._loop.notice()

    def drafted(self, message: Any) -> None:
        """A drafter beside the target has proposed, or failed, in its turn."""
        beside = self.session.beside
        assert beside is not None
        match message:
            case m.Proposal(base_len, tree, drafter):
                self.session.proposals.put(drafter, base_len, tree)
            case m.Failed():
                beside.told -= {message.drafter}
                beside.asked -= {message.drafter}
        self._loop.say(self.session, message)

    def ended(self) -> None:
        if self.compiling is not None:
            self.compiling.cancel()
        self.session.stages.end({"slipstream.tokens": len(self.session.tokens)})
        if self.session.beside is not None:
            self.session.beside.close()
        # The loop wakes up by this, and lets drafters drop theirs in their turn.
        self._loop.close(self.session)


def _num_slots(model: Model, config: TargetConfig, max_model_len: int) -> int:
    """Slots of the KV pool: a fraction of the free memory, and no more than sessions can fill."""
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        budget = config.gpu_memory_utilization * total - (total - free)
    else:
        # All ranks share this machine's memory.
        available = available_bytes() / config.tensor_parallel_size
        budget = config.gpu_memory_utilization * available
    slot_bytes = model.kv_shape.slot_bytes
    slots = int(min(budget // slot_bytes, config.max_num_seqs * (max_model_len + KVPool.GRAIN)))
    if config.num_gpu_blocks_override:
        slots = config.num_gpu_blocks_override * KVPool.GRAIN
    if slots < max_model_len and config.num_gpu_blocks_override:
        raise ValueError(
            f"max_model_len {max_model_len} needs as many tokens of KV cache, but num_gpu_blocks_override "
            f"{config.num_gpu_blocks_override} makes {slots}: blocks have {KVPool.GRAIN} tokens"
        )
    if slots < max_model_len:
        raise ValueError(
            f"max_model_len {max_model_len} needs {max_model_len * slot_bytes / 2**20:.0f} MiB of KV "
            f"cache, but it has {max(0, slots)} tokens ({max(0, slots) * slot_bytes / 2**20:.0f} MiB) "
            f"at gpu_memory_utilization {config.gpu_memory_utilization} of "
            f"{budget / config.gpu_memory_utilization / 2**20:.0f} MiB: lower max_model_len or raise "
            "gpu_memory_utilization or num_gpu_blocks_override"
        )
    return slots


def _tokenizer_files(
    tokenizer: Any, sampling_defaults: Mapping[str, float], tool_call_parser: str | None
) -> pb.Tokenizer:
    template = tokenizer.chat_template or ""
    return pb.Tokenizer(
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        chat_template=template if isinstance(template, str) else template.get("default", ""),
        special_tokens={
            name: value
            for name, value in tokenizer.special_tokens_map.items()
            if isinstance(value, str)
        },
        sampling_defaults=sampling_defaults,
        tool_call_parser=tool_call_parser or "",
    )
