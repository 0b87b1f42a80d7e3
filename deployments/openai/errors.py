"""Errors in OpenAI's shape."""

from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from workers.rpc.errors import NoCapacity, ServiceError, Unavailable, http_status

RETRY_AFTER_SECONDS = 1

_CODES: Final = {404: "model_not_found", 401: "invalid_api_key", 429: "rate_limit_exceeded"}


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body that OpenAI's clients read."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    # What was wrong may be quoted here, and it need not be encodable.
    message = message.encode(errors="replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def service_error_body(error: ServiceError) -> dict[str, Any]:
    """The body for one of our own errors."""
    param = getattr(error, "param", None)
    return error_body(http_status(error), str(error), param, _CODES.get(http_status(error)))


def _is_field(part: str | int) -> bool:
    """Whether a part of pydantic's location is of the body, not the name of a type in a union."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))


def install(app: FastAPI) -> None:
    """Answer every error of the application in OpenAI's shape."""

    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> JSONResponse:
        busy = isinstance(error, NoCapacity | Unavailable)
        return JSONResponse(
            service_error_body(error),
            http_status(error),
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)} if busy else None,
        )

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:] if _is_field(part))
        message = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "json_invalid":
            message, place = f"the body is not JSON: {first['ctx']['error']}", ""
        elif first["type"] in ("model_attributes_type", "missing") and not place:
            message = "the body must be a JSON object, sent with content-type: application/json"
        elif first["type"] == "model_attributes_type":
            message = f"{place}: must be a JSON object"
        elif first["type"] == "extra_forbidden":
            message = f"unknown parameter {place}"
        elif place:
            message = f"{place}: {message}"
        return JSONResponse(error_body(400, message, place or None), 400)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> JSONResponse:
        """A fault of ours; the log has the rest."""
        return JSONResponse(error_body(500, f"the server failed: {type(error).__name__}"), 500)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}: {request.method} {request.url.path}"
        return JSONResponse(error_body(error.status_code, message), error.status_code)
