"""Every answer says which coordinator gave it."""

from collections.abc import Callable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COORDINATOR_HEADER: Final = "x-slipstream-coordinator"


class ServedBy:
    """ASGI middleware: the header is `worker_id()`, as in gRPC's Info, logs and metrics."""

    def __init__(self, app: ASGIApp, worker_id: Callable[[], str]) -> None:
        self._app = app
        self._worker_id = worker_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[COORDINATOR_HEADER] = self._worker_id()
            await send(message)

        await self._app(scope, receive, named)
