"""A draft that is slow, or has stopped: what the target loses by it.

    python -m loadtest.inside.slow_draft

The drafter is a replay of the target's own answers (see replay.py) whose pass takes 2 ms, 200 ms, or does not
end. Plain decoding and the three take turns, prompt by prompt. Writes Markdown and JSON.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from tqdm import tqdm

from loadtest import report
from loadtest.inside.modes import NAME, record, request
from loadtest.inside.replay import ReplayDrafter
from loadtest.inside.workers import Answered, app_config, workers
from loadtest.prompts_file import read
from workers import checkpoint
from workers.request import Mode

PLAIN: Final = "plain"
PASS_S: Final = {"2 ms a pass": 0.002, "200 ms a pass": 0.2, "stopped": 3600.0}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `over_plain` is the median over the prompts."""

    draft: str
    tokens_per_s: float
    over_plain: float
    least: float
    most: float
    first_ms: float
    mean_accepted_length: float


async def run(options: argparse.Namespace) -> list[Row]:
    """All of them."""
    folder = checkpoint.resolve(app_config(options.config).target.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [prompt.text for prompt in read(options.prompts, options.per_kind)]
    prompts = [tokenizer.encode(text).ids for text in texts]
    async with workers(options.config, {}) as inside:
        recorded = await record(inside, prompts, options)
    made = ReplayDrafter(recorded, 0.8, 0.0, tokenizer.get_vocab_size(), width=8, steps=4)
    names = [PLAIN, *PASS_S]
    answers: dict[str, list[Answered]] = {name: [] for name in names}
    async with workers(options.config, {NAME: made}) as inside:
        for name in (PLAIN, *PASS_S):  # warm-up, and the prompts into the prefix cache
            made.pass_s = PASS_S.get(name, 0.0)
            for prompt in prompts if name == PLAIN else prompts[:1]:
                await inside.answer(request(prompt, mode_of(name), options))
            await wake(made)
        for number, prompt in enumerate(tqdm(prompts, unit="prompt")):
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                made.pass_s = PASS_S.get(name, 0.0)
                answer = await inside.answer(request(prompt, mode_of(name), options))
                answers[name].append(answer)
                await wake(made)
    for name in names:
        for number, answer in enumerate(answers[name]):
            if answer.tokens != answers[PLAIN][number].tokens:
                raise AssertionError(f"prompt {number}: {name} gave other tokens than plain")
    return [row(name, answers[name], answers[PLAIN]) for name in names]


def mode_of(name: str) -> Mode | None:
    """How the requests of a line are drafted."""
    return None if name == PLAIN else "sequential"


async def wake(drafter: ReplayDrafter) -> None:
    """End the passes that are under way."""
    drafter.woken.set()
    await asyncio.sleep(0.05)
    drafter.woken.clear()


def row(name: str, mine: Sequence[Answered], plain: Sequence[Answered]) -> Row:
    """One line."""
    over = sorted(b.rest_s / a.rest_s for a, b in zip(mine, plain, strict=True))
    rounds = max(1, sum(answer.stats.rounds for answer in mine))
    return Row(
        name,
        sum(len(answer.tokens) - 1 for answer in mine) / sum(answer.rest_s for answer in mine),
        statistics.median(over),
        over[0],
        over[-1],
        1000 * statistics.median(answer.first_s for answer in mine),
        sum(answer.stats.committed_tokens for answer in mine) / rounds,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| draft | tokens/s | over plain (least – most) | first token, ms | τ |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.draft} | {row.tokens_per_s:.1f} | {row.over_plain:.2f} "
        f"({row.least:.2f} – {row.most:.2f}) | {row.first_ms:.0f} "
        f"| {row.mean_accepted_length:.2f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="A draft that is slow, or has stopped")
    parser.add_argument("--config", type=Path, default=Path("deployments.yaml"))
    parser.add_argument("--prompts", type=Path, default=Path("loadtest/prompts/six_kinds.jsonl"))
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--rows", type=int, default=5, help="drafted rows of a step")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("out/slow_draft"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = asyncio.run(run(options))
    report.write(options.out, "slow_draft", markdown(rows), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
