"""What a drafted row costs, what it is worth, and when waiting for one pays.

A target's step of R rows takes t̂(R, context): a table measured at start, times one factor that follows what
steps take now. With B sessions decoding, a step yields B tokens and the drafted ones that are accepted. So
it yields (B + Σs) / t̂(B + k) tokens a second with the k best nodes of all sessions, s their probabilities of
being accepted; the best k gives λ, and a further node is verified if s > λ · Δt̂ (Dinkelbach's rule;
TurboSpec, arXiv 2406.14066, is the chain case). All rates are predicted, never measured throughput: that
would fall with bad drafts, and so make bad drafts look cheap.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

DRAFTING_MUST_WIN_BY: Final = 0.03
"""How much faster than plain decoding a step must be expected to be before anything is verified in it."""

_DRIFT_RATE: Final = 0.1
_DRIFT_LIMITS: Final = (0.2, 20.0)
_NEXT_ROWS: Final = 16


class StepTimes:
    """Seconds of a step. `drift` follows how much slower steps are than when the table was measured.

    `measured` is that table.
    """

    def __init__(self, measured: Mapping[tuple[int, int], float]) -> None:
        """`measured[rows, context]` are seconds, for one context or two, the same rows for each.

        Between measured rows it is linear, beyond them as steep as between the last two; more rows never
        take less time. Contexts count tokens before the rows; the time is linear in them.
        """
        self.measured = dict(measured)
        contexts = sorted({context for _, context in measured})
        self._rows = sorted({rows for rows, _ in measured})
        self._near = contexts[0]
        short = _rising([measured[rows, contexts[0]] for rows in self._rows])
        long = _rising([measured[rows, contexts[-1]] for rows in self._rows])
        span = max(1, contexts[-1] - contexts[0])
        self._seconds = short
        # Rising, too, or far behind the longer context more rows would take less time.
        self._per_token = _rising(
            [max(0.0, b - a) / span for a, b in zip(short, long, strict=True)]
        )
        self.drift = 1.0

    def __call__(self, rows: int, context: float) -> float:
        """Seconds that a step of so many rows is expected to take, each after `context` tokens."""
        return self.drift * self._undrifted(rows, context)

    def observe(self, rows: int, context: float, seconds: float) -> None:
        """Take what a step took."""
        low, high = _DRIFT_LIMITS
        ratio = min(high, max(low, seconds / self._undrifted(rows, context)))
        # A step that was disturbed once says nothing of the next ones.
        ratio = min(ratio, 2 * self.drift)
        self.drift += _DRIFT_RATE * (ratio - self.drift)

    def _undrifted(self, rows: int, context: float) -> float:
        beyond = max(0.0, context - self._near)
        place = min(max(bisect_right(self._rows, rows), 1), len(self._rows) - 1)
        if len(self._rows) == 1:
            return self._seconds[0] + beyond * self._per_token[0]
        low, high = self._rows[place - 1], self._rows[place]
        share = max(0.0, (rows - low) / (high - low))
        at_low = self._seconds[place - 1] + beyond * self._per_token[place - 1]
        at_high = self._seconds[place] + beyond * self._per_token[place]
        return at_low + share * (at_high - at_low)


def _rising(seconds: Sequence[float]) -> list[float]:
    risen: list[float] = []
    for value in seconds:
        risen.append(max(value, risen[-1]) if risen else value)
    return risen


@dataclass(frozen=True, slots=True)
class Cut:
    """How many of the best nodes a step verifies, what it is expected to commit, and how long it takes.

    `idle` seconds pass between two steps.
    """

    nodes: int
    tokens: float
    seconds: float
    idle: float = 0.0

    @property
    def rate(self) -> float:
        """λ, tokens per second."""
        return self.tokens / (self.seconds + self.idle)


def best_cut(
    scores: Sequence[float],
    sessions: int,
    rows: int,
    context: float,
    times: StepTimes,
    idle: float = 0.0,
) -> Cut:
    """The best number of nodes to verify in a step that has `rows` rows without them.

    `scores` are the nodes' probabilities of being accepted, the best first; `idle` seconds pass between two
    steps. Verifying none wins unless some number is better by DRAFTING_MUST_WIN_BY.
    """
    best = Cut(0, sessions, times(rows, context), idle)
    bar = best.rate * (1 + DRAFTING_MUST_WIN_BY)
    tokens = float(sessions)
    for nodes, score in enumerate(scores, 1):
        tokens += score
        seconds = times(rows + nodes, context)
        if tokens > bar * (seconds + idle):
            best = Cut(nodes, tokens, seconds, idle)
            bar = best.rate
    return best


def price_of_a_row(rate: float, rows: int, context: float, times: StepTimes) -> float:
    """What a node must be worth, in tokens, for a step of `rows` rows to verify it.

    `rate` is λ. Rows come in buckets that take the same time: the price is that of a row in the next bucket
    when it is filled best.
    """
    plain = times(rows, context)
    return min(rate * (times(rows + k, context) - plain) / k for k in range(1, _NEXT_ROWS + 1))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A proposal that is expected: in how many seconds, and how many tokens it adds."""

    seconds: float
    tokens: float


def best_wait(cut: Cut, arrivals: Sequence[Arrival]) -> float:
    """How many seconds a step should wait for proposals: what gives most tokens per second.

    `cut` is the step as it could begin now. All its sessions wait, so a wait pays the sooner the more of
    them it serves.
    """
    best, best_rate = 0.0, cut.rate
    tokens = cut.tokens
    for arrival in sorted(arrivals, key=lambda arrival: arrival.seconds):
        tokens += arrival.tokens
        rate = tokens / (cut.seconds + cut.idle + arrival.seconds)
        if rate > best_rate:
            best, best_rate = arrival.seconds, rate
    return best
