"""Which drafters an answer is drafted by, where the request leaves it to the server.

Every drafter that was asked is judged on what was committed, whoever's tokens were verified: how far would
its tree have reached? So a round teaches about all drafters and sets of them at once, which is what makes
choosing among them no bandit problem (Liu et al., "Not-a-Bandit", ICLR 2026, arXiv 2510.20064). The leader
of discounted averages is followed: of all sets the one that gains most over plain decoding,

    tokens reached − price · rows − pace · time that the target waits for the slowest of the set,

the price of a row and the pace being the target's, sent with every commit: a loaded target's price ends
drafting. Those that are left out are asked again for some rounds after 8, 16, … 64, unless the price forbids
any row.
"""

import copy
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from workers.rpc import messages as m
from workers.tree import ANCHOR, TokenTree

_RATE: Final = 0.05
_POOL_RATE: Final = 0.02
_FIRST_PAUSE: Final = 8
_LONGEST_PAUSE: Final = 64
_PROBE: Final = 4
_MARGIN: Final = 0.02
_ROUNDS: Final = 8
_KNOWN_AFTER: Final = 12
PRICES: Final = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
"""Prices of a row for which gains are kept; above the last there is nothing to be learned by asking."""

_LEVELS: Final = range(len(PRICES))
_MOST_SINGLY: Final = 4
"""Of more drafters than this not every set is considered, but each alone, all, and none."""

Set = frozenset[str]


class Average:
    """A discounted average; None until something was observed. The first values count alike."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.count = 0

    def observe(self, value: float, rate: float) -> None:
        """Take one more value."""
        self.count += 1
        before = self.value or 0.0
        self.value = before + max(rate, 1.0 / self.count) * (value - before)


class Records:
    """What is known of sets of drafters, averaged over rounds.

    For each of PRICES: `reach`, tokens that a step would accept of a set's trees, and `rows` that it would
    verify. `delay` seconds until a drafter has proposed, `wait` seconds that the target waited for a set,
    `used` the share of what the trees reached that was really accepted.
    """

    def __init__(self) -> None:
        self.reach: dict[Set, tuple[Average, ...]] = {}
        self.rows: dict[Set, tuple[Average, ...]] = {}
        self.delay: dict[str, Average] = {}
        self.wait: dict[Set, Average] = {}
        self.used = Average()
        self.price = self.pace = 0.0
        self.resting = False

    @property
    def level(self) -> int:
        """Where the price now is among PRICES."""
        return max(0, bisect_right(PRICES, self.price) - 1)

    def judged(self, drafters: Set, reach: Sequence[int], rows: Sequence[int], rate: float) -> None:
        """What the trees of a set would have given, and their rows, at each of PRICES."""
        for averages, values in ((self.reach, reach), (self.rows, rows)):
            if drafters not in averages:
                averages[drafters] = tuple(Average() for _ in PRICES)
            for average, value in zip(averages[drafters], values, strict=True):
                average.observe(value, rate)

    def gain(self, drafters: Set) -> float | None:
        """Tokens a round that a set gains over plain decoding now; None if that is not known."""
        if not drafters:
            return 0.0
        delays = [self.delay[drafter].value for drafter in drafters if drafter in self.delay]
        known = [delay for delay in delays if delay is not None]
        if drafters not in self.reach or len(known) < len(drafters):
            return None
        if self.reach[drafters][0].count < _KNOWN_AFTER:
            return None
        exposed = max(known)
        if drafters in self.wait:
            # What grew while the target verified is not waited for.
            exposed = min(exposed, self.wait[drafters].value or 0.0)
        reach = self.reach[drafters][self.level].value or 0.0
        rows = self.rows[drafters][self.level].value or 0.0
        used = 1.0 if self.used.value is None else self.used.value
        return used * reach - self.price * rows - self.pace * exposed


@dataclass(slots=True)
class _Round:
    """Trees for one base, until it is known how far each reaches; and what its step accepted, once known."""

    base_len: int
    trees: dict[str, TokenTree] = field(default_factory=dict)
    asked: Set = frozenset()
    accepted: int | None = None


class Choice:
    """The choice of one answer; `asked` are the drafters that are to propose now.

    `pool` are the records of all answers, which it reads first and adds to. A step verifies at most
    `max_nodes` nodes. Without `auto` all are asked.
    """

    def __init__(self, pool: Records, auto: bool, max_nodes: int) -> None:
        self.drafters: Set = frozenset()
        self.asked: Set = frozenset()
        self._auto = auto
        self._max_nodes = max_nodes
        self._own = copy.deepcopy(pool)
        self._learning = ((self._own, _RATE), (pool, _POOL_RATE))
        self._rounds: list[_Round] = []
        self._pause = _FIRST_PAUSE
        self._rest = 0
        self._best = self.drafters

    @property
    def priced_out(self) -> bool:
        """Whether the choice is free, and the target rests or its price forbids any row."""
        return self._auto and (self._own.resting or self._own.price >= PRICES[-1])

    def join(self, drafters: Iterable[str]) -> None:
        """Drafters have come: all are asked until they are known."""
        self.drafters |= frozenset(drafters)
        self._best = self.asked = self.drafters
        if self._auto:
            self._decide()

    def lose(self, drafters: Iterable[str]) -> None:
        """Drafters are gone."""
        self.drafters -= frozenset(drafters)
        self._best &= self.drafters
        self.asked &= self.drafters

    def proposed(self, drafter: str, base_len: int, tree: TokenTree, delay_s: float | None) -> None:
        """A drafter has proposed; `delay_s` is None where it was not the answer to one commit.

        Trees that are sent again for a base, because they have grown, come too late for its step.
        """
        if not self._auto:
            return
        trees = self._round(base_len).trees
        if drafter in trees:
            return
        trees[drafter] = tree.cut(self._max_nodes, len(tree))
        if delay_s is not None:
            for records, rate in self._learning:
                records.delay.setdefault(drafter, Average()).observe(delay_s, rate)

    def committed(self, tokens: Sequence[int], committed: m.Committed) -> None:
        """All committed tokens, and the round that ended with them; decides who is asked."""
        if not self._auto:
            return
        self._round(committed.base_len).asked = self.asked
        self._round(committed.base_len).accepted = committed.accepted
        for records, rate in self._learning:
            if self.asked:
                waited = committed.timings.wait_ns / 1e9
                records.wait.setdefault(self.asked, Average()).observe(waited, rate)
            records.price, records.pace = committed.price, committed.pace
            records.resting = committed.resting
        self._judge(tokens)
        self._decide()

    def _round(self, base_len: int) -> _Round:
        found = next((r for r in self._rounds if r.base_len == base_len), None)
        if found is None:
            found = _Round(base_len)
            self._rounds = [*self._rounds[-_ROUNDS:], found]
        return found

    def _judge(self, tokens: Sequence[int]) -> None:
        left = []
        for judged in self._rounds:
            since = tokens[judged.base_len :]
            if not since or not all(_is_judged(tree, since) for tree in judged.trees.values()):
                left.append(judged)
                continue
            by_price = {d: _by_price(tree, since) for d, tree in judged.trees.items()}
            for drafters in _sets(judged.trees):
                reach = [max(by_price[d][level][0] for d in drafters) for level in _LEVELS]
                rows = [sum(by_price[d][level][1] for d in drafters) for level in _LEVELS]
                rows = [min(self._max_nodes, count) for count in rows]
                for records, rate in self._learning:
                    records.judged(drafters, reach, rows, rate)
                    found = reach[records.level]
                    if drafters == judged.asked and judged.accepted is not None and found:
                        records.used.observe(min(1.0, judged.accepted / found), rate)
        self._rounds = left

    def _decide(self) -> None:
        if self.priced_out:
            self.asked = frozenset()
            return
        gains = {
            drafters: self._own.gain(drafters)
            for drafters in (*_sets(self.drafters), frozenset[str]())
        }
        known = {drafters: gain for drafters, gain in gains.items() if gain is not None}
        if self.drafters not in known:
            self.asked = self.drafters
            return  # Not everyone was seen yet: all are asked.
        # A larger set, and any, have to win by more than what noise may give.
        best = max(known, key=lambda drafters: known[drafters] - _MARGIN * len(drafters))
        if best != self._best:
            self._best, self._pause = best, _FIRST_PAUSE
        self._rest += 1
        if self._rest > self._pause:
            # Some rounds in a row: the first of a drafter that was away says little.
            self._rest, self._pause = -_PROBE, min(2 * self._pause, _LONGEST_PAUSE)
        self.asked = self.drafters if self._rest < 0 else self._best


def _sets(drafters: Iterable[str]) -> list[Set]:
    names = sorted(drafters)
    if not names:
        return []
    if len(names) > _MOST_SINGLY:
        return [*(frozenset([name]) for name in names), frozenset(names)]
    sizes = range(1, len(names) + 1)
    return [frozenset(chosen) for size in sizes for chosen in combinations(names, size)]


def _by_price(tree: TokenTree, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """(tokens reached, rows) at each of PRICES, where nodes likelier than the price are verified."""
    path = [tree.scores[node] for node in _path(tree, tokens)]
    # A child is never likelier than its parent.
    return [
        (sum(score > price for score in path), sum(score > price for score in tree.scores))
        for price in PRICES
    ]


def _path(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """The nodes of the tokens that a tree foretold."""
    path: list[int] = []
    for token in tokens:
        child = tree.child(path[-1] if path else ANCHOR, token)
        if child is None:
            break
        path.append(child)
    return path


def _is_judged(tree: TokenTree, tokens: Sequence[int]) -> bool:
    """Whether it is known how far a tree reaches; it might reach further than `tokens`."""
    path = _path(tree, tokens)
    return len(path) < len(tokens) or not (path and tree.has_children(path[-1]))
