"""Scores that are probabilities: how sharp to take a drafter's guesses, learned from what happened."""

import math
from collections.abc import Sequence
from typing import Final

from workers.draft.growth import Grown
from workers.tree import ANCHOR

_RATE: Final = 0.02
_DEPTHS: Final = 8
_LIMITS: Final = (0.3, 6.0)
SAME_TEXT: Final = (4.0, 1.6, 0.7, 0.6, 0.45, 0.33, 0.23, 0.16, 0.15, 0.1)
OTHER_TEXTS: Final = (50.0, 25.0, 8.0, 4.5, 2.5, 0.9, 0.5, 0.3, 0.2, 0.1)
"""Doubts to begin with, by matches of 1, 2, 3, … tokens: where a text repeats itself, and others."""

_DOUBT_LIMITS: Final = (0.02, 50.0)


class Softness:
    """One temperature per depth for the softmax over a drafter's logits and noise.

    At each node that the target's tokens passed, the probabilities of the guessed children are compared with
    whether one of them was right. Where guesses are right less often than they say, they are taken softer:
    the fixed point is a drafter whose scores are how often it is right.
    """

    def __init__(self) -> None:
        self._values = [1.0] * _DEPTHS

    def at(self, depth: int) -> float:
        """The temperature for children at this depth, 1 for the first level."""
        return self._values[min(depth, _DEPTHS) - 1]

    def observe(self, tree: Grown, tokens: Sequence[int]) -> None:
        """Learn from what was committed under the root of a tree."""
        node, above = ANCHOR, 1.0
        for depth, token in enumerate(tokens, 1):
            children = [i for i, parent in enumerate(tree.parents) if parent == node]
            if not children or above <= 0.0:
                return
            expected = sum(tree.scores[i] for i in children) / above
            right = next((i for i in children if tree.tokens[i] == token), None)
            self._move(depth, expected - (right is not None))
            if right is None:
                return
            node, above = right, tree.scores[right]

    def _move(self, depth: int, excess: float) -> None:
        place = min(depth, _DEPTHS) - 1
        low, high = _LIMITS
        moved = self._values[place] * math.exp(_RATE * excess)
        self._values[place] = min(high, max(low, moved))


class Doubt:
    """How many occurrences what was never seen is worth, by the length of the match.

    After a match of `total` occurrences a token that never followed comes with probability
    doubt / (total + doubt). The doubt moves until it does so as often as that says; `at_first` has one for
    each length.
    """

    def __init__(self, at_first: Sequence[float]) -> None:
        self._values = list(at_first)

    def at(self, length: int) -> float:
        """The doubt after a match of so many tokens, in occurrences."""
        return self._values[min(length, len(self._values)) - 1]

    def observe(self, length: int, total: int, seen: bool) -> None:
        """Learn from what came after a match: a token that had followed one of `total` before, or not."""
        place = min(length, len(self._values)) - 1
        value = self._values[place]
        low, high = _DOUBT_LIMITS
        moved = value * math.exp(_RATE * (total / (total + value) - seen))
        self._values[place] = min(high, max(low, moved))
