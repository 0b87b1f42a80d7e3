"""Searching a datastore: binary search in its sorted positions (REST, arXiv 2311.08252)."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from workers.datastore import files
from workers.draft.counting import MAX_MATCH, MIN_MATCH, Match, Place

_OCCURRENCES: Final = 1024
"""Occurrences of a match that are looked at; of more, as many at equal distances in their order."""
_ENOUGH: Final = 64
"""Occurrences behind which no shorter match is looked for."""

Positions = npt.NDArray[np.integer[Any]]


class Datastore:
    """The datastore in a folder, mapped into memory. Raises DatastoreError if it cannot be used."""

    def __init__(self, folder: Path, vocabulary_fingerprint: str) -> None:
        described = files.check_vocabulary(folder, vocabulary_fingerprint)
        # As plain arrays: every slice of a memmap pays for being one.
        self._tokens = np.asarray(np.load(folder / files.TOKENS, mmap_mode="r"))
        self._positions = np.asarray(np.load(folder / files.SUFFIXES, mmap_mode="r"))
        if not len(self._tokens) == len(self._positions) == described.num_tokens:
            raise files.DatastoreError(f"{folder} is broken: build it again")
        self._bytes = self._tokens.view(np.uint8).data
        self._sorted = self._positions.data
        self._token_bytes = self._tokens.itemsize
        self._separator = files.separator(self._token_bytes)

    def find(self, tokens: Sequence[int]) -> Iterator[Match]:
        """The ends of a sequence that occur here, longest first; shorter ones if they occur more often."""
        tail = tokens[-MAX_MATCH:]
        if len(tail) < MIN_MATCH or max(tail) >= self._separator:
            return
        lengths = range(MIN_MATCH, len(tail) + 1)
        found = bisect_left(lengths, True, key=lambda length: not self._occurs(tail, length))
        before = 0
        for length in reversed(lengths[:found]):
            low, high = self._range(tail, length)
            if high - low > before:
                step = -(-(high - low) // _OCCURRENCES)
                yield Match(length, RangePlace(self, self._positions[low:high:step], length))
                before = high - low
            if before >= _ENOUGH:
                return

    def followers(
        self, positions: Positions, length: int
    ) -> tuple[int, list[tuple[int, int, Place]]]:
        """See Place.followers, for occurrences of `length` tokens, sorted."""
        behind = self._tokens[positions + length]
        total = len(behind)
        if total == 1:
            # Most places are of this kind, and numpy is slow with little.
            groups = [(int(behind[0]), 0, 1)]
        else:
            # What follows is sorted: equal tokens are neighbours.
            starts = [0, *(np.flatnonzero(behind[1:] != behind[:-1]) + 1).tolist()]
            groups = list(zip(behind[starts].tolist(), starts, [*starts[1:], total], strict=True))
            groups.sort(key=lambda group: (group[1] - group[2], group[0]))
        return total, [
            (token, end - start, RangePlace(self, positions[start:end], length + 1))
            for token, start, end in groups
            if token != self._separator
        ]

    def _range(self, tail: Sequence[int], length: int) -> tuple[int, int]:
        """Where the last `length` tokens lie among the sorted positions."""
        sought, text_at = self._sought(tail, length)
        low = bisect_left(self._sorted, sought, key=text_at)
        return low, bisect_right(self._sorted, sought, low, key=text_at)

    def _occurs(self, tail: Sequence[int], length: int) -> bool:
        sought, text_at = self._sought(tail, length)
        low = bisect_left(self._sorted, sought, key=text_at)
        return low < len(self._sorted) and text_at(self._sorted[low]) == sought

    def _sought(self, tail: Sequence[int], length: int) -> tuple[bytes, Callable[[int], bytes]]:
        """The last `length` tokens as bytes, and as many at a position: they compare as the tokens do."""
        size = length * self._token_bytes

        def text_at(position: int) -> bytes:
            start = position * self._token_bytes
            return bytes(self._bytes[start : start + size])

        return np.array(tail[-length:], self._tokens.dtype).tobytes(), text_at


class RangePlace(Place):
    """Occurrences in a datastore that agree in `length` tokens, sorted by what follows."""

    __slots__ = ("_length", "_positions", "_store")

    def __init__(self, store: Datastore, positions: Positions, length: int) -> None:
        self._store = store
        self._positions = positions
        self._length = length

    def followers(self) -> tuple[int, list[tuple[int, int, Place]]]:
        """See Place."""
        return self._store.followers(self._positions, self._length)
