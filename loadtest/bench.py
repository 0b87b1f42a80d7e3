"""Drafters beside plain decoding, through the front door: tokens/s, accepted length, acceptance by depth.

    python -m loadtest.bench --prompts loadtest/prompts/six_kinds.jsonl --drafters auto lookup eagle+lookup

One request at a time; each prompt is answered plainly and by every setting in turn, so that a drift of the
machine's speed hits all. What was answered is kept in the output folder: a run that was broken off goes on
where it was. Writes Markdown, JSON and a plot.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from loadtest import report
from loadtest.kept import Kept
from loadtest.prompts_file import Prompt, read
from loadtest.server import running_server

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Setting:
    """How an answer is drafted: `drafters` joined by "+", or "auto"; none are plain decoding.

    `rows` are the drafted rows of a step at most, None for as many as the target allows.
    """

    drafters: str
    rows: int | None = None

    @property
    def name(self) -> str:
        """As the table has it."""
        if not self.drafters:
            return PLAIN
        return self.drafters if self.rows is None else f"{self.drafters}, {self.rows} rows"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: how long it took and what speculation did."""

    setting: str
    prompt: int
    tokens: int
    seconds: float
    rounds: int
    drafted: int
    accepted: int
    acceptance_by_depth: tuple[float, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a setting on one kind of task, or on all."""

    setting: str
    kind: str
    prompts: int
    plain_tokens_per_s: float
    tokens_per_s: float
    speedup: float
    mean_accepted_length: float
    drafted_per_round: float
    acceptance_by_depth: tuple[float, ...]
    equal: int


def ask(
    client: httpx.Client,
    number: int,
    prompt: Prompt,
    setting: Setting,
    options: argparse.Namespace,
    max_tokens: int | None = None,
) -> Sample:
    """One answer of the server."""
    speculation: dict[str, Any] = {"enabled": bool(setting.drafters), "stats": True}
    if setting.drafters:
        speculation["drafter"] = setting.drafters.split("+")
    if setting.rows is not None:
        speculation["max_draft_tokens"] = setting.rows
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": max_tokens or options.max_tokens,
        "temperature": options.temperature,
        "seed": 1,
        "return_token_ids": True,
        "speculation": speculation,
    }
    started = time.perf_counter()
    response = client.post("/v1/chat/completions", json=body)
    seconds = time.perf_counter() - started
    if response.is_error:
        raise RuntimeError(f"{response.status_code}: {response.text}")
    answer = response.json()
    stats = answer["speculation"]
    return Sample(
        setting=setting.name,
        prompt=number,
        tokens=answer["usage"]["completion_tokens"],
        seconds=seconds,
        rounds=stats["rounds"],
        drafted=stats["draft_tokens"],
        accepted=stats["accepted_tokens"],
        acceptance_by_depth=tuple(stats["acceptance_by_depth"]),
        token_ids=tuple(answer["choices"][0]["token_ids"]),
    )


def measure(
    base: str,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    answers: Kept[Sample],
    options: argparse.Namespace,
) -> None:
    """All prompts with all settings, in an order that changes from prompt to prompt."""
    done = {(sample.setting, sample.prompt) for sample in answers.items}
    with httpx.Client(base_url=base, timeout=600) as client:
        for setting in settings:
            ask(client, 0, prompts[0], setting, options)  # warm-up
        with tqdm(total=len(prompts) * len(settings), unit="answer") as bar:
            for number, prompt in enumerate(prompts):
                # Later answers find the prompt in the prefix cache: so must the first.
                ask(client, number, prompt, settings[0], options, max_tokens=1)
                turn = number % len(settings)
                for setting in (*settings[turn:], *settings[:turn]):
                    if (setting.name, number) not in done:
                        answers.add(ask(client, number, prompt, setting, options))
                    bar.update()


def summarise(setting: str, kind: str, pairs: Sequence[tuple[Sample, Sample]]) -> Row:
    """The line of the table for some pairs of a plain and a drafted answer."""
    off, on = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    depth = max((len(sample.acceptance_by_depth) for sample in on), default=0)
    rounds = max(1, sum(s.rounds for s in on))
    return Row(
        setting=setting,
        kind=kind,
        prompts=len(pairs),
        plain_tokens_per_s=sum(s.tokens for s in off) / sum(s.seconds for s in off),
        tokens_per_s=sum(s.tokens for s in on) / sum(s.seconds for s in on),
        speedup=statistics.median(a.seconds / b.seconds for a, b in pairs),
        mean_accepted_length=sum(s.tokens - 1 for s in on) / rounds,
        drafted_per_round=sum(s.drafted for s in on) / rounds,
        acceptance_by_depth=tuple(
            statistics.mean(s.acceptance_by_depth[d] for s in on if len(s.acceptance_by_depth) > d)
            for d in range(depth)
        ),
        equal=sum(a.token_ids == b.token_ids for a, b in pairs),
    )


def rows_of(
    prompts: Sequence[Prompt], settings: Sequence[Setting], samples: Sequence[Sample]
) -> list[Row]:
    """The table: all tasks together first, then each."""
    answers = {(sample.setting, sample.prompt): sample for sample in samples}
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    made = []
    for kind in ["all", *kinds] if len(kinds) > 1 else ["all"]:
        numbers = [n for n, prompt in enumerate(prompts) if kind in ("all", prompt.kind)]
        for setting in settings:
            if setting.drafters:
                pairs = [(answers[PLAIN, n], answers[setting.name, n]) for n in numbers]
                made.append(summarise(setting.name, kind, pairs))
    return made


def markdown(rows: Sequence[Row]) -> str:
    """The table that the README shows."""
    lines = [
        "| task | drafters | prompts | plain, tokens/s | drafted, tokens/s | speed-up (median) | τ "
        "| drafted a round | acceptance by depth | equal answers |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        depths = " ".join(f"{rate:.2f}" for rate in row.acceptance_by_depth[:5])
        lines.append(
            f"| {row.kind} | {row.setting} | {row.prompts} | {row.plain_tokens_per_s:.1f} "
            f"| {row.tokens_per_s:.1f} | {row.speedup:.2f} | {row.mean_accepted_length:.2f} "
            f"| {row.drafted_per_round:.1f} | {depths} | {row.equal}/{row.prompts} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Speed-up by kind of task, a bar a setting."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row.kind for row in rows))
    settings = list(dict.fromkeys(row.setting for row in rows))
    width = 0.8 / len(settings)
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, setting in enumerate(settings):
        mine = [row for row in rows if row.setting == setting]
        at = [kinds.index(row.kind) + (place - (len(settings) - 1) / 2) * width for row in mine]
        axes.bar(at, [row.speedup for row in mine], width, label=setting)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(kinds)), [kind.replace(" ", "\n", 1) for kind in kinds], fontsize=8)
    axes.set_ylabel("speed-up over plain decoding")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Drafters beside plain decoding")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-kind", type=int, help="prompts of each kind at most")
    parser.add_argument("--config", type=Path, default=Path("deployments.yaml"))
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--drafters", nargs="+", default=["auto"], help='names, joined by "+" for a set, or auto'
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[None],
        help="drafted rows of a step at most; as many as the target allows if left out",
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args(arguments)
    prompts = read(options.prompts, options.per_kind)
    settings = [Setting("")]
    settings += [Setting(drafters, rows) for rows in options.rows for drafters in options.drafters]
    options.out.mkdir(parents=True, exist_ok=True)
    answers = Kept(options.out / "answers.jsonl", Sample, _identity(options))
    with running_server(options.url, options.config, options.out / "server.log") as base:
        measure(base, prompts, settings, answers, options)
    rows = rows_of(prompts, settings, answers.items)
    plot(rows, options.out / "bench.png")
    report.write(options.out, "bench", markdown(rows), rows)
    return 0 if all(row.equal == row.prompts for row in rows) else 1


def _identity(options: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    return {
        "prompts": options.prompts.name,
        "per_kind": options.per_kind,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
