"""Guesses of several positions that are made at once, and the trees that they make.

Whatever path leads to a depth, the guesses there are the same. So a path is right as often as the product
over its nodes says, each by its depth and rank, and the best tree is found without looking at a token
(Medusa, arXiv 2401.10774 §2.3.3).
"""

import heapq
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from workers.tree import ANCHOR, TokenTree

GUESSES: Final = 8
"""Guesses of a depth."""

ACCURACIES: Final = "accuracies.json"

_RATE: Final = 0.01


class Accuracies:
    """How often the guess of each rank is right at each depth, where those above it were right.

    Training measures them; they follow what is committed, at a `rate`. Beyond the last depth it is as there.
    """

    def __init__(self, measured: Sequence[Sequence[float]], rate: float = _RATE) -> None:
        self._rates = [list(rates) for rates in measured]
        self._rate = rate

    def at(self, depth: int) -> Sequence[float]:
        """One rate for each rank at this depth, 0 for the first level; never rising."""
        return list(itertools.accumulate(self._of(depth), min))

    def observe(self, levels: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
        """Learn from what was committed where `levels` had been guessed, best first."""
        for depth, (guesses, token) in enumerate(zip(levels, tokens, strict=False)):
            rates = self._of(depth)
            for rank, guess in enumerate(guesses):
                rates[rank] += self._rate * ((guess == token) - rates[rank])
            if token not in guesses:
                return

    def _of(self, depth: int) -> list[float]:
        return self._rates[min(depth, len(self._rates) - 1)]

    def save(self, folder: Path) -> None:
        """Put them beside the weights that they belong to."""
        rounded = [[round(rate, 4) for rate in rates] for rates in self._rates]
        lines = ",\n ".join(json.dumps(rates) for rates in rounded)
        (folder / ACCURACIES).write_text(f"[{lines}]\n")

    @staticmethod
    def load(folder: Path, depths: int) -> "Accuracies":
        """Those of a checkpoint, or what is usual where none were measured."""
        file = folder / ACCURACIES
        return (
            Accuracies(json.loads(file.read_text())) if file.is_file() else Accuracies.usual(depths)
        )

    @staticmethod
    def usual(depths: int) -> "Accuracies":
        """About those of published Medusa heads."""
        ranks = range(GUESSES)
        return Accuracies(
            [[0.5 * 0.6**depth / (1 + rank) ** 2 for rank in ranks] for depth in range(depths)]
        )


def best_tree(levels: Sequence[Sequence[tuple[int, float]]], max_nodes: int) -> TokenTree:
    """The `max_nodes` likeliest nodes of all paths through levels of tokens and their probabilities.

    Of a level the likeliest guess comes first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # (-score, order of arrival, parent, depth, rank): a node brings its next sibling and its first child.
    frontier: list[tuple[float, int, int, int, int]] = []

    def reach(parent: int, depth: int, rank: int) -> None:
        if depth < len(levels) and rank < len(levels[depth]):
            above = 1.0 if parent == ANCHOR else scores[parent]
            score = above * levels[depth][rank][1]
            heapq.heappush(frontier, (-score, reached[0], parent, depth, rank))
            reached[0] += 1

    reached = [0]
    reach(ANCHOR, 0, 0)
    while frontier and len(tokens) < max_nodes:
        score, _, parent, depth, rank = heapq.heappop(frontier)
        tokens.append(levels[depth][rank][0])
        parents.append(parent)
        scores.append(-score)
        reach(parent, depth, rank + 1)
        reach(len(tokens) - 1, depth + 1, 0)
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores))
