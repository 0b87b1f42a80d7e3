"""Streamed answers of any server that speaks OpenAI's protocol, one or many at once."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer: when its first and last token came, after the request was sent.

    `token_ids` are empty where the server does not say them.
    """

    tokens: int
    first_s: float
    total_s: float
    text: str
    token_ids: tuple[int, ...]


async def events(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    opened: Callable[[httpx.Headers], None] = lambda headers: None,
) -> AsyncGenerator[dict[str, Any] | None]:
    """The chunks of one streamed answer as they come; None is the end that the server announces.

    `opened` hears the headers before the first. Raises RuntimeError with what the server said if it refuses.
    """
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        if response.is_error:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        opened(response.headers)
        reader = _Reader()
        async for text in response.aiter_text():
            for chunk in reader.feed(text):
                yield chunk


def blocking_events(
    client: httpx.Client, path: str, body: Mapping[str, Any]
) -> Generator[dict[str, Any] | None]:
    """As `events`, for callers that have no event loop."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        if response.is_error:
            raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
        reader = _Reader()
        for text in response.iter_text():
            yield from reader.feed(text)


class _Reader:
    """Chunks of a stream. Not by httpx's lines: those end at U+2028 too, which JSON may hold as it is."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> Iterator[dict[str, Any] | None]:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            data = line.rstrip("\r")
            if data == "data: [DONE]":
                yield None
            elif data.startswith("data: {"):
                yield json.loads(data.removeprefix("data: "))


def metric_values(text: str) -> dict[str, float]:
    """The values of Prometheus's text format by metric, summed over labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            labelled, value = line.rsplit(" ", 1)
            name = labelled.split("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Answer:
    """One answer. Raises RuntimeError with what the server said if it refuses or fails."""
    streamed = {**body, "stream_options": {"include_usage": True}}
    started, first, tokens = time.perf_counter(), None, 0
    text: list[str] = []
    token_ids: list[int] = []
    async with contextlib.aclosing(events(client, path, streamed)) as chunks:
        async for chunk in chunks:
            if chunk is None:
                continue
            if "error" in chunk:
                raise RuntimeError(chunk["error"])
            for choice in chunk["choices"]:
                new = choice["delta"].get("content") if "delta" in choice else choice["text"]
                if new:
                    first = first or time.perf_counter()
                    text.append(new)
                token_ids += choice.get("token_ids") or []
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    ended = time.perf_counter()
    return Answer(
        tokens, (first or ended) - started, ended - started, "".join(text), tuple(token_ids)
    )


async def ask_all(
    base: str, path: str, bodies: Sequence[Mapping[str, Any]], at_once: int
) -> tuple[float, list[Answer]]:
    """Seconds, and the answers in the bodies' order: each client asks as soon as it has its last answer."""
    answers: dict[int, Answer] = {}
    numbers = iter(range(len(bodies)))
    # Some servers close a connection after some requests: each gets its own.
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=0)

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            answers[number] = await ask(client, path, bodies[number])

    async with httpx.AsyncClient(base_url=base, timeout=600, limits=limits) as client:
        started = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(at_once)))
        seconds = time.perf_counter() - started
    return seconds, [answers[number] for number in range(len(bodies))]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
