"""Web pages of other origins may call, where the config allows theirs."""

from collections.abc import Callable, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.openai.served_by import COORDINATOR_HEADER

EXPOSED = ("x-request-id", "retry-after", COORDINATOR_HEADER)


class Cors:
    """ASGI middleware: starlette's, for the origins of now; "*" is any. Without origins it does nothing."""

    def __init__(self, app: ASGIApp, origins: Callable[[], Sequence[str]]) -> None:
        self._app = app
        self._origins = origins
        self._of_now: tuple[Sequence[str], ASGIApp] = ((), app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origins = self._origins()
        if origins != self._of_now[0]:
            allowing: ASGIApp = self._app
            if origins:
                allowing = CORSMiddleware(
                    self._app,
                    allow_origins=origins,
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=EXPOSED,
                )
            self._of_now = (origins, allowing)
        await self._of_now[1](scope, receive, send)
