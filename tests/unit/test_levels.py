"""Trees of guesses that are made at once, and the accuracies that they are built from."""

import itertools
import math
import random
from pathlib import Path

import pytest

from workers.draft.levels import GUESSES, Accuracies, best_tree


def paths(levels: list[list[tuple[int, float]]]) -> dict[tuple[int, ...], float]:
    """Every path through levels and its probability."""
    return {
        tuple(token for token, _ in path): math.prod(rate for _, rate in path)
        for depth in range(1, len(levels) + 1)
        for path in itertools.product(*levels[:depth])
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_has_the_best_paths_of_all(seed: int) -> None:
    """Against all paths."""
    rng = random.Random(seed)
    rates = [
        sorted((rng.random() for _ in range(rng.randrange(1, 5))), reverse=True) for _ in range(4)
    ]
    levels = [
        [(10 * depth + rank, rate) for rank, rate in enumerate(row)]
        for depth, row in enumerate(rates)
    ]
    every = paths(levels)
    for count in (1, 5, 12, 40):
        tree = best_tree(levels, count)
        tree.check(100, count)
        assert len(tree) == min(count, len(every))
        best = sorted(every.values(), reverse=True)[: len(tree)]
        assert sorted(tree.scores, reverse=True) == pytest.approx(best)
        for node, score in enumerate(tree.scores):
            path, above = [], node
            while above >= 0:
                path.insert(0, tree.tokens[above])
                above = tree.parents[above]
            assert every[tuple(path)] == pytest.approx(score)


def test_without_guesses_there_is_no_tree() -> None:
    assert len(best_tree([], 8)) == 0
    assert len(best_tree([[], [(1, 0.5)]], 8)) == 0
    assert best_tree([[(1, 0.5)], [], [(2, 0.9)]], 8).tokens == (1,)


def test_accuracies_follow_what_is_committed() -> None:
    """Rank 1 is right at depth 1, nothing at depth 2: depth 3 is not tested."""
    rates = Accuracies([[0.5, 0.2], [0.5, 0.2], [0.5, 0.2]])
    for _ in range(1000):
        rates.observe([[7, 8], [1, 2], [3, 4]], [8, 9, 3])
    # A later guess is never said to be likelier than an earlier one.
    assert rates.at(0) == pytest.approx([0, 0], abs=1e-3)
    for _ in range(1000):
        rates.observe([[8, 7], [1, 2], [3, 4]], [8, 9, 3])
    assert rates.at(0) == pytest.approx([1, 0], abs=1e-3)
    assert rates.at(1) == pytest.approx([0, 0], abs=1e-3)
    assert list(rates.at(2)) == [0.5, 0.2]
    rates.observe([], [1, 2])
    rates.observe([[7, 8]], [])


def test_accuracies_are_kept_beside_the_weights(tmp_path: Path) -> None:
    usual = Accuracies.load(tmp_path, 3)
    for depth in range(3):
        assert list(usual.at(depth)) == sorted(usual.at(depth), reverse=True)
        assert len(usual.at(depth)) == GUESSES
        assert sum(usual.at(depth)) < 1
    Accuracies([[0.25, 0.125], [0.5, 0.0]]).save(tmp_path)
    known = Accuracies.load(tmp_path, 2)
    assert [list(known.at(depth)) for depth in range(2)] == [[0.25, 0.125], [0.5, 0.0]]
