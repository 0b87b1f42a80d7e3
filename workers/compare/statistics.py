"""What a trace says of each setting, paired with plain decoding question by question."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from workers.compare.drafters import PLAIN
from workers.compare.trace import Answer, Round, Trace

ALL: Final = "all"
_RESAMPLES: Final = 2000
_MOST_DEPTHS: Final = 8
_MOST_RANKS: Final = 4


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over questions, and the interval that holds 95 % of the medians of resampled questions."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One setting over the questions of a category.

    `tau` is of each question the committed tokens a pass after the prefill; `tokens_per_pass` that of all
    passes together. Shares of what was tested: `by_depth` of levels at a depth from 1 on whose right token
    was verified, `by_rank` of levels with so many children those whose child of that rank was right. Times
    are milliseconds a pass. `equal` counts questions whose answer is that of plain decoding.
    """

    category: str
    setting: str
    questions: int
    tokens_per_s: float
    speed_up: Estimate
    tau: Estimate
    tokens_per_pass: float
    drafted: float
    by_depth: tuple[float, ...]
    by_rank: tuple[float, ...]
    draft_ms: float
    wait_ms: float
    verify_ms: float
    equal: int


def median(values: Sequence[float]) -> Estimate:
    """The median and its bootstrap interval, the same at every call."""
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    medians = np.median(np.asarray(values)[drawn], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Estimate(statistics.median(values), float(low), float(high))


def acceptance(rounds: Iterable[Round]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(by depth, by rank) as in Row."""
    depths: dict[int, list[bool]] = {}
    ranks: dict[int, list[bool]] = {}
    for round_ in rounds:
        for depth, right, children in round_.tested():
            depths.setdefault(depth, []).append(right is not None)
            for rank in range(1, children + 1):
                ranks.setdefault(rank, []).append(right == rank)
    return _shares(depths, _MOST_DEPTHS), _shares(ranks, _MOST_RANKS)


def _shares(found: Mapping[int, Sequence[bool]], most: int) -> tuple[float, ...]:
    return tuple(statistics.mean(found[place]) for place in sorted(found)[:most])


def rows(trace: Trace) -> list[Row]:
    """Every setting over all questions that plain decoding has answered, too; then by category."""
    plain = {answer.question: answer for answer in trace.answers if answer.setting == PLAIN}
    rounds: dict[tuple[str, int], list[Round]] = {}
    for round_ in trace.rounds:
        rounds.setdefault((round_.setting, round_.question), []).append(round_)
    groups: dict[tuple[str, str], list[Answer]] = {}
    for answer in trace.answers:
        if answer.question in plain:
            # Questions without a category are of "all", and count once there.
            for category in {ALL: None, answer.category: None}:
                groups.setdefault((category, answer.setting), []).append(answer)
    return [
        _row(category, setting, answers, plain, rounds)
        for (category, setting), answers in sorted(groups.items(), key=lambda g: g[0][0] != ALL)
    ]


def _row(
    category: str,
    setting: str,
    answers: Sequence[Answer],
    plain: Mapping[int, Answer],
    rounds: Mapping[tuple[str, int], Sequence[Round]],
) -> Row:
    passes = [r for answer in answers for r in rounds.get((setting, answer.question), ())]
    # An answer of one token has no pass but the prefill.
    lengths = [answer.lengths for answer in answers if answer.lengths]
    number = max(1, len(passes))
    by_depth, by_rank = acceptance(passes)
    return Row(
        category=category,
        setting=setting,
        questions=len(answers),
        tokens_per_s=sum(a.tokens for a in answers) / sum(a.seconds for a in answers),
        speed_up=median([plain[a.question].pace / a.pace for a in answers]),
        tau=median([statistics.mean(each) for each in lengths] or [1.0]),
        tokens_per_pass=sum(len(r.committed) for r in passes) / number,
        drafted=sum(len(r.selected) for r in passes) / number,
        by_depth=by_depth,
        by_rank=by_rank,
        draft_ms=1000 * sum(r.draft_s for r in passes) / number,
        wait_ms=1000 * sum(r.wait_s for r in passes) / number,
        verify_ms=1000 * sum(r.verify_s for r in passes) / number,
        equal=sum(a.same_as(plain[a.question]) for a in answers),
    )
