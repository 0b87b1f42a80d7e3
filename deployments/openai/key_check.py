"""Callers without a key are turned away before anything of theirs is read."""

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.keys import Gate, bearer
from deployments.openai.errors import service_error_body
from workers.rpc.errors import Unauthenticated, http_status

GUARDED = ("/v1/", "/tokenize", "/detokenize")


class KeyCheck:
    """ASGI middleware: 401 without a key where models work; `request.state.key` is the one that was shown."""

    def __init__(self, app: ASGIApp, gate: Callable[[], Gate]) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["path"].startswith(GUARDED):
            try:
                shown = bearer(Headers(scope=scope).get("authorization", ""))
                scope.setdefault("state", {})["key"] = self._gate().identify(shown)
            except Unauthenticated as error:
                answer = JSONResponse(service_error_body(error), http_status(error))
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
