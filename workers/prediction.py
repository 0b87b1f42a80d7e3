"""Where an answer stands in the text that its caller expects, and how likely it is to go on there.

The answer is followed token by token. Where it leaves the prediction, the place is found again by what the
answer says next: the longest end of it that occurs in the prediction, of equally long ones the next behind
the place that was left.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import Final

PREDICTION: Final = "prediction"
"""The drafter of every target that drafts from predictions."""

_MIN_MATCH: Final = 2
_MAX_MATCH: Final = 16
_OCCURRENCES: Final = 32
"""Places of each side that are looked at, the nearest."""

_PRIOR: Final = 4
"""Tokens that a stretch of the prediction is right for before anything is known, less where it was not."""


class Alignment:
    """An answer beside its prediction; `tokens` are the prediction's.

    Appending a token takes constant time, however long either is.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tuple(tokens)
        self._at: int | None = 0
        self._left = 0
        self._run = self._right = self._wrong = 0
        self._appeared = bytearray(len(self.tokens))
        self._tail: deque[int] = deque(maxlen=_MAX_MATCH)

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that the answer holds, each once, in the stretches that were followed."""
        return sum(self._appeared)

    def observe(self, tokens: Sequence[int]) -> None:
        """The answer goes on with these tokens."""
        for token in tokens:
            self._tail.append(token)
            at = self._at
            if at is not None and at < len(self.tokens):
                if self.tokens[at] == token:
                    self._run += 1
                    self._right += 1
                    self._stand_behind(at, at + 1)
                    continue
                self._wrong += 1
            self._at = None
            self._find()

    def upcoming(self, most: int) -> tuple[Sequence[int], list[float]]:
        """The next tokens of the prediction, at most `most`, and how likely the answer goes on up to each.

        What was right for r tokens is so for k more with probability r / (r + k), the rule of succession: a
        place that was only just found has to prove itself before it is followed far.
        """
        if self._at is None:
            return (), []
        tokens = self.tokens[self._at : self._at + most]
        right = self._run + min(_PRIOR, (_PRIOR + self._right) / (1 + self._wrong))
        return tokens, [right / (right + ahead) for ahead in range(1, len(tokens) + 1)]

    @cached_property
    def _ends(self) -> dict[tuple[int, ...], list[int]]:
        """The positions behind each run of _MIN_MATCH tokens; most predictions are never left."""
        ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(_MIN_MATCH, len(self.tokens) + 1):
            ends.setdefault(self.tokens[end - _MIN_MATCH : end], []).append(end)
        return ends

    def _find(self) -> None:
        """Stand where the end of the answer occurs in the prediction, if it does."""
        tail = list(self._tail)
        ends = self._ends.get(tuple(tail[-_MIN_MATCH:]), [])
        ahead = bisect_left(ends, self._left)
        near = ends[max(0, ahead - _OCCURRENCES) : ahead + _OCCURRENCES]
        if near:
            length, _, _, end = max(
                (self._match(end, tail), end >= self._left, -abs(end - self._left), end)
                for end in near
            )
            self._run = length - _MIN_MATCH
            self._stand_behind(end - length, end)

    def _match(self, end: int, tail: Sequence[int]) -> int:
        """How many of the last tokens stand before a position; the last _MIN_MATCH do."""
        match = _MIN_MATCH
        while match < min(len(tail), end) and self.tokens[end - 1 - match] == tail[-1 - match]:
            match += 1
        return match

    def _stand_behind(self, start: int, end: int) -> None:
        """The answer has come to a position, by the tokens since another."""
        self._appeared[start:end] = b"\x01" * (end - start)
        self._at = self._left = end
