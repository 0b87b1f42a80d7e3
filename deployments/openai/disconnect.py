"""Work that ends when the client leaves.

Serve's own detection can be switched off by a request header, so the connection is watched here too.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def until_disconnect(request: Request, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """The items, until the client is gone: then ClientDisconnect is raised.

    However the iteration ends, `items` is closed before it does.
    """
    gone = asyncio.create_task(_wait_for_disconnect(request))
    upcoming: asyncio.Task[T] | None = None
    try:
        while True:
            upcoming = asyncio.create_task(_next(items))
            await asyncio.wait({gone, upcoming}, return_when=asyncio.FIRST_COMPLETED)
            if not upcoming.done():
                raise ClientDisconnect
            try:
                item = upcoming.result()
            except _Exhausted:
                return
            yield item
    finally:
        gone.cancel()
        try:
            if upcoming is not None and not upcoming.done():
                upcoming.cancel()
                # Not `await upcoming`: whoever is cancelled here himself must notice.
                await asyncio.wait([upcoming])
        finally:
            await items.aclose()


class _Exhausted(Exception):
    """StopAsyncIteration cannot leave a task."""


async def _next(items: AsyncGenerator[T]) -> T:
    try:
        return await anext(items)
    except StopAsyncIteration as error:
        raise _Exhausted from error


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
