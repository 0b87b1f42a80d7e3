"""The page's files, with headers that let nothing run in it but themselves."""

import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

HEADERS: Final = {
    # What a model says is text; should it ever become markup, the browser runs and fetches nothing of it.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Asked for anew each time, and sent only if it has changed.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    tag: str


def _read(path: Path) -> _File:
    content = path.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return _File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


_FILES: Final = {path.name: _read(path) for path in Path(__file__).with_name("static").iterdir()}


# Functions of the module, not of `install`: Serve pickles the application, and a replica has its own files.
async def _chat(request: Request) -> Response:
    return _answer(request, "chat.html")


async def _pools(request: Request) -> Response:
    return _answer(request, "pools.html")


async def _part(request: Request) -> Response:
    return _answer(request, request.path_params["name"])


def _answer(request: Request, name: str) -> Response:
    file = _FILES.get(name)
    if file is None:
        raise HTTPException(404, "the page has no such file")
    headers = {**HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.kind, headers=headers)


def install(app: FastAPI) -> None:
    """Serve the chat at /, the pools at /pools, and what both load below /page/."""
    app.add_route("/", _chat, include_in_schema=False)
    app.add_route("/pools", _pools, include_in_schema=False)
    app.add_route("/page/{name}", _part, include_in_schema=False)
