"""Speculation on and off under load: tokens/s and time to first token by requests at once.

    python -m loadtest.load --prompts loadtest/prompts/six_kinds.jsonl --at-once 1 2 4 8 16 32

So many clients ask one prompt after the other, each as soon as the last is answered, until all prompts are
answered. Off and on take turns at every number of clients, and begin in turn. What was measured is kept in
the output folder: a run that was broken off goes on where it was. Writes Markdown, JSON and a plot.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest import client, report
from loadtest.kept import Kept
from loadtest.prompts_file import Prompt, read
from loadtest.server import running_server

OFF, ON = "off", "on"


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts answered once, by so many clients; `texts` are the answers in the prompts' order."""

    at_once: int
    setting: str
    turn: int
    seconds: float
    tokens: int
    first_ms: tuple[float, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; times to the first token in milliseconds."""

    at_once: int
    off_tokens_per_s: float
    on_tokens_per_s: float
    ratio: float
    ratios: tuple[float, ...]
    off_first_p50: float
    on_first_p50: float
    off_first_p99: float
    on_first_p99: float
    equal: bool


def body(prompt: Prompt, setting: str, options: argparse.Namespace) -> dict[str, Any]:
    """A request."""
    return {
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": 1,
        "speculation": {"enabled": setting == ON},
    }


def answer_all(
    base: str, prompts: Sequence[Prompt], at_once: int, setting: str, turn: int, options: Any
) -> Run:
    """All prompts with one setting."""
    bodies = [body(prompt, setting, options) for prompt in prompts]
    seconds, answers = asyncio.run(client.ask_all(base, client.CHAT, bodies, at_once))
    return Run(
        at_once,
        setting,
        turn,
        seconds,
        sum(answer.tokens for answer in answers),
        tuple(1000 * answer.first_s for answer in answers),
        tuple(answer.text for answer in answers),
    )


def summarise(at_once: int, runs: Sequence[Run]) -> Row:
    """The line of the table for one number of clients."""
    off = sorted((r for r in runs if r.setting == OFF), key=lambda run: run.turn)
    on = sorted((r for r in runs if r.setting == ON), key=lambda run: run.turn)
    speeds = [[run.tokens / run.seconds for run in each] for each in (off, on)]
    ratios = [b / a for a, b in zip(*speeds, strict=True)]
    firsts = [[ms for run in each for ms in run.first_ms] for each in (off, on)]
    return Row(
        at_once,
        statistics.median(speeds[0]),
        statistics.median(speeds[1]),
        statistics.median(ratios),
        tuple(ratios),
        client.quantile(firsts[0], 0.5),
        client.quantile(firsts[1], 0.5),
        client.quantile(firsts[0], 0.99),
        client.quantile(firsts[1], 0.99),
        len({run.texts for run in runs}) == 1,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| requests at once | off, tokens/s | on, tokens/s | on / off (of each turn) "
        "| first token off, p50 / p99 ms | on, p50 / p99 ms | equal answers |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        turns = " ".join(f"{ratio:.2f}" for ratio in row.ratios)
        lines.append(
            f"| {row.at_once} | {row.off_tokens_per_s:.0f} | {row.on_tokens_per_s:.0f} "
            f"| {row.ratio:.2f} ({turns}) | {row.off_first_p50:.0f} / {row.off_first_p99:.0f} "
            f"| {row.on_first_p50:.0f} / {row.on_first_p99:.0f} | {'yes' if row.equal else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Tokens/s, and the ratio, by requests at once."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    at_once = [row.at_once for row in rows]
    left.plot(at_once, [row.off_tokens_per_s for row in rows], marker="o", label="off")
    left.plot(at_once, [row.on_tokens_per_s for row in rows], marker="o", label="on")
    left.set_ylabel("tokens/s")
    left.legend()
    right.plot(at_once, [row.ratio for row in rows], marker="o")
    right.axhline(1.0, color="black", linewidth=0.8)
    right.axhline(0.95, color="black", linewidth=0.8, linestyle=":")
    right.set_ylabel("on / off")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(at_once, [str(n) for n in at_once])
        axes.set_xlabel("requests at once")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Speculation on and off under load")
    parser.add_argument("--prompts", type=Path, default=Path("loadtest/prompts/six_kinds.jsonl"))
    parser.add_argument("--per-kind", type=int, help="prompts of each kind at most")
    parser.add_argument("--config", type=Path, default=Path("deployments.yaml"))
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/load"))
    options = parser.parse_args(arguments)
    prompts = read(options.prompts, options.per_kind)
    options.out.mkdir(parents=True, exist_ok=True)
    identity = {
        "prompts": options.prompts.name,
        "per_kind": options.per_kind,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }
    kept = Kept(options.out / "runs.jsonl", Run, identity)
    done = {(run.at_once, run.setting, run.turn) for run in kept.items}
    with running_server(options.url, options.config, options.out / "server.log") as base:
        for setting in (OFF, ON):  # warm-up, and the prompts into the prefix cache
            answer_all(base, prompts[:4], 2, setting, 0, options)
        plan = list(itertools.product(options.at_once, range(options.turns)))
        for at_once, turn in tqdm(plan, unit="pair"):
            for setting in (OFF, ON) if turn % 2 == 0 else (ON, OFF):
                if (at_once, setting, turn) not in done:
                    kept.add(answer_all(base, prompts, at_once, setting, turn, options))
    rows = [summarise(n, [run for run in kept.items if run.at_once == n]) for n in options.at_once]
    plot(rows, options.out / "load.png")
    report.write(options.out, "load", markdown(rows), rows)
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
