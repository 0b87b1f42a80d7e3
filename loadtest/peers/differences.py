"""Where engines in bfloat16 first say something else than transformers' generate, and how near it was.

    python -m loadtest.peers differences

Reads what the run of `engines` has kept. At each first difference the two tokens' logits are computed anew
in float32 by transformers: half precision rounds logits of such a size to steps of an eighth, so two tokens
nearer than that are a tie, which each engine breaks by its own order of adding. Writes Markdown and JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest import report
from loadtest.kept import Kept
from loadtest.peers.in_process import ANSWERS, REFERENCE, Sample
from loadtest.peers.rivals import (
    PROGRAMS,
    add_options,
    add_questions,
    even_config,
    ours,
    questions,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer's first token that is another: `gap` is by how much generate's is likelier, in logits."""

    engine: str
    prompt: int
    position: int
    gap: float
    step: float


@dataclass(frozen=True, slots=True)
class Row:
    """An engine; `beyond` counts differences that are no ties."""

    engine: str
    answers: int
    equal: int
    median_gap: float
    largest_gap: float
    beyond: int


def find(
    samples: Sequence[Sample], prompts: Sequence[list[int]], folder: str
) -> tuple[list[Difference], list[Row]]:
    """All first differences, and a row for each engine that was asked one prompt at a time."""
    alone = [sample for sample in samples if sample.at_once == 1]
    said = {s.block: list(s.tokens[0]) for s in alone if s.engine == REFERENCE}
    places: list[tuple[str, int, int]] = []
    asked: list[tuple[list[int], int, int]] = []
    answers: Counter[str] = Counter()
    for sample in alone:
        if sample.engine == REFERENCE:
            continue
        answers[sample.engine] += 1
        right, tokens = said[sample.block], list(sample.tokens[0])
        both = enumerate(zip(tokens, right, strict=False))
        at = next((i for i, (mine, theirs) in both if mine != theirs), None)
        if at is not None:
            places.append((sample.engine, sample.block, at))
            asked.append((prompts[sample.block] + right[:at], right[at], tokens[at]))
    argv = [sys.executable, str(PROGRAMS / "logit_gaps.py"), folder]
    done = subprocess.run(argv, input=json.dumps(asked), capture_output=True, text=True, check=True)
    gaps = json.loads(done.stdout.splitlines()[-1])
    found = [Difference(*place, *gap) for place, gap in zip(places, gaps, strict=True)]
    return found, [_row(engine, count, found) for engine, count in answers.items()]


def _row(engine: str, answers: int, found: Sequence[Difference]) -> Row:
    mine = [difference for difference in found if difference.engine == engine]
    gaps = [abs(difference.gap) for difference in mine] or [0.0]
    beyond = sum(abs(difference.gap) > 2 * difference.step for difference in mine)
    return Row(engine, answers, answers - len(mine), statistics.median(gaps), max(gaps), beyond)


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| engine | answers as `generate` says to the end | at first differences, float32 logits apart: "
        "median | most | more than two steps of bfloat16 apart |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.engine} | {row.equal}/{row.answers} | {row.median_gap:.3f} | {row.largest_gap:.3f} "
        f"| {row.beyond} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="First differences from generate")
    add_options(parser)
    add_questions(parser)
    options = parser.parse_args(arguments)
    config = even_config(options.config, options.out / "slipstream.yaml")
    _, prompts, identity = questions(config, options)
    kept = Kept(options.out / ANSWERS, Sample, identity)
    differences, rows = find(kept.items, prompts, ours("--folder", str(config)))
    report.write(options.out, "differences", markdown(rows), [*rows, *differences])
    return 0
