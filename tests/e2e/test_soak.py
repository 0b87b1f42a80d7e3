"""Thousands of requests, many of which are given up, leave nothing behind."""

import asyncio
import random
import time

import httpx
import psutil
import pytest

from tests.e2e.conftest import Server
from tests.e2e.test_serving import QUESTIONS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

REQUESTS = 2000
AT_ONCE = 50
GROWTH = 1.1


async def drive(server: Server, count: int, seed: int) -> dict[str, int]:
    """Short requests; a third of the clients leave after a random while."""
    rng = random.Random(seed)
    seen = {"done": 0, "left": 0, "busy": 0}
    numbers = iter(range(count))

    async def one(http: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            "max_tokens": rng.randrange(1, 16),
            "temperature": number % 2,
            # The same answers again and again: the prefix cache soon has them all, and grows no more.
            "seed": number % len(QUESTIONS),
            "stream": number % 3 == 0,
        }
        patience = rng.uniform(0.02, 1.0) if number % 3 == 1 else 120
        try:
            answer = await asyncio.wait_for(http.post("/v1/chat/completions", json=body), patience)
        except TimeoutError:
            seen["left"] += 1
            return
        # Overload is told as such, and nothing else is.
        assert answer.status_code in (200, 503), answer.text
        seen["done" if answer.status_code == 200 else "busy"] += 1

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            await one(http, number)

    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=server.http, timeout=120, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(AT_ONCE)))
    return seen


def memory(server: Server) -> dict[str, int]:
    """Bytes that each process holds for itself."""
    info = server.info()
    return {
        role: psutil.Process(process.process_id).memory_full_info().uss
        for role, process in info.items()
    }


def test_memory_and_caches_return_to_their_start(server: Server) -> None:
    asyncio.run(drive(server, 400, seed=0))
    before = memory(server)
    seen = asyncio.run(drive(server, REQUESTS, seed=1))
    assert seen["done"] > REQUESTS / 3
    assert seen["left"] > 100
    deadline = time.monotonic() + 10
    while True:
        info = server.info()
        held = {
            role: (p.running_sessions, p.waiting_sessions, p.kv_slots - p.kv_free_slots)
            for role, p in info.items()
        }
        if not any(any(counts) for counts in held.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert not any(any(counts) for counts in held.values()), held
    after = memory(server)
    grown = {role: after[role] / before[role] for role in before}
    assert all(ratio < GROWTH for ratio in grown.values()), grown
