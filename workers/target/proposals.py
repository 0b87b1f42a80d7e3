"""What drafters propose for one answer: what fits now, what it is worth, and what is still to come.

Scores are taken as they turned out: where a drafter's children are right less often than they say, all its
scores are lowered, level by level. What a drafter's proposals are worth and how long they take is learned for
each answer, beginning with what all answers of the target have shown.
"""

import copy
import functools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from workers.grammar import GRAMMAR, Grammar
from workers.pricing import Arrival
from workers.target.counters import Counters
from workers.tree import ANCHOR, TokenTree

_RATE: Final = 0.15
_POOL_RATE: Final = 0.02
_PRIOR_LEVELS: Final = 4.0
_MEMORY: Final = 0.95
_CORRECTIONS: Final = (0.2, 1.25)
_LATE: Final = 3.0
"""Spreads of its delay after which a proposal is not expected any more."""

_BASES: Final = 64
_MAILBOX: Final = 64


@dataclass(slots=True)
class Outlook:
    """What is to be expected of a drafter: seconds after a commit, and tokens that its tree adds to a step.

    Of those tokens the price of their rows is taken off.
    """

    seconds: float | None = None
    spread: float = 0.0
    tokens: float = 0.5
    _right: float = field(default=_PRIOR_LEVELS)
    _expected: float = field(default=_PRIOR_LEVELS)

    @property
    def correction(self) -> float:
        """How often its tokens are right where it expected one right token."""
        low, high = _CORRECTIONS
        return min(high, max(low, self._right / self._expected))

    def arrived(self, seconds: float, rate: float) -> None:
        """A proposal came so many seconds after the commit that it answers."""
        if self.seconds is None:
            self.seconds, self.spread = seconds, seconds / 4
            return
        self.spread += rate * (abs(seconds - self.seconds) - self.spread)
        self.seconds += rate * (seconds - self.seconds)

    def added(self, tokens: float, rate: float) -> None:
        """What a proposal was expected to add when it came."""
        self.tokens += rate * (tokens - self.tokens)

    def judged(self, right: int, expected: float) -> None:
        """Of its guesses `right` were, where `expected` should have been."""
        self._right = _PRIOR_LEVELS + _MEMORY * (self._right - _PRIOR_LEVELS) + right
        self._expected = _PRIOR_LEVELS + _MEMORY * (self._expected - _PRIOR_LEVELS) + expected


class Proposals:
    """Owned by the target's loop thread; `put` and `elsewhere` are for other threads.

    `elsewhere` are the names of drafters on draft workers that are to answer each commit. `pool` are the
    outlooks of all answers, by drafter. A step takes at most `max_nodes`, each for `price` tokens. What the
    answer's `grammar`, if it has one, forbids is dropped; what it demands is proposed, too.
    """

    def __init__(
        self, pool: dict[str, Outlook], max_nodes: int, patience_s: float, counters: Counters
    ) -> None:
        self.elsewhere: frozenset[str] = frozenset()
        self.price = 0.0
        self.grammar: Grammar | None = None
        self._pool = pool
        self._own: dict[str, Outlook] = {}
        self._max_nodes = max_nodes
        self._patience_s = patience_s
        self._counters = counters
        self._mailbox: deque[tuple[str, int, TokenTree, float]] = deque(maxlen=_MAILBOX)
        self._offers: dict[str, TokenTree] = {}
        self._merged: TokenTree | None = None
        self._answered: set[str] = set()
        self._silent: frozenset[str] = frozenset()
        self._heard: dict[str, int] = {}
        self._reached: dict[int, float] = {}

    def put(self, drafter: str, base_len: int, tree: TokenTree) -> None:
        """A proposal has arrived; of one drafter the newest wins."""
        self._mailbox.append((drafter, base_len, tree, time.monotonic()))

    def open_mailbox(self, tokens: Sequence[int], prompt_len: int, beside: frozenset[str]) -> None:
        """Take what arrived, as it fits after all committed `tokens`; what does not fit is dropped."""
        while self._mailbox:
            drafter, base_len, tree, arrived = self._mailbox.popleft()
            late = base_len < len(tokens)
            asked = drafter in self.elsewhere or drafter in beside
            fits = asked and prompt_len <= base_len <= len(tokens)
            rest = tree.rebase(tokens[base_len:]) if fits else None
            self._silent -= {drafter}
            # What is sent again, because it has grown, says nothing of how long a proposal takes.
            if fits and base_len > self._heard.get(drafter, -1):
                self._heard[drafter] = base_len
                if base_len in self._reached:
                    for outlook, rate in self._outlooks(drafter):
                        outlook.arrived(arrived - self._reached[base_len], rate)
            if not late and fits:
                self._answered.add(drafter)
            # An empty tree answers for its own base only.
            if rest is None or (late and not rest):
                self._counters.proposals_dropped += 1
                continue
            self._counters.proposals_rebased += late
            self._take(drafter, rest if self.grammar is None else self.grammar.prune(rest))

    def tree(self) -> TokenTree:
        """All that is proposed now, in one tree with calibrated scores.

        Where tokens were drawn, each draw has its own test: then the trees stand side by side.
        """
        if self._merged is None:
            trees = [
                calibrated(offer, self._outlook(drafter).correction)
                for drafter, offer in self._offers.items()
            ]
            drawn = any(tree.laws for tree in trees)
            join = TokenTree.beside if drawn else TokenTree.merge
            self._merged = functools.reduce(join, trees, TokenTree())
            if self.grammar is not None:
                self._merged = self.grammar.extend(self._merged, self._max_nodes)
        return self._merged

    def sources(self, tree: TokenTree) -> dict[str, tuple[int, ...]]:
        """The nodes of a tree that each drafter proposes now, and those that the grammar adds."""
        sources = {drafter: tree.nodes_in(offer) for drafter, offer in self._offers.items()}
        if self.grammar is not None:
            known = {node for nodes in sources.values() for node in nodes}
            sources[GRAMMAR] = tuple(node for node in range(len(tree)) if node not in known)
        return sources

    @property
    def missing(self) -> frozenset[str]:
        """Who has not answered the last commit, of those elsewhere."""
        return self.elsewhere - self._answered

    def expected(self, drafters: frozenset[str]) -> Arrival:
        """What these add if they take their turn now: they have it one after the other."""
        known = [self._outlook(drafter) for drafter in drafters]
        seconds = max((outlook.seconds or 0.0 for outlook in known), default=0.0)
        return Arrival(seconds, sum(outlook.tokens for outlook in known))

    def arrivals(self, now: float, step_s: float) -> list[Arrival]:
        """What is still to come and may be waited for, if a step takes `step_s`."""
        if not self._reached:
            return []
        passed = now - next(reversed(self._reached.values()))
        expected = []
        for drafter in self.missing - self._silent:
            outlook = self._outlook(drafter)
            # Of one that was never seen, something within half a step.
            mean = step_s / 2 if outlook.seconds is None else outlook.seconds
            spread = step_s / 2 if outlook.seconds is None else max(outlook.spread, 0.05 * mean)
            if passed > min(mean + _LATE * spread, self._patience_s):
                continue
            left = mean - passed if passed < mean else spread
            if passed + left > self._patience_s:
                continue
            expected.append(Arrival(left, outlook.tokens))
        return expected

    def committed(self, base_len: int, tokens: Sequence[int]) -> None:
        """Tokens were committed: judge what was proposed, and keep what still fits."""
        left = {}
        for drafter, offer in self._offers.items():
            right, expected = offer.judge(tokens)
            for outlook, _ in self._outlooks(drafter):
                outlook.judged(right, expected)
            rest = offer.rebase(tokens)
            if rest:
                left[drafter] = rest
        self._offers = left
        self._merged = None
        # One who did not come in time is not waited for until he is heard again.
        self._silent = self.missing if self._reached else frozenset()
        self._answered.clear()
        self._reached[base_len + len(tokens)] = time.monotonic()
        if len(self._reached) > _BASES:
            del self._reached[next(iter(self._reached))]

    def _take(self, drafter: str, tree: TokenTree) -> None:
        before = self._worth()
        self._offers[drafter] = tree
        self._merged = None
        added = self._worth() - before
        for outlook, rate in self._outlooks(drafter):
            outlook.added(max(0.0, added), rate)

    def _worth(self) -> float:
        """Tokens that a step is expected to gain by what is proposed, less the price of its rows."""
        best = sorted(self.tree().scores, reverse=True)[: self._max_nodes]
        return sum(max(0.0, score - self.price) for score in best)

    def _outlook(self, drafter: str) -> Outlook:
        if drafter not in self._own:
            self._own[drafter] = copy.copy(self._pool.setdefault(drafter, Outlook()))
        return self._own[drafter]

    def _outlooks(self, drafter: str) -> tuple[tuple[Outlook, float], ...]:
        return (self._outlook(drafter), _RATE), (self._pool[drafter], _POOL_RATE)


def calibrated(tree: TokenTree, correction: float) -> TokenTree:
    """The tree with every edge's probability multiplied by `correction`."""
    scores: list[float] = []
    factors: list[float] = []
    for parent, score in zip(tree.parents, tree.scores, strict=True):
        factors.append(correction * (1.0 if parent == ANCHOR else factors[parent]))
        above = 1.0 if parent == ANCHOR else scores[parent]
        scores.append(min(above, score * factors[-1]))
    return replace(tree, scores=tuple(scores))
