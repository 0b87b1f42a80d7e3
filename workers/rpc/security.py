"""Who may talk on the ports between our processes.

On loopback everybody may. Elsewhere peers show a token that all share, or certificates of one authority, or
both.
"""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

LOOPBACK: Final = "127.0.0.1"
_AUTHORIZATION: Final = "authorization"
# Kubernetes' probes have no credentials, and learn nothing.
_OPEN: Final = "/grpc.health.v1.Health/"


@dataclass(frozen=True, slots=True)
class Certificates:
    """A process's own certificate and key, and the authority that all peers' are signed by; PEM.

    `name` is what the certificates are made out to, whatever address a peer has.
    """

    certificate: bytes
    key: bytes
    authority: bytes
    name: str


@dataclass(frozen=True, slots=True)
class Security:
    """The address that a worker's port is bound to, and what peers must show."""

    host: str = LOOPBACK
    token: str = ""
    certificates: Certificates | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call carries."""
        return ((_AUTHORIZATION, f"Bearer {self.token}"),) if self.token else ()

    @property
    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """What a server checks calls with."""
        return [_TokenCheck(self.metadata[0][1])] if self.token else []

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel to a worker."""
        if self.certificates is None:
            return grpc.aio.insecure_channel(address, options=options)
        mine = self.certificates
        credentials = grpc.ssl_channel_credentials(mine.authority, mine.key, mine.certificate)
        named = [*options, ("grpc.ssl_target_name_override", mine.name)]
        return grpc.aio.secure_channel(address, credentials, options=named)

    def bind(self, server: grpc.aio.Server, port: int) -> int:
        """Let a server listen; the port that it got. Peers without a certificate do not get through."""
        address = f"{self.host}:{port}"
        if self.certificates is None:
            return int(server.add_insecure_port(address))
        mine = self.certificates
        credentials = grpc.ssl_server_credentials(
            [(mine.key, mine.certificate)], mine.authority, require_client_auth=True
        )
        return int(server.add_secure_port(address, credentials))


LOCAL: Final = Security()
"""On loopback, everybody."""


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, expected: str) -> None:
        self._expected = expected.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get(_AUTHORIZATION, "")
        shown = hmac.compare_digest(str(given).encode(), self._expected)
        if handler is None or shown or handler_call_details.method.startswith(_OPEN):
            return handler

        async def refuse(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "this worker wants the token of its data plane"
            )

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)
