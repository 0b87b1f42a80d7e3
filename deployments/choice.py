"""Which drafters an answer is drafted by, where the request leaves it to the server.

Every drafter that was asked is judged on what was committed, whoever's tokens were verified: how far would
its tree have reached? So a round teaches about all drafters and sets of them at once, which is what makes
choosing among them no bandit problem (Liu et al., "Not-a-Bandit", ICLR 2026, arXiv 2510.20064). The leader
of discounted averages is followed: of all sets the one with the most tokens per second,

    (1 + tokens reached) / (time of the target's step + time until the slowest of the set has proposed).

Those that are left out are asked again after 8, 16, … 64 rounds.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from workers.tree import ANCHOR, TokenTree

_RATE: Final = 0.1
_POOL_RATE: Final = 0.02
_FIRST_PAUSE: Final = 8
_LONGEST_PAUSE: Final = 64
_MARGIN: Final = 0.98
_MOST_SINGLY: Final = 4
"""Of more drafters than this not every set is considered, but each alone, all, and none."""

Set = frozenset[str]


class Average:
    """A discounted average; None until something was observed."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float, rate: float) -> None:
        """Take one more value."""
        self.value = value if self.value is None else self.value + rate * (value - self.value)


class Records:
    """What is known of sets of drafters: tokens reached, and seconds until a drafter has proposed."""

    def __init__(self) -> None:
        self.reach: dict[Set, Average] = {}
        self.delay: dict[str, Average] = {}
        self.drafted_step = Average()
        self.plain_step = Average()

    def speed(self, drafters: Set) -> float | None:
        """Tokens per second that a set is expected to give; None if that is not known."""
        if not drafters:
            plain = self.plain_step.value
            return None if plain is None else 1.0 / plain
        reach = self.reach[drafters].value if drafters in self.reach else None
        delays = [self.delay[d].value if d in self.delay else None for d in drafters]
        step = self.drafted_step.value
        if reach is None or step is None or None in delays:
            return None
        return (1.0 + reach) / (step + max(delay for delay in delays if delay is not None))


@dataclass(slots=True)
class _Round:
    """Trees for one base, until it is known how far each reaches."""

    base_len: int
    trees: dict[str, TokenTree] = field(default_factory=dict)


class Choice:
    """The choice of one answer; `asked` are the drafters that are to propose now.

    `pool` are the records of all answers, which it reads first and adds to. Without `auto` all are asked.
    """

    def __init__(self, pool: Records, auto: bool) -> None:
        self.drafters: Set = frozenset()
        self.asked: Set = frozenset()
        self._auto = auto
        self._own = copy.deepcopy(pool)
        self._learning = ((self._own, _RATE), (pool, _POOL_RATE))
        self._rounds: list[_Round] = []
        self._pause = _FIRST_PAUSE
        self._since_all = 0
        self._best = self.drafters

    def join(self, drafters: Iterable[str]) -> None:
        """Drafters have come: all are asked until they are known."""
        self.drafters |= frozenset(drafters)
        self._best = self.asked = self.drafters

    def lose(self, drafters: Iterable[str]) -> None:
        """Drafters are gone."""
        self.drafters -= frozenset(drafters)
        self._best &= self.drafters
        self.asked &= self.drafters

    def proposed(self, drafter: str, base_len: int, tree: TokenTree, delay_s: float | None) -> None:
        """A drafter has proposed; `delay_s` is None where it was not the answer to one commit."""
        if not self._rounds or self._rounds[-1].base_len != base_len:
            self._rounds = [*self._rounds[-3:], _Round(base_len)]
        self._rounds[-1].trees[drafter] = tree
        if delay_s is not None:
            for records, rate in self._learning:
                records.delay.setdefault(drafter, Average()).observe(delay_s, rate)

    def committed(self, tokens: Sequence[int], step_s: float, drafted: bool) -> None:
        """All committed tokens, after a round that took `step_s` on the target; decides who is asked."""
        for records, rate in self._learning:
            step = records.drafted_step if drafted else records.plain_step
            step.observe(step_s, rate)
        self._judge(tokens)
        if self._auto:
            self._decide()

    def delay_s(self) -> float:
        """How long those that are asked take to propose, the slowest of them, in seconds; 0 if unknown."""
        delays = (self._own.delay[d].value for d in self.asked if d in self._own.delay)
        return max((delay for delay in delays if delay is not None), default=0.0)

    def worth_s(self) -> float | None:
        """How long the target may wait for those that are asked before it loses by it, in seconds.

        What they are expected to reach saves steps, and their rows make the step longer. None if that is not
        known yet.
        """
        reach = self._own.reach.get(self.asked)
        drafted = self._own.drafted_step.value
        if reach is None or reach.value is None or drafted is None:
            return None
        plain = self._own.plain_step.value or drafted
        return max(0.0, reach.value * plain - max(0.0, drafted - plain))

    def _judge(self, tokens: Sequence[int]) -> None:
        left = []
        for judged in self._rounds:
            reached = {
                drafter: _reach(tree, tokens[judged.base_len :])
                for drafter, tree in judged.trees.items()
            }
            if None in reached.values():
                left.append(judged)
                continue
            for drafters in _sets(judged.trees):
                best = max((reached[drafter] or 0 for drafter in drafters), default=0)
                for records, rate in self._learning:
                    records.reach.setdefault(drafters, Average()).observe(best, rate)
        self._rounds = left

    def _decide(self) -> None:
        speeds = {
            drafters: self._own.speed(drafters) for drafters in (*_sets(self.drafters), frozenset())
        }
        known = {drafters: speed for drafters, speed in speeds.items() if speed is not None}
        if self.drafters not in known:
            return  # Not everyone was seen yet: all are asked.
        # A larger set, and plain decoding, have to win by more than what noise may give.
        best = max(known, key=lambda drafters: known[drafters] * _MARGIN ** abs(len(drafters) - 1))
        if best != self._best:
            self._best, self._pause = best, _FIRST_PAUSE
        self._since_all += 1
        if self._best == self.drafters or self._since_all > self._pause:
            if self._best != self.drafters:
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._since_all = 0
            self.asked = self.drafters
        else:
            self.asked = self._best


def _sets(drafters: Iterable[str]) -> list[Set]:
    names = sorted(drafters)
    if not names:
        return []
    if len(names) > _MOST_SINGLY:
        return [*(frozenset([name]) for name in names), frozenset(names)]
    sizes = range(1, len(names) + 1)
    return [frozenset(chosen) for size in sizes for chosen in combinations(names, size)]


def _reach(tree: TokenTree, tokens: Sequence[int]) -> int | None:
    """How many tokens a tree foretold; None while it might have foretold more."""
    node = ANCHOR
    for depth, token in enumerate(tokens):
        child = tree.child(node, token)
        if child is None:
            return depth
        node = child
    return None if tree.has_children(node) else len(tokens)
