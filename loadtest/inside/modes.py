"""Modes under a network: tokens/s by round trip, beside what the formulas say.

    python -m loadtest.inside.modes --round-trip-ms 0 5 20 60
    python -m loadtest.inside.modes --drafter eagle

The coordinator reaches the draft worker through a proxy that delays every byte by half the round trip. The
drafter is a replay, named as such: recorded answers of the target, a set acceptance, a set time for a pass,
and no processor; or one of the config's. Modes take turns, prompt by prompt. Writes Markdown, JSON, a plot.

The formulas (d a pass, γ levels, t a step, r the round trip, E tokens a round, p the hit rate, all measured
or set) leave out what messages cost:

    plain        1 / t
    sequential   E / (γd + r + t)
    pipelined and multibranch    E / (p · max(t, r) + (1 − p) · (t + r + γd))
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from deployments.app import drafter_configs, drafter_options
from deployments.round import GenerationRequest, Speculation
from loadtest import report
from loadtest.inside.replay import ReplayDrafter
from loadtest.inside.workers import Inside, app_config, workers
from loadtest.prompts_file import read
from workers import checkpoint
from workers.draft import drafters
from workers.draft.drafter import Drafter
from workers.request import Mode, SamplingParams, StopRules

PLAIN = "plain"
MODES: tuple[Mode, ...] = ("sequential", "pipelined", "multibranch")
NAME = "draft"


@dataclass(frozen=True, slots=True)
class Row:
    """One mode at one round trip."""

    round_trip_ms: float
    mode: str
    tokens_per_s: float
    over_plain: float
    mean_accepted_length: float
    hit_rate: float
    formula_tokens_per_s: float


def request(
    prompt: Sequence[int], mode: Mode | None, options: argparse.Namespace
) -> GenerationRequest:
    """A greedy answer of set length; without a mode it is decoded plainly."""
    speculation = Speculation()
    if mode is not None:
        speculation = Speculation((NAME,), options.rows, mode=mode)
    return GenerationRequest(
        prompt=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        stopping=StopRules(options.max_tokens, ignore_eos=True),
        deadline=time.monotonic() + 600,
        speculation=speculation,
    )


async def record(
    inside: Inside, prompts: Sequence[list[int]], options: argparse.Namespace
) -> list[list[int]]:
    """What the target answers, behind each prompt."""
    recorded = []
    for prompt in tqdm(prompts, desc="recording", unit="answer"):
        answer = await inside.answer(request(prompt, None, options))
        recorded.append([*prompt, *answer.tokens])
    return recorded


async def measure(
    inside: Inside, prompts: Sequence[list[int]], round_trip_ms: float, options: argparse.Namespace
) -> list[Row]:
    """All modes, and plain, in turn."""
    modes: tuple[Mode | None, ...] = (None, *MODES)
    seconds: dict[Mode | None, float] = dict.fromkeys(modes, 0.0)
    rounds, committed = dict.fromkeys(modes, 0), dict.fromkeys(modes, 0)
    hits: dict[Mode | None, list[float]] = {mode: [] for mode in modes}
    answers: dict[int, list[int]] = {}
    for number, prompt in enumerate(tqdm(prompts, desc=f"{round_trip_ms:g} ms", unit="prompt")):
        for mode in modes:
            answer = await inside.answer(request(prompt, mode, options))
            if answers.setdefault(number, answer.tokens) != answer.tokens:
                raise AssertionError(f"prompt {number}: {mode} gave other tokens than plain")
            seconds[mode] += answer.rest_s
            rounds[mode] += answer.stats.rounds
            committed[mode] += answer.stats.committed_tokens
            hits[mode].append(answer.stats.hit_rate)
    step_s = seconds[None] / rounds[None]
    rows = []
    for mode in modes:
        length = committed[mode] / rounds[mode]
        hit_rate = statistics.mean(hits[mode])
        speed = committed[mode] / seconds[mode]
        rows.append(
            Row(
                round_trip_ms,
                mode or PLAIN,
                speed,
                speed * step_s,
                length,
                hit_rate,
                formula(mode, length, hit_rate, step_s, round_trip_ms / 1000, options),
            )
        )
    return rows


def formula(
    mode: Mode | None,
    tokens: float,
    hits: float,
    step: float,
    trip: float,
    options: argparse.Namespace,
) -> float:
    """Tokens/s by the formulas above."""
    drafting: float = options.steps * options.pass_ms / 1000
    if mode is None:
        return 1.0 / step
    if mode == "sequential":
        return tokens / (drafting + trip + step)
    return tokens / (hits * max(step, trip) + (1 - hits) * (step + trip + drafting))


async def run(options: argparse.Namespace) -> list[Row]:
    """Every round trip; the workers are started anew for each."""
    args = app_config(options.config)
    folder = checkpoint.resolve(args.target.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [prompt.text for prompt in read(options.prompts, options.per_kind)]
    prompts = [tokenizer.encode(text).ids for text in texts]
    rows: list[Row] = []
    recorded: list[list[int]] = []
    if options.drafter == "replay":
        async with workers(options.config, {}) as inside:
            recorded = await record(inside, prompts, options)
    for round_trip_ms in options.round_trip_ms:
        made: Drafter
        if options.drafter == "replay":
            made = ReplayDrafter(
                recorded,
                options.acceptance,
                options.pass_ms / 1000,
                tokenizer.get_vocab_size(),
                width=8,
                steps=options.steps,
            )
        else:
            every = [o for at in ("draft", "target") for o in drafter_options(args.drafts, at)]
            chosen = next(draft for draft in every if draft["name"] == options.drafter)
            passes = {"steps": options.steps} if "steps" in chosen else {}
            (config,) = drafter_configs([chosen | passes])
            made = drafters.make(config, args.target.model)
        async with workers(options.config, {NAME: made}, round_trip_ms / 1000) as inside:
            await inside.answer(request(prompts[0], MODES[-1], options))  # warm-up
            rows += await measure(inside, prompts, round_trip_ms, options)
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| round trip, ms | mode | tokens/s | over plain | τ | hit rate | formula, tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.round_trip_ms:g} | {row.mode} | {row.tokens_per_s:.1f} | {row.over_plain:.2f} "
        f"| {row.mean_accepted_length:.2f} | {row.hit_rate:.2f} | {row.formula_tokens_per_s:.1f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Over plain by round trip, a line a mode; the formulas dotted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    plain = {row.round_trip_ms: row.tokens_per_s for row in rows if row.mode == PLAIN}
    for number, mode in enumerate(MODES):
        mine = [row for row in rows if row.mode == mode]
        trips = [row.round_trip_ms for row in mine]
        colour = f"C{number}"
        axes.plot(trips, [row.over_plain for row in mine], marker="o", color=colour, label=mode)
        said = [row.formula_tokens_per_s / plain[row.round_trip_ms] for row in mine]
        axes.plot(trips, said, linestyle=":", color=colour, label=f"{mode}, formula")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("round trip to the draft worker, ms")
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Modes under a network")
    parser.add_argument("--config", type=Path, default=Path("deployments.yaml"))
    parser.add_argument("--prompts", type=Path, default=Path("loadtest/prompts/six_kinds.jsonl"))
    parser.add_argument("--per-kind", type=int, default=1)
    parser.add_argument("--round-trip-ms", type=float, nargs="+", default=[0.0, 5.0, 20.0, 60.0])
    parser.add_argument("--drafter", default="replay", help="replay, or a name from the config")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of the replay's first guess")
    parser.add_argument("--pass-ms", type=float, default=2.0, help="a pass of the replay")
    parser.add_argument("--steps", type=int, default=4, help="passes for one proposal")
    parser.add_argument("--rows", type=int, default=5, help="drafted rows of a step")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("out/modes"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = asyncio.run(run(options))
    title = options.drafter
    if title == "replay":
        title = f"replay: acceptance {options.acceptance}, {options.pass_ms:g} ms a pass"
    plot(rows, title, options.out / "modes.png")
    settings = {name: str(value) for name, value in vars(options).items()}
    report.write(options.out, "modes", markdown(rows), rows, options=settings)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
