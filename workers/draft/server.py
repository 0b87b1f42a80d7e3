"""The draft worker's server: sessions on streams, drafters behind them."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc.aio

from protos import speculation_pb2 as pb
from protos import speculation_pb2_grpc as pb_grpc
from workers import limits
from workers.draft.config import DraftConfig
from workers.draft.drafter import Drafter
from workers.draft.group import DrafterGroup, GroupSession
from workers.leases import LeasedReceiver, LeaseTable
from workers.rpc import codec
from workers.rpc import messages as m
from workers.rpc.connection import Channel, Sessions, serve_stream
from workers.rpc.errors import ProtocolError
from workers.rpc.security import LOCAL, Security
from workers.rpc.server import WorkerServer, new_worker_id
from workers.tracing import Stages

logger = logging.getLogger(__name__)


class DraftWorker(pb_grpc.DraftWorkerServicer):
    """Drafters and the server in front of them.

    `start` listens and returns. Leases are granted by `leases.hold`; a session starts with an Open that
    carries one.
    """

    def __init__(
        self,
        config: DraftConfig,
        made: Mapping[str, Drafter] | None = None,
        security: Security = LOCAL,
    ) -> None:
        """Make the drafters of the config, or take those given by name."""
        self._group = DrafterGroup(config.drafters, config.target, self._on_event_loop, made)
        self.leases = LeaseTable()
        self.info = m.WorkerInfo(
            worker_id=new_worker_id(),
            process_id=os.getpid(),
            host=socket.gethostname(),
            max_tree_nodes=limits.MAX_TREE_NODES,
            drafters=self._group.infos,
        )
        self._server = WorkerServer(
            security,
            lambda server: pb_grpc.add_DraftWorkerServicer_to_server(self, server),
        )
        self._event_loop: asyncio.AbstractEventLoop

    @property
    def num_sessions(self) -> int:
        """Sessions that are open, once for each of their drafters."""
        return self._group.num_sessions

    @property
    def address(self) -> str:
        """Where the worker listens; empty before `start`."""
        return self._server.address

    async def start(self) -> None:
        """Start the loop and listen."""
        self._event_loop = asyncio.get_running_loop()
        self._group.start()
        await self._server.start()
        names = ", ".join(drafter.name for drafter in self.info.drafters)
        logger.info("draft worker on %s: %s", self.address, names)

    async def stop(self) -> None:
        """Stop listening, end all sessions and the loop."""
        await self._server.stop()
        self._group.stop()

    async def reload(self, weights: Mapping[str, str]) -> None:
        """See DrafterGroup.reload."""
        await self._group.reload(weights)

    def check_health(self) -> None:
        """Raise RuntimeError if a drafter's thread died."""
        self._group.check_health()

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.WorkerStatus:
        """See speculation.proto."""
        return self.status()

    def status(self) -> pb.WorkerStatus:
        """What the worker holds and has done."""
        return pb.WorkerStatus(
            running_sessions=self.num_sessions, leases=len(self.leases), **self._group.counters
        )

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
        self._group.check(request.drafters)
        stages = Stages("draft", {"slipstream.drafters": request.drafters}, request.traceparent)
        receiver = _DraftReceiver(channel, self.leases, request.lease_id, stages)
        receiver.session = self._group.open(request, receiver.send)
        return receiver

    def _on_event_loop(self, call: Callable[[], None]) -> None:
        self._event_loop.call_soon_threadsafe(call)


class _DraftReceiver(LeasedReceiver):
    """What the coordinator says to one session."""

    session: GroupSession

    def __init__(self, channel: Channel, leases: LeaseTable, lease_id: str, stages: Stages) -> None:
        super().__init__(channel, leases, lease_id)
        self._stages = stages
        self._commits = 0

    def handle(self, message: Any) -> None:
        match message:
            case m.Commit():
                self._commits += 1
                self.session.commit(message)
            case m.Features():
                self.session.feature(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} for a session that is open")

    def ended(self) -> None:
        self._stages.end({"slipstream.commits": self._commits})
        self.session.close()
