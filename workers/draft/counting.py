"""Drafting from counts: what followed the last tokens before, and how often.

A *place* stands for all occurrences of a sequence; what followed it leads to the places of longer ones. A
tree grows from a place best first. The probability of a follower is count / (total + doubt): ratios of counts
as in SuffixDecoding (arXiv 2411.04975), less a share for what was never seen (as Witten and Bell, 1991, with
a constant that is learned, by the length of the match).
"""

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from workers.draft.calibration import Doubt
from workers.draft.drafter import Ask
from workers.tree import ANCHOR, TokenTree

MIN_MATCH: Final = 2
MAX_MATCH: Final = 16
MAX_MATCHES: Final = 3
"""Matches of one text that are drafted from: the longest."""

_WIDTH: Final = 8
"""Followers of a place that are looked at."""
_FLOOR: Final = 0.02
"""A path less likely than this is not proposed."""


class Place(ABC):
    """All occurrences of a sequence in a text."""

    @abstractmethod
    def followers(self) -> tuple[int, list[tuple[int, int, "Place"]]]:
        """(occurrences that something follows, (token, count, place behind it) by falling count).

        The end of a text follows, too, but is no token.
        """


@dataclass(frozen=True, slots=True)
class Match:
    """The last `length` tokens occurred here."""

    length: int
    place: Place


@dataclass(frozen=True, slots=True)
class Found:
    """The matches of the last tokens in one text, at least one, longest first; `doubt` is of such texts."""

    matches: Sequence[Match]
    doubt: Doubt

    def judge(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that came: the doubt moves."""
        length, place = self.matches[0].length, self.matches[0].place
        for token in tokens:
            total, followers = place.followers()
            behind = next((behind for found, _, behind in followers if found == token), None)
            if total:
                self.doubt.observe(length, total, behind is not None)
            if behind is None:
                return
            length, place = length + 1, behind


def propose(texts: Sequence[Found], ask: Ask, most: int, span: int) -> TokenTree:
    """The likeliest continuations, at most `most` of them and `span` deep.

    What a longer match leaves open goes to the shorter ones of its text.
    """
    trees = [_of_text(found, ask, most, min(span, ask.max_depth)) for found in texts]
    if ask.chain:
        return max(trees, key=lambda tree: sum(tree.scores), default=TokenTree())
    merged = TokenTree()
    for tree in trees:
        merged = merged.merge(tree)
    return merged.cut(most, ask.max_depth)


def _of_text(found: Found, ask: Ask, most: int, max_depth: int) -> TokenTree:
    merged, open_mass = TokenTree(), 1.0
    for match in found.matches[: 1 if ask.chain else None]:
        tree, left = _grow(match, found.doubt, open_mass, most, max_depth, ask.chain)
        merged, open_mass = merged.merge(tree), open_mass * left
        if open_mass < _FLOOR:
            break
    return merged


def _grow(
    match: Match, doubt: Doubt, above: float, most: int, max_depth: int, chain: bool
) -> tuple[TokenTree, float]:
    """The tree behind a match that counts `above`, and the share of it that goes to what was never seen."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    order = itertools.count()
    waiting: list[tuple[float, int, int, int, int, Place]] = []

    def look_behind(place: Place, node: int, depth: int, score: float) -> float:
        total, followers = place.followers()
        doubted = doubt.at(match.length + depth)
        for token, count, behind in followers[: 1 if chain else _WIDTH]:
            likelihood = score * count / (total + doubted)
            if likelihood < _FLOOR:
                break
            heapq.heappush(waiting, (-likelihood, next(order), token, node, depth + 1, behind))
        return doubted / (total + doubted)

    left = look_behind(match.place, ANCHOR, 0, above)
    while waiting and len(tokens) < most:
        negative, _, token, parent, depth, place = heapq.heappop(waiting)
        if depth > max_depth:
            continue
        tokens.append(token)
        parents.append(parent)
        scores.append(-negative)
        look_behind(place, len(tokens) - 1, depth, -negative)
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores)), left
