"""Speculation on and off through the front door: tokens/s, mean accepted length, acceptance by depth.

    python -m loadtest.bench --prompts loadtest/prompts/six_kinds.jsonl

One request at a time; each prompt is answered with speculation on and off in turn, so that a drift of
the machine's speed hits both. Writes Markdown, JSON and a plot to the output folder.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from loadtest.prompts_file import Prompt, read
from loadtest.provenance import provenance
from loadtest.server import running_server


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: how long it took and what speculation did."""

    tokens: int
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    acceptance_by_depth: tuple[float, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt with speculation off and on."""

    prompt: Prompt
    off: Sample
    on: Sample


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: one kind of task, or all."""

    kind: str
    prompts: int
    off_tokens_per_s: float
    on_tokens_per_s: float
    speedup: float
    mean_accepted_length: float
    drafted_per_round: float
    acceptance_by_depth: tuple[float, ...]
    equal: int


def ask(
    client: httpx.Client, prompt: Prompt, speculate: bool, options: argparse.Namespace
) -> Sample:
    """One answer of the server."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": 1,
        "return_token_ids": True,
        "speculation": {"enabled": speculate, "stats": True},
    }
    if speculate and options.drafter:
        body["speculation"]["drafter"] = options.drafter
    started = time.perf_counter()
    response = client.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - started
    if response.is_error:
        raise RuntimeError(f"{response.status_code}: {response.text}")
    answer = response.json()
    stats = answer["speculation"]
    return Sample(
        tokens=answer["usage"]["completion_tokens"],
        seconds=seconds,
        rounds=stats["rounds"],
        drafted=stats["draft_tokens"],
        accepted=stats["accepted_tokens"],
        acceptance_by_depth=tuple(stats["acceptance_by_depth"]),
        token_ids=tuple(answer["choices"][0]["token_ids"]),
    )


def measure(base: str, prompts: Sequence[Prompt], options: argparse.Namespace) -> list[Pair]:
    """All prompts, on and off in turn."""
    pairs = []
    with httpx.Client(base_url=base, timeout=600) as client:
        for speculate in (False, True):
            ask(client, prompts[0], speculate, options)  # warm-up
        for index, prompt in enumerate(tqdm(prompts, unit="prompt")):
            order = (False, True) if index % 2 else (True, False)
            made = {speculate: ask(client, prompt, speculate, options) for speculate in order}
            pairs.append(Pair(prompt, off=made[False], on=made[True]))
    return pairs


def summarise(kind: str, pairs: Sequence[Pair]) -> Row:
    """The line of the table for some pairs."""
    off, on = [pair.off for pair in pairs], [pair.on for pair in pairs]
    depth = max((len(sample.acceptance_by_depth) for sample in on), default=0)
    return Row(
        kind=kind,
        prompts=len(pairs),
        off_tokens_per_s=sum(s.tokens for s in off) / sum(s.seconds for s in off),
        on_tokens_per_s=sum(s.tokens for s in on) / sum(s.seconds for s in on),
        speedup=statistics.median(p.off.seconds / p.on.seconds for p in pairs),
        mean_accepted_length=sum(s.tokens - 1 for s in on) / max(1, sum(s.rounds for s in on)),
        drafted_per_round=sum(s.drafted for s in on) / max(1, sum(s.rounds for s in on)),
        acceptance_by_depth=tuple(
            statistics.mean(s.acceptance_by_depth[d] for s in on if len(s.acceptance_by_depth) > d)
            for d in range(depth)
        ),
        equal=sum(pair.off.token_ids == pair.on.token_ids for pair in pairs),
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table that the README shows."""
    lines = [
        "| task | prompts | off, tokens/s | on, tokens/s | speed-up (median) | τ | drafted a round "
        "| acceptance by depth | equal answers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        depths = " ".join(f"{rate:.2f}" for rate in row.acceptance_by_depth[:5])
        lines.append(
            f"| {row.kind} | {row.prompts} | {row.off_tokens_per_s:.1f} | {row.on_tokens_per_s:.1f} "
            f"| {row.speedup:.2f} | {row.mean_accepted_length:.2f} | {row.drafted_per_round:.1f} "
            f"| {depths} | {row.equal}/{row.prompts} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Tokens/s on and off by kind of task."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    axes.bar([p - 0.2 for p in places], [r.off_tokens_per_s for r in rows], 0.4, label="off")
    axes.bar([p + 0.2 for p in places], [r.on_tokens_per_s for r in rows], 0.4, label="on")
    for place, row in zip(places, rows, strict=True):
        axes.annotate(
            f"{row.speedup:.2f} x", (place + 0.2, row.on_tokens_per_s), ha="center", va="bottom"
        )
    axes.set_xticks(list(places), [row.kind.replace(" ", "\n", 1) for row in rows], fontsize=8)
    axes.set_ylabel("tokens/s")
    axes.legend(title="speculation")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Speculation on and off through the front door")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-kind", type=int, help="prompts of each kind at most")
    parser.add_argument("--config", type=Path, default=Path("deployments.yaml"))
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafter", help="a drafter's name; the server's choice if left out")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args(arguments)
    prompts = read(options.prompts, options.per_kind)
    options.out.mkdir(parents=True, exist_ok=True)
    with running_server(options.url, options.config, options.out / "server.log") as base:
        pairs = measure(base, prompts, options)
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    rows = [summarise(kind, [p for p in pairs if p.prompt.kind == kind]) for kind in kinds]
    rows.append(summarise("all", pairs))
    table = markdown(rows)
    (options.out / "bench.md").write_text(table)
    result = {
        "provenance": provenance(),
        "rows": [asdict(row) for row in rows],
        "pairs": [asdict(pair) for pair in pairs],
    }
    (options.out / "bench.json").write_text(json.dumps(result, indent=1))
    plot(rows, options.out / "bench.png")
    print(table)
    print(f"written: {options.out}/bench.md, bench.json, bench.png")
    return 0 if rows[-1].equal == len(pairs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
