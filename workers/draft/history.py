"""What drafters learned from answers: kept apart by the key that an answer was given to, and bounded."""

from collections import deque
from collections.abc import Sequence

from workers.draft.automaton import SEPARATOR, SuffixAutomaton

_GENERATIONS = 4
"""The oldest part of the memory is dropped at once: about this part of it."""


class History:
    """The last answers of all keys, at most `most` tokens of them together. No key finds another's."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._generations: deque[tuple[str, SuffixAutomaton]] = deque()

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept, with a separator behind each answer."""
        return sum(automaton.num_tokens for _, automaton in self._generations)

    def learn(self, key_id: str, tokens: Sequence[int]) -> None:
        """Keep an answer that was given to a key, the end of it if it is very long."""
        size = self._most // _GENERATIONS
        generation = next(iter(self.of(key_id)), None)
        if generation is None or generation.num_tokens >= size:
            generation = SuffixAutomaton()
            self._generations.append((key_id, generation))
        generation.extend([*tokens[-(size - 1) :], SEPARATOR])
        while self.num_tokens > self._most:
            self._generations.popleft()

    def of(self, key_id: str) -> list[SuffixAutomaton]:
        """What is kept of a key's answers, the newest first."""
        return [automaton for owner, automaton in reversed(self._generations) if owner == key_id]
