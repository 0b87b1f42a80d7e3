"""The draft worker's server: sessions on streams, drafters behind them."""

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc.aio

from protos import speculation_pb2 as pb
from protos import speculation_pb2_grpc as pb_grpc
from workers import limits
from workers.draft import drafters
from workers.draft.config import DraftConfig
from workers.draft.drafter import Drafter
from workers.draft.loop import DraftLoop
from workers.draft.session import DraftSession
from workers.leases import LeasedReceiver, LeaseTable
from workers.rpc import codec
from workers.rpc import messages as m
from workers.rpc.connection import Channel, Sessions, serve_stream
from workers.rpc.errors import InvalidRequest, ProtocolError
from workers.rpc.server import WorkerServer, new_worker_id

logger = logging.getLogger(__name__)


class DraftWorker(pb_grpc.DraftWorkerServicer):
    """Drafters, the loop that runs them, and the server in front.

    `start` listens and returns. Leases are granted by `leases.hold`; a session starts with an Open that
    carries one.
    """

    def __init__(self, config: DraftConfig, made: Mapping[str, Drafter] | None = None) -> None:
        """Make the drafters of the config, or take those given by name."""
        self._drafters = made or {d.name: drafters.make(d, config.target) for d in config.drafters}
        self._loops = {
            name: DraftLoop(name, drafter, self._deliver_soon)
            for name, drafter in self._drafters.items()
        }
        self._numbers = itertools.count(1)
        self.leases = LeaseTable()
        self.info = m.WorkerInfo(
            worker_id=new_worker_id(),
            process_id=os.getpid(),
            host=socket.gethostname(),
            max_tree_nodes=limits.MAX_TREE_NODES,
            drafters=tuple(
                m.DrafterInfo(
                    d.name,
                    d.kind,
                    needs_features=self._drafters[d.name].feature_window > 0,
                    vocabulary_fingerprint=self._drafters[d.name].vocabulary_fingerprint,
                    feature_window=self._drafters[d.name].feature_window,
                )
                for d in config.drafters
            ),
        )
        self._server = WorkerServer(
            lambda server: pb_grpc.add_DraftWorkerServicer_to_server(self, server)
        )
        self._event_loop: asyncio.AbstractEventLoop

    @property
    def num_sessions(self) -> int:
        """Sessions that are open, once for each of their drafters."""
        return sum(loop.num_sessions for loop in self._loops.values())

    @property
    def address(self) -> str:
        """Where the worker listens; empty before `start`."""
        return self._server.address

    async def start(self) -> None:
        """Start the loop and listen."""
        self._event_loop = asyncio.get_running_loop()
        for loop in self._loops.values():
            loop.start()
        await self._server.start()
        logger.info("draft worker on %s: %s", self.address, ", ".join(self._drafters))

    async def stop(self) -> None:
        """Stop listening, end all sessions and the loop."""
        await self._server.stop()
        for loop in self._loops.values():
            loop.stop()

    def check_health(self) -> None:
        """Raise RuntimeError if the loop died."""
        for loop in self._loops.values():
            if not loop.alive:
                raise RuntimeError(f"the thread of drafter {loop.name} is dead")

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WorkerStatus:
        """See speculation.proto."""
        return pb.WorkerStatus(running_sessions=self.num_sessions, leases=len(self.leases))

    async def Connect(
        self,
        request_iterator: AsyncIterator[pb.ToDraft],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[pb.FromDraft]:
        """See speculation.proto."""
        sessions = Sessions(codec.from_draft_codec(), codec.to_draft_codec())
        hello = pb.FromDraft(info=codec.encode_info(self.info))
        async for frame in serve_stream(request_iterator, context, sessions, hello, self._open):
            yield frame

    def _open(self, channel: Channel, request: m.OpenDraft) -> "_DraftReceiver":
        unknown = [name for name in request.drafters if name not in self._drafters]
        if unknown or not request.drafters:
            raise InvalidRequest(
                f"drafters {list(request.drafters)}: this worker has {', '.join(self._drafters)}"
            )
        receiver = _DraftReceiver(channel, self.leases, request, self._loops)
        for name in request.drafters:
            session = DraftSession(next(self._numbers), request, receiver.send)
            receiver.sessions[name] = session
            self._loops[name].open(session)
        return receiver

    def _deliver_soon(self, results: Sequence[tuple[DraftSession, Any]]) -> None:
        self._event_loop.call_soon_threadsafe(_deliver, results)


def _deliver(results: Sequence[tuple[DraftSession, Any]]) -> None:
    for session, message in results:
        session.send(message)


class _DraftReceiver(LeasedReceiver):
    """What the coordinator says to one session, and what its drafters say to the coordinator."""

    def __init__(
        self,
        channel: Channel,
        leases: LeaseTable,
        request: m.OpenDraft,
        loops: Mapping[str, DraftLoop],
    ) -> None:
        super().__init__(channel, leases, request.lease_id)
        self._loops = loops
        self.sessions: dict[str, DraftSession] = {}
        self._received = len(request.tokens)

    def handle(self, message: Any) -> None:
        if isinstance(message, m.Features):
            message = m.Commit(self._received, (), (message,))
        if not isinstance(message, m.Commit):
            raise ProtocolError(f"{type(message).__name__} for a session that is open")
        if message.base_len > self._received:
            raise ProtocolError(
                f"commit at {message.base_len}, but only {self._received} tokens are known here"
            )
        # What came before is not taken twice.
        tokens = message.tokens[self._received - message.base_len :]
        news = replace(message, base_len=self._received, tokens=tokens)
        self._received += len(news.tokens)
        for name, session in self.sessions.items():
            self._loops[name].commit(session, news)

    def send(self, message: Any) -> None:
        """A drafter that fails leaves the session to the others; the last one ends it."""
        if isinstance(message, m.Failed) and message.drafter:
            self.sessions.pop(message.drafter, None)
            if not self.sessions:
                message = m.Failed(message.code, message.message)
        super().send(message)

    def abandoned(self) -> None:
        for name, session in self.sessions.items():
            self._loops[name].close(session)
