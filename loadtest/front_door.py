"""What a round costs between engine and client, by requests at once.

    python -m loadtest.front_door --at-once 1 32

Clients stream answers without a pause. A chunk of a stream is a round; what is between two chunks is the
step, the wait for proposals, and the way through our processes and Serve's proxy: the front door. Steps and
waits are the target's own count of the same seconds (/metrics). Writes Markdown and JSON.
"""

import argparse
import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest import report
from loadtest.client import CHAT, events, metric_values
from loadtest.prompts_file import Prompt, read
from loadtest.server import running_server

PREFIX = "slipstream_"
EXPORT_SECONDS = 12.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line: milliseconds a round, and per second what else was counted."""

    at_once: int
    speculation: str
    round_p50: float
    round_p99: float
    step: float
    wait: float
    front_door_p50: float
    front_door_p99: float
    messages_per_s: float
    coordinator_cpu: float


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """All values of /metrics, summed over labels, once nothing has been going on."""
    await asyncio.sleep(EXPORT_SECONDS)
    values = metric_values((await client.get("/metrics")).text)
    return {name.removeprefix(PREFIX): value for name, value in values.items()}


async def stream(
    client: httpx.AsyncClient, prompt: Prompt, on: bool, until: float, options: Any
) -> list[float]:
    """Seconds between the chunks of one answer, of those that came before `until`."""
    body = {
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "speculation": {"enabled": on},
    }
    came: list[float] = []
    async with contextlib.aclosing(events(client, CHAT, body)) as chunks:
        async for chunk in chunks:
            if chunk is not None:
                came.append(time.perf_counter())
                if came[-1] > until:
                    break
    # The first chunk only opens the message; the second waits for the prompt.
    return [b - a for a, b in itertools.pairwise(came[1:])]


async def measure(
    base: str, prompts: Sequence[Prompt], at_once: int, on: bool, options: Any
) -> Row:
    """So many clients, for a set time."""
    limits = httpx.Limits(max_connections=at_once + 1)
    gaps: list[float] = []
    async with httpx.AsyncClient(base_url=base, timeout=600, limits=limits) as client:
        before, started = await metrics(client), time.perf_counter()
        until = started + options.seconds

        async def work(number: int) -> None:
            while time.perf_counter() < until:
                prompt = prompts[number % len(prompts)]
                gaps.extend(await stream(client, prompt, on, until, options))
                number += 1

        await asyncio.gather(*(work(number) for number in range(at_once)))
        seconds = time.perf_counter() - started
        after = await metrics(client)
    counted = {name: after[name] - before.get(name, 0.0) for name in after}
    steps = max(1.0, counted["worker_steps_total"])
    step = counted["worker_step_ns_total"] / steps / 1e6
    wait = counted["worker_wait_ns_total"] / steps / 1e6
    rounds = sorted(1000 * gap for gap in gaps)
    p50, p99 = rounds[len(rounds) // 2], rounds[int(0.99 * len(rounds))]
    return Row(
        at_once,
        "on" if on else "off",
        p50,
        p99,
        step,
        wait,
        p50 - step - wait,
        p99 - step - wait,
        counted["messages_total"] / seconds,
        counted["coordinator_cpu_seconds_total"] / seconds,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| requests at once | speculation | round, p50 / p99 ms | step, mean ms | wait, mean ms "
        "| front door, p50 / p99 ms | messages/s | coordinator, cores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.at_once} | {row.speculation} | {row.round_p50:.1f} / {row.round_p99:.1f} "
        f"| {row.step:.1f} | {row.wait:.1f} | {row.front_door_p50:.1f} / {row.front_door_p99:.1f} "
        f"| {row.messages_per_s:.0f} | {row.coordinator_cpu:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="What a round costs between engine and client")
    parser.add_argument("--prompts", type=Path, default=Path("loadtest/prompts/six_kinds.jsonl"))
    parser.add_argument("--config", type=Path, default=Path("deployments.yaml"))
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("out/front_door"))
    options = parser.parse_args(arguments)
    prompts = read(options.prompts)
    options.out.mkdir(parents=True, exist_ok=True)
    with running_server(options.url, options.config, options.out / "server.log") as base:
        warm = argparse.Namespace(**{**vars(options), "seconds": 3.0})
        asyncio.run(measure(base, prompts, 2, True, warm))
        rows = [
            asyncio.run(measure(base, prompts, at_once, on, options))
            for at_once in options.at_once
            for on in (False, True)
        ]
    report.write(options.out, "front_door", markdown(rows), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
