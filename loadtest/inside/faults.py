"""Links between a coordinator and a worker on which things go wrong, on purpose and counted."""

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from protos import speculation_pb2 as pb
from workers.rpc.connection import CLIENT_OPTIONS, SERVER_OPTIONS, TARGET, WorkerKind

_IMPOSSIBLE: Final[dict[str, Any]] = {
    "tokens": 2**32 - 1,
    "parents": 2**30,
    "scores": math.nan,
    "base_len": 2**31,
    "price": math.nan,
    "reason": 99,
}
"""Values that no field of such a name may have."""


class DelayedLink:
    """A TCP proxy that delivers every byte `seconds` after it was sent, in both directions."""

    def __init__(self, address: str, seconds: float) -> None:
        host, port = address.rsplit(":", 1)
        self._peer = (host, int(port))
        self._seconds = seconds
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen; the address to connect to instead."""
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close it."""
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._peer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                # Order is kept: the loop runs callbacks of equal delay in the order they were made.
                loop.call_later(self._seconds, sink.write, data)
        loop.call_later(self._seconds, sink.close)


@dataclass(frozen=True, slots=True)
class Faults:
    """How often something happens to a message on its way.

    `swap`: it leaves behind the next one of its session; `delay`: so many seconds later, others overtake
    it; `corrupt`: a field gets a value that it cannot have. Only messages of the kinds in `hit`, names of
    bodies in protos/speculation.proto, are hit; all if there are none.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    swap: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0
    hit: frozenset[str] = frozenset()
    seed: int = 0


class FaultyLink(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A gRPC proxy in front of a worker. `done` counts what it did, by fault and kind of message."""

    def __init__(self, kind: WorkerKind, address: str, faults: Faults) -> None:
        self.faults = faults
        self.done: Counter[tuple[str, str]] = Counter()
        target = kind is TARGET
        self._to: Any = pb.ToTarget if target else pb.ToDraft
        self._back: Any = pb.FromTarget if target else pb.FromDraft
        self._address = address
        self._rng = random.Random(faults.seed)
        self._worker: grpc.aio.Channel
        self._server: grpc.aio.Server

    async def start(self) -> str:
        """Listen; the address to connect to instead of the worker's."""
        self._worker = grpc.aio.insecure_channel(self._address, options=CLIENT_OPTIONS)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((self,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """Cut all connections."""
        await self._server.stop(0)
        await self._worker.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See grpc.GenericRpcHandler."""
        method = handler_call_details.method
        if not method.endswith("/Connect"):
            passed_on = self._worker.unary_unary(method)

            async def call(request: bytes, context: Any) -> bytes:
                return bytes(await passed_on(request))

            return grpc.unary_unary_rpc_method_handler(call)

        async def connect(frames: AsyncIterator[Any], context: Any) -> None:
            await self._connect(method, frames, context)

        return grpc.stream_stream_rpc_method_handler(
            connect,
            request_deserializer=self._to.FromString,
            response_serializer=self._back.SerializeToString,
        )

    async def _connect(self, method: str, frames: AsyncIterator[Any], context: Any) -> None:
        call = self._worker.stream_stream(
            method,
            request_serializer=self._to.SerializeToString,
            response_deserializer=self._back.FromString,
        )()

        async def up() -> None:
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await self._forward(frames, call.write)
                await call.done_writing()

        upwards = asyncio.create_task(up())
        try:
            await self._forward(call, context.write)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "")
        finally:
            upwards.cancel()
            call.cancel()

    async def _forward(
        self, frames: AsyncIterator[Any], write: Callable[[Any], Awaitable[None]]
    ) -> None:
        behind: dict[int, Any] = {}
        turn = asyncio.Lock()

        async def send(frame: Any) -> None:
            async with turn:
                await write(frame)

        later: set[asyncio.Task[None]] = set()
        try:
            async for frame in frames:
                if not frame.messages:
                    await send(frame)
                for message in frame.messages:
                    out, seconds = self._strike(message, behind)
                    if out and seconds:
                        later.add(
                            asyncio.create_task(_write_later(send, type(frame), out, seconds))
                        )
                    elif out:
                        await send(type(frame)(messages=out))
        finally:
            for task in later:
                task.cancel()

    def _strike(self, message: Any, behind: dict[int, Any]) -> tuple[list[Any], float]:
        """What leaves in the place of a message, and how much later."""
        kind = message.WhichOneof("body")
        faults = self.faults
        out = [message]
        held = [behind.pop(message.session)] if message.session in behind else []
        seconds = 0.0
        if not faults.hit or kind in faults.hit:
            chances = {
                name: getattr(faults, name)
                for name in ("drop", "duplicate", "swap", "corrupt", "delay")
            }
            fault = next((name for name, p in chances.items() if self._rng.random() < p), None)
            if fault == "corrupt" and not _corrupt(getattr(message, kind), self._rng):
                fault = None
            if fault is not None:
                self.done[fault, kind] += 1
            match fault:
                case "drop":
                    out = []
                case "duplicate":
                    out = [message, message]
                case "swap":
                    out, behind[message.session] = [], message
                case "delay":
                    seconds = faults.delay_s
        return [*out, *held], seconds


async def _write_later(
    write: Callable[[Any], Awaitable[None]], frame: type, messages: list[Any], seconds: float
) -> None:
    await asyncio.sleep(seconds)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await write(frame(messages=messages))


def _corrupt(body: Any, rng: random.Random) -> bool:
    """Give one field an impossible value; False if there is none to choose."""
    found = [(body, field.name) for field, _ in body.ListFields() if field.name in _IMPOSSIBLE]
    if hasattr(body, "tree"):
        found += [(body.tree, f.name) for f, _ in body.tree.ListFields() if f.name in _IMPOSSIBLE]
    if not found:
        return False
    owner, name = rng.choice(found)
    if name in ("tokens", "parents", "scores"):
        values = getattr(owner, name)
        values[rng.randrange(len(values))] = _IMPOSSIBLE[name]
    else:
        setattr(owner, name, _IMPOSSIBLE[name])
    return True
