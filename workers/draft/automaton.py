"""Every sequence that occurs in a growing text, with its count, in memory proportional to the text.

A suffix automaton (Blumer et al., 1985): a state stands for the sequences that end at the same positions.
Appending a token takes constant time on average; the longest end of the text that occurred before is where
the last state's link leads.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from workers.draft.counting import MIN_MATCH, Match, Place

SEPARATOR: Final = -1
"""Ends a text of several; no token."""

_ROOT: Final = 0
_NONE: Final = -1
_COUNTED: Final = 64
"""States that an appended token is counted in: a text of one token would have as many as tokens."""


class SuffixAutomaton:
    """Texts of tokens, each but the last ended by a SEPARATOR."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [_NONE]
        self._length = [0]
        self._count = [0]
        self._last = _ROOT
        self.num_tokens = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._append(token)

    def matches(self) -> Iterator[Match]:
        """The ends of the text that occurred in it before, the longest first."""
        return self._at(self._link[self._last], self._length[self._link[self._last]])

    def find(self, tokens: Sequence[int]) -> Iterator[Match]:
        """The ends of another text that occur in this one, the longest first."""
        state, length = _ROOT, 0
        for token in tokens:
            while state != _ROOT and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return self._at(state, length)

    def followers(self, state: int) -> tuple[int, list[tuple[int, int, Place]]]:
        """See Place.followers."""
        counts = self._count
        found = self._next[state]
        total = sum(counts[behind] for behind in found.values())
        ranked = sorted(found.items(), key=lambda item: (-counts[item[1]], item[0]))
        return total, [
            (token, counts[behind], StatePlace(self, behind))
            for token, behind in ranked
            if token != SEPARATOR
        ]

    def _at(self, state: int, length: int) -> Iterator[Match]:
        while state > _ROOT and length >= MIN_MATCH:
            yield Match(length, StatePlace(self, state))
            state = self._link[state]
            length = self._length[state]

    def _append(self, token: int) -> None:
        self.num_tokens += 1
        made = self._add({}, self._length[self._last] + 1, 0)
        state = self._last
        while state != _NONE and token not in self._next[state]:
            self._next[state][token] = made
            state = self._link[state]
        self._link[made] = _ROOT if state == _NONE else self._only_behind(state, token)
        self._last = made
        self._count_up(made)

    def _only_behind(self, state: int, token: int) -> int:
        """The state of a state's longest sequence and a token, split off if longer ones share it."""
        shared = self._next[state][token]
        length = self._length[state] + 1
        if self._length[shared] == length:
            return shared
        split = self._add(dict(self._next[shared]), length, self._count[shared])
        self._link[split] = self._link[shared]
        self._link[shared] = split
        while state != _NONE and self._next[state].get(token) == shared:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _add(self, behind: dict[int, int], length: int, count: int) -> int:
        self._next.append(behind)
        self._link.append(_ROOT)
        self._length.append(length)
        self._count.append(count)
        return len(self._link) - 1

    def _count_up(self, state: int) -> None:
        for _ in range(_COUNTED):
            if state <= _ROOT:
                return
            self._count[state] += 1
            state = self._link[state]


class StatePlace(Place):
    """A state of an automaton."""

    __slots__ = ("_automaton", "_state")

    def __init__(self, automaton: SuffixAutomaton, state: int) -> None:
        self._automaton = automaton
        self._state = state

    def followers(self) -> tuple[int, list[tuple[int, int, Place]]]:
        """See Place."""
        return self._automaton.followers(self._state)
