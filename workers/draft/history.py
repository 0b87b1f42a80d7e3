"""What drafters learned from answers: kept apart by the key that an answer was given to, and bounded."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from workers.draft.automaton import SEPARATOR, SuffixAutomaton

_GENERATIONS: Final = 4
"""Of a full memory about this part is dropped at once, the oldest."""


class History:
    """The last answers of all keys, at most `most` tokens of them together. No key finds another's.

    `num_tokens` are kept now, with a separator behind each answer.
    """

    def __init__(self, most: int) -> None:
        self.num_tokens = 0
        self._most = most
        self._of_key: dict[str, list[SuffixAutomaton]] = {}
        # The keys of all generations, by age.
        self._ages: deque[str] = deque()

    def learn(self, key_id: str, tokens: Sequence[int]) -> None:
        """Keep an answer that was given to a key, the end of it if it is very long."""
        size = self._most // _GENERATIONS
        generations = self._of_key.setdefault(key_id, [])
        if not generations or generations[0].num_tokens >= size:
            generations.insert(0, SuffixAutomaton())
            self._ages.append(key_id)
        kept = [*tokens[-(size - 1) :], SEPARATOR]
        generations[0].extend(kept)
        self.num_tokens += len(kept)
        while self.num_tokens > self._most:
            self._drop_oldest()

    def of(self, key_id: str) -> Sequence[SuffixAutomaton]:
        """What is kept of a key's answers, the newest first."""
        return self._of_key.get(key_id, ())

    def _drop_oldest(self) -> None:
        key_id = self._ages.popleft()
        generations = self._of_key[key_id]
        self.num_tokens -= generations.pop().num_tokens
        if not generations:
            del self._of_key[key_id]
