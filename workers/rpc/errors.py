"""Errors that cross a process boundary, and the one table of their gRPC codes and HTTP statuses."""

from typing import Final

import grpc


class ServiceError(Exception):
    """An error that a caller is told about; the message says what was wrong and what to do."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL


class InvalidRequest(ServiceError):
    """The request itself is wrong; `param` names the field, if one is to blame."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotFound(ServiceError):
    """What the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class PermissionDenied(ServiceError):
    """This caller may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unauthenticated(ServiceError):
    """This caller has not said who it is."""

    code = grpc.StatusCode.UNAUTHENTICATED


class NoCapacity(ServiceError):
    """Nothing was free in time; the same request may succeed later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class RateLimited(NoCapacity):
    """The caller has used up what it may use; others may go on."""


class DeadlineExceeded(ServiceError):
    """The request ran longer than it may."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unavailable(ServiceError):
    """A worker is not there or went away."""

    code = grpc.StatusCode.UNAVAILABLE


class FailedPrecondition(ServiceError):
    """The peers do not fit together, or a lease is not alive."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ProtocolError(InvalidRequest):
    """A peer broke a rule of the protocol."""


class InternalError(ServiceError):
    """Something on this side went wrong."""


_HTTP_STATUS: Final[dict[grpc.StatusCode, int]] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 503,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.FAILED_PRECONDITION: 500,
    grpc.StatusCode.INTERNAL: 500,
}


def http_status(error: ServiceError) -> int:
    """The HTTP status of an error."""
    return 429 if isinstance(error, RateLimited) else _HTTP_STATUS[error.code]


_BY_CODE: Final[dict[str, type[ServiceError]]] = {
    error.code.name: error
    for error in (
        InvalidRequest,
        NotFound,
        PermissionDenied,
        Unauthenticated,
        NoCapacity,
        DeadlineExceeded,
        Unavailable,
        FailedPrecondition,
        InternalError,
    )
}


def from_code(code: str, message: str) -> ServiceError:
    """The error for the name of a gRPC status code; an unknown name becomes InternalError."""
    return _BY_CODE.get(code, InternalError)(message)
