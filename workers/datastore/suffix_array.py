"""Sorting all positions of a text by what follows there: prefix doubling (Manber and Myers, 1993).

Positions that agree in the first k tokens have one rank; a sort by the ranks of a position and of the one k
further on makes 2k of them. Nothing that is drafted looks further than some tokens, so a few rounds do.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


def suffix_array(
    tokens: npt.NDArray[Any], depth: int, progress: Callable[[], object]
) -> npt.NDArray[np.integer[Any]]:
    """All positions, by the `depth` tokens from there on, then by position; `depth` is a power of 2.

    An end comes before any token. `progress` is called after each of log2(depth) + 1 sorts. Takes about 50
    bytes a token while it runs.
    """
    # Ranks, not tokens, so that the product of two fits into 64 bits.
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    reach = 1
    while reach < depth:
        later = np.zeros_like(rank)
        later[:-reach] = rank[reach:] + 1
        key = rank * (later.max(initial=0) + 1) + later
        order = np.argsort(key)
        key = key[order]
        rank[order] = np.concatenate(([0], np.cumsum(key[1:] != key[:-1])))[: len(key)]
        reach *= 2
        progress()
    positions = np.argsort(rank, kind="stable")
    progress()
    return positions.astype(np.int32 if len(tokens) < 2**31 else np.int64)
