"""The gRPC server of a worker: its port, its health, its end."""

import gc
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health

from workers.rpc.connection import SERVER_OPTIONS
from workers.rpc.security import Security


def new_worker_id() -> str:
    """Identifies one incarnation of a worker process."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class WorkerServer:
    """Serves one worker on a free port.

    `add_servicer(server)` registers what it serves. The standard health service answers SERVING for
    the whole server; reflection is off.
    """

    def __init__(self, security: Security, add_servicer: Callable[[grpc.aio.Server], Any]) -> None:
        self._security = security
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=security.interceptors)
        add_servicer(self._server)
        self._health = grpc_health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = ""

    async def start(self, port: int = 0) -> None:
        """Listen; `address` is set afterwards."""
        self.address = f"{self._security.host}:{self._security.bind(self._server, port)}"
        # What was loaded lives as long as the process: the collector need not walk through it again.
        gc.collect()
        gc.freeze()
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace: float = 0.5) -> None:
        """Stop listening; streams get `grace` seconds to end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace)
