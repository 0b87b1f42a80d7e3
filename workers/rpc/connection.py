"""Connections between a coordinator and its workers, and the sessions multiplexed on them.

One bidirectional stream joins a coordinator and a worker. Each session has a `Channel` of its own on
it; what sessions send while a frame is being written leaves together in the next one. Messages that
only the newest state of matters for are conflated while they wait: a newer tree of a drafter replaces
the older, a later commit is joined to the earlier. So a slow peer delays nobody but itself.

Everything here runs on one event loop; workers reach it from their own threads with
`loop.call_soon_threadsafe`.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from protos import speculation_pb2 as pb
from protos import speculation_pb2_grpc as pb_grpc
from workers import limits
from workers.rpc import codec
from workers.rpc import messages as m
from workers.rpc.errors import FailedPrecondition, ServiceError, Unavailable, from_code
from workers.rpc.security import LOCAL, Security

logger = logging.getLogger(__name__)

MESSAGE_OPTIONS: Final = [
    ("grpc.max_receive_message_length", limits.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", limits.MAX_MESSAGE_BYTES),
]

# A dead peer is noticed within three seconds although no data flows; gRPC's own defaults are minutes.
CLIENT_OPTIONS: Final = [
    *MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Two connections of one process to the same worker must not share a socket.
    ("grpc.use_local_subchannel_pool", 1),
]
SERVER_OPTIONS: Final = [
    *MESSAGE_OPTIONS,
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    # A port that another process holds is an error, not a second listener.
    ("grpc.so_reuseport", 0),
]

CONNECT_TIMEOUT_SECONDS: Final = 5.0


class Receiver(Protocol):
    """The local end of a session: what is called when the peer says something.

    Both calls are made on the event loop and must not block.
    """

    def receive(self, message: Any) -> None:
        """A message of this session arrived."""

    def disconnected(self, error: ServiceError) -> None:
        """The connection is gone; nothing will arrive any more."""


class Outbox:
    """Messages waiting for the stream, conflated by session; `sent` counts those that have left."""

    def __init__(self, encoder: codec.Codec) -> None:
        self._encoder = encoder
        self._waiting: dict[object, tuple[int, Any]] = {}
        self._unique = itertools.count()
        self._wake = asyncio.Event()
        self._closed = False
        self.sent = 0

    def put(self, session: int, message: Any) -> None:
        """Queue a message; it leaves with the next frame."""
        match message:
            case m.Propose(drafter) | m.Proposal(drafter=drafter):
                # The newest goes behind what was said since the older one.
                key: object = (session, drafter)
                _, older = self._waiting.pop(key, (session, None))
                match message, older:
                    case m.Proposal(base_len), m.Proposal(base_len=base) if base == base_len:
                        # For the peer it is the first of its base, if the older one was.
                        message = replace(message, again=older.again, hit=older.hit)
            case m.FeaturesWanted() | m.Asked():
                key = (session, type(message))
            case m.Commit():
                key = (session, m.Commit)
                if key in self._waiting:
                    message = self._waiting[key][1].followed_by(message)
            case _:
                key = next(self._unique)
        self._waiting[key] = (session, message)
        self._wake.set()

    def discard(self, session: int) -> None:
        """Forget what waits for `session`."""
        for key in [key for key, (owner, _) in self._waiting.items() if owner == session]:
            del self._waiting[key]

    def close(self) -> None:
        """End `frames` once all that waits has left."""
        self._closed = True
        self._wake.set()

    async def frames(self) -> AsyncIterator[Any]:
        """Frames to write, each with all that had gathered; ends after `close`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._waiting:
                items = list(self._waiting.values())
                self._waiting.clear()
                self.sent += len(items)
                yield self._encoder.encode(items)
            elif self._closed:
                return
            if self._closed:
                self._wake.set()


class Channel:
    """One session's sending end. `close` tells the peer; both ends forget the session."""

    def __init__(self, session: int, sessions: "Sessions") -> None:
        self._session = session
        self._sessions = sessions

    def send(self, message: Any) -> None:
        """Queue a message for the peer; a closed channel ignores it."""
        self._sessions.send(self._session, message)

    def forget(self) -> None:
        """Stop receiving; what was queued still leaves."""
        self._sessions.forget(self._session)

    def close(self) -> None:
        """Tell the peer that the session is over, and stop receiving."""
        self._sessions.discard(self._session)
        self._sessions.send(self._session, m.Close())
        self._sessions.forget(self._session)


class Sessions:
    """The sessions of one stream: who receives what, and what waits to be written.

    `received` counts the messages that have come.
    """

    def __init__(self, encoder: codec.Codec, decoder: codec.Codec) -> None:
        self.outbox = Outbox(encoder)
        self._decoder = decoder
        self._receivers: dict[int, Receiver | None] = {}
        self.received = 0

    def add(self, session: int, receiver_of: Callable[[Channel], Receiver]) -> Channel:
        """Register a session; `receiver_of` makes its receiver from its channel.

        A ServiceError that it raises is told to the peer: the session does not come to be.
        """
        channel = Channel(session, self)
        # The receiver may send already while it is being made.
        self._receivers[session] = None
        try:
            receiver = receiver_of(channel)
        except ServiceError as error:
            channel.send(m.Failed(error.code.name, str(error)))
            channel.forget()
            raise
        if session in self._receivers:
            self._receivers[session] = receiver
        return channel

    def send(self, session: int, message: Any) -> None:
        if session in self._receivers:
            self.outbox.put(session, message)

    def discard(self, session: int) -> None:
        self.outbox.discard(session)

    def forget(self, session: int) -> None:
        self._receivers.pop(session, None)

    def dispatch(self, frame: Any, opened: Callable[[int, Any], None] | None = None) -> None:
        """Hand the messages of a frame to their sessions.

        A message for an unknown session goes to `opened` if it starts one, and is dropped otherwise:
        it crossed a close on the way. Raises ProtocolError for a frame that breaks a rule.
        """
        for session, message in self._decoder.decode(frame):
            self.received += 1
            receiver = self._receivers.get(session)
            if receiver is not None:
                receiver.receive(message)
            elif opened is not None and isinstance(message, m.OpenTarget | m.OpenDraft):
                opened(session, message)

    def disconnect(self, error: ServiceError) -> None:
        """Tell every session that the stream is gone."""
        receivers = [receiver for receiver in self._receivers.values() if receiver is not None]
        self._receivers.clear()
        self.outbox.close()
        for receiver in receivers:
            receiver.disconnected(error)


@dataclass(frozen=True)
class WorkerKind:
    """What differs between connections to the two kinds of worker."""

    name: str
    stub: Callable[[grpc.aio.Channel], Any]
    first_frame: type
    encoder: Callable[[], codec.Codec]
    decoder: Callable[[int], codec.Codec]


TARGET: Final = WorkerKind(
    name="target",
    stub=pb_grpc.TargetWorkerStub,
    first_frame=pb.ToTarget,
    encoder=codec.to_target_codec,
    decoder=codec.from_target_codec,
)
DRAFT: Final = WorkerKind(
    name="draft",
    stub=pb_grpc.DraftWorkerStub,
    first_frame=pb.ToDraft,
    encoder=codec.to_draft_codec,
    decoder=codec.from_draft_codec,
)


class Connection:
    """A coordinator's stream to one worker.

    Made by `connect`. `info` is the worker's introduction, `stub` makes its other calls, with `metadata`.
    `alive` turns false when the stream ends, and every session is told.
    """

    def __init__(self, kind: WorkerKind, address: str, security: Security) -> None:
        self.kind = kind
        self.address = address
        self.alive = True
        self.info: m.WorkerInfo
        self.metadata = security.metadata
        self._channel = security.channel(address, CLIENT_OPTIONS)
        self.stub = kind.stub(self._channel)
        self._sessions: Sessions
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls, kind: WorkerKind, address: str, peer_id: str, security: Security = LOCAL
    ) -> "Connection":
        """Connect and shake hands.

        Raises Unavailable if nothing answers within five seconds, or nobody with the right certificate,
        Unauthenticated if the worker wants another token, and FailedPrecondition if it speaks another
        version of the protocol.
        """
        self = cls(kind, address, security)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                await self._channel.channel_ready()
                call = self.stub.Connect(metadata=self.metadata)
                hello = pb.Hello(protocol_version=limits.PROTOCOL_VERSION, peer_id=peer_id)
                await call.write(kind.first_frame(hello=hello))
                first = await call.read()
                if first is grpc.aio.EOF or not first.HasField("info"):
                    await _raise_status(call, f"{kind.name} worker at {address}")
            self.info = codec.decode_info(first.info)
        except TimeoutError as error:
            await self._channel.close()
            raise Unavailable(f"no {kind.name} worker answers at {address}") from error
        except grpc.aio.AioRpcError as error:
            await self._channel.close()
            raise from_code(error.code().name, error.details() or "") from error
        except BaseException:
            await self._channel.close()
            raise
        vocab_size = self.info.vocab_size or codec.ANY_VOCABULARY
        self._sessions = Sessions(kind.encoder(), kind.decoder(vocab_size))
        self._tasks = [
            asyncio.create_task(self._write(call)),
            asyncio.create_task(self._read(call)),
        ]
        return self

    @property
    def messages(self) -> tuple[int, int]:
        """Messages sent and received so far; several share a frame."""
        return self._sessions.outbox.sent, self._sessions.received

    def open(self, message: Any, receiver_of: Callable[[Channel], Receiver]) -> Channel:
        """Start a session with an Open message."""
        if not self.alive:
            raise Unavailable(f"the connection to {self.kind.name} {self.address} is closed")
        channel = self._sessions.add(next(self._numbers), receiver_of)
        channel.send(message)
        return channel

    async def close(self) -> None:
        """End the stream; sessions that are still open are told."""
        self._ended(Unavailable(f"the connection to {self.kind.name} {self.address} was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            async for frame in self._sessions.outbox.frames():
                await call.write(frame)
            await call.done_writing()

    async def _read(self, call: Any) -> None:
        reason: ServiceError = Unavailable(f"{self.kind.name} {self.address} ended the stream")
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                self._sessions.dispatch(frame)
            await _raise_status(call, f"{self.kind.name} worker at {self.address}")
        except grpc.aio.AioRpcError as error:
            reason = Unavailable(
                f"lost {self.kind.name} {self.address}: {error.code().name} {error.details()}"
            )
        except ServiceError as error:
            reason = error
            call.cancel()
        finally:
            self._ended(reason)

    def _ended(self, reason: ServiceError) -> None:
        if self.alive:
            self.alive = False
            logger.info("connection to %s %s ended: %s", self.kind.name, self.address, reason)
            self._sessions.disconnect(reason)


async def _raise_status(call: Any, peer: str) -> None:
    """Raise what ended the call; a clean end is an error too where it is not expected."""
    code = await call.code()
    details = await call.details()
    if code is grpc.StatusCode.OK:
        raise Unavailable(f"{peer} ended the stream")
    raise from_code(code.name, f"{peer}: {details}")


async def serve_stream(
    frames: AsyncIterator[Any],
    context: grpc.aio.ServicerContext[Any, Any],
    sessions: Sessions,
    first_frame: Any,
    opened: Callable[[Channel, Any], Receiver],
) -> AsyncIterator[Any]:
    """The worker's side of Connect: shake hands, then read and write until either side ends.

    `opened` is called with the channel and the Open message of each new session; it returns the
    session's receiver or raises a ServiceError to refuse it. Every session is told when the stream
    ends, whatever ends it.
    """
    peer = context.peer()
    try:
        hello = await anext(frames)
        if not hello.HasField("hello"):
            raise FailedPrecondition("the first frame must introduce the peer")
        codec.check_version(hello.hello.protocol_version)
    except StopAsyncIteration:
        return
    except ServiceError as error:
        await context.abort(error.code, str(error))
    yield first_frame

    failure: list[ServiceError] = []

    def start(session: int, message: Any) -> None:
        with contextlib.suppress(ServiceError):
            sessions.add(session, lambda channel: opened(channel, message))

    async def read() -> None:
        try:
            async for frame in frames:
                sessions.dispatch(frame, start)
        except ServiceError as error:
            failure.append(error)
        finally:
            sessions.outbox.close()

    reader = asyncio.create_task(read())
    try:
        async for frame in sessions.outbox.frames():
            yield frame
        if failure:
            logger.warning("closing the connection of %s: %s", peer, failure[0])
            await context.abort(failure[0].code, str(failure[0]))
    finally:
        reader.cancel()
        sessions.disconnect(Unavailable(f"the connection of {peer} ended"))
