"""Bodies that are too large are cut off as they are counted, before anything parses them."""

from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.openai.errors import error_body


class BodyLimit:
    """ASGI middleware: 413 as soon as more than `max_bytes()` have arrived."""

    def __init__(self, app: ASGIApp, max_bytes: Callable[[], int]) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        allowed = self._max_bytes()
        received: list[Message] = []
        size, more = 0, scope["method"] in ("POST", "PUT", "PATCH")
        while more:
            message = await receive()
            received.append(message)
            size += len(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)
            if size > allowed:
                body = error_body(413, f"the body is larger than {allowed} bytes")
                await JSONResponse(body, 413)(scope, receive, send)
                return
        replay = iter(received)

        async def counted() -> Message:
            for message in replay:
                return message
            return await receive()

        await self._app(scope, counted, send)
