"""What a step and a prompt cost in engines, side by side: by context, by sequences, greedy and sampled.

    python -m loadtest.peers steps

Prompts are made of random tokens, so that no engine finds anything to draft; an end token ends nothing. The
time to one token is that of the prompt; the time of so many more, less that, is that of the steps. Engines
take turns, question by question; medians with quartiles.
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tqdm import tqdm

from loadtest import report
from loadtest.kept import Kept
from loadtest.peers.in_process import all_running, engines
from loadtest.peers.rivals import add_options, even_config, ours

ENGINES: Final = ("slipstream, plain", "vLLM")
STEPS: Final = 32
VOCABULARY: Final = 16_000


@dataclass(frozen=True, slots=True)
class Case:
    """A question: so many prompts of so many tokens, and so many steps behind them."""

    context: int
    sequences: int = 1
    temperature: float = 0.0
    steps: int = STEPS


CASES: Final = (
    Case(100),
    Case(100, temperature=1.0),
    Case(256),
    Case(1000),
    Case(3900),
    Case(100, 8),
    Case(100, 32),
    Case(100, 32, 1.0),
    Case(1000, 8),
    # What these prompts take varies by as much as many of their steps.
    Case(3700, 8, steps=250),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine's two times for one case."""

    engine: str
    case: tuple[float, ...]
    turn: int
    prompt_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    context: int
    sequences: int
    temperature: float
    engine: str
    prompt_tokens_per_s: float
    prompt_over: float
    step_ms: float
    low_ms: float
    high_ms: float
    tokens_per_s: float
    over: float


def measure(options: argparse.Namespace, kept: Kept[Sample]) -> dict[str, object]:
    """All cases, turn by turn; what the engines say of themselves."""
    config = even_config(options.config, options.out / "slipstream.yaml")
    chosen = [e for e in engines(config, ours("--folder", str(config))) if e.name in ENGINES]
    done = {(s.engine, tuple(s.case), s.turn) for s in kept.items}
    numbers = random.Random(1)
    with all_running(chosen, options.out, options.pip_flags) as running:
        for engine in running.values():
            engine.ask([[5] * 50], 8)  # warm-up
        for turn in tqdm(range(options.turns), unit="turn"):
            for case in CASES:
                prompts = [
                    [numbers.randrange(100, VOCABULARY) for _ in range(case.context)]
                    for _ in range(case.sequences)
                ]
                names = list(running) if turn % 2 == 0 else list(running)[::-1]
                for name in names:
                    key = (float(case.context), float(case.sequences), case.temperature)
                    if (name, key, turn) in done:
                        continue
                    one, more = (
                        running[name].ask(prompts, count, case.temperature, ignore_eos=True)
                        for count in (1, 1 + case.steps)
                    )
                    step_s = (more["seconds"] - one["seconds"]) / case.steps
                    kept.add(Sample(name, key, turn, one["seconds"], step_s))
        return {name: {"argv": each.argv, **each.about} for name, each in running.items()}


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """All lines."""
    made = []
    for case in CASES:
        key = (float(case.context), float(case.sequences), case.temperature)
        of = {name: [s for s in samples if s.engine == name and s.case == key] for name in ENGINES}
        base = {s.turn: s for s in of[ENGINES[1]]}
        for name, mine in of.items():
            steps = sorted(1000 * s.step_s for s in mine)
            prompt = statistics.median(s.prompt_s for s in mine)
            step = statistics.median(steps)
            made.append(
                Row(
                    context=case.context,
                    sequences=case.sequences,
                    temperature=case.temperature,
                    engine=name,
                    prompt_tokens_per_s=case.context * case.sequences / prompt,
                    prompt_over=statistics.median(base[s.turn].prompt_s / s.prompt_s for s in mine),
                    step_ms=step,
                    low_ms=steps[len(steps) // 4],
                    high_ms=steps[-1 - len(steps) // 4],
                    tokens_per_s=1000 * case.sequences / step,
                    over=statistics.median(base[s.turn].step_s / s.step_s for s in mine),
                )
            )
    return made


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| context | sequences | temperature | engine | prompt, tokens/s | over vLLM "
        "| step, ms (quartiles) | tokens/s | over vLLM |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.context} | {row.sequences} | {row.temperature:g} | {row.engine} "
        f"| {row.prompt_tokens_per_s:.0f} | {row.prompt_over:.2f} "
        f"| {row.step_ms:.1f} ({row.low_ms:.1f} – {row.high_ms:.1f}) | {row.tokens_per_s:.0f} "
        f"| {row.over:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Steps and prompts of engines, side by side")
    add_options(parser)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = Kept(options.out / "steps.jsonl", Sample, {"steps": STEPS})
    about = measure(options, kept)
    rows = rows_of(kept.items)
    report.write(options.out, "steps", markdown(rows), rows, engines=about)
    return 0
