"""Prompt lookup: what followed the last tokens before probably follows them again.

The longest ends of prompt and answer that occurred earlier are found through an index that grows with
the answer, the most recent occurrence first; what followed each of them is merged into a tree (prompt
lookup decoding, Saxena 2023; several continuations in one tree as in REST, arXiv 2311.08252).
"""

from collections.abc import Sequence
from typing import Final

from workers.draft.drafter import Ask, Drafter
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.tree import TokenTree

MIN_MATCH: Final = 2
MAX_MATCH: Final = 16
MAX_OCCURRENCES: Final = 32
MAX_CONTINUATIONS: Final = 4

# How often the token after a repeated stretch repeats too, by the length of the stretch.
_REPEATS: Final = (0.0, 0.2, 0.45, 0.6, 0.7, 0.76, 0.8, 0.83, 0.86, 0.88, 0.9)
# What a continuation is worth when a better one is in the tree already.
_RUNNER_UP: Final = 0.4


def repeat_probability(match: int) -> float:
    """Estimated probability that the token after a match of this length is the same again."""
    return _REPEATS[min(match, len(_REPEATS) - 1)]


class LookupIndex:
    """A token sequence and the places where each pair of tokens ended in it."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; constant time each."""
        for token in tokens:
            # The last tokens are indexed only when something follows them: they are what is sought.
            end = len(self.tokens)
            if end >= MIN_MATCH:
                self._ends.setdefault(tuple(self.tokens[-MIN_MATCH:]), []).append(end)
            self.tokens.append(token)

    def matches(self) -> list[tuple[int, int]]:
        """(length, end) of earlier occurrences of the sequence's end; longest, then latest first."""
        tokens, length = self.tokens, len(self.tokens)
        ends = self._ends.get(tuple(tokens[-MIN_MATCH:]), []) if length >= MIN_MATCH else []
        found = []
        for end in ends[-MAX_OCCURRENCES:]:
            match = MIN_MATCH
            while match < min(MAX_MATCH, end) and tokens[end - 1 - match] == tokens[-1 - match]:
                match += 1
            found.append((match, end))
        found.sort(reverse=True)
        return found


class LookupDrafter(Drafter):
    """Drafts from the session's own tokens; needs no model."""

    def __init__(self) -> None:
        self._indexes: dict[int, LookupIndex] = {}

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        self._indexes[session] = LookupIndex(tokens)

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        self._indexes[session].extend(tokens)

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """See Drafter."""
        return [self._propose(self._indexes[ask.session], ask) for ask in asks]

    def close(self, session: int) -> None:
        """See Drafter."""
        self._indexes.pop(session, None)

    @staticmethod
    def _propose(index: LookupIndex, ask: Ask) -> TokenTree:
        tree = TokenTree()
        depth = min(ask.sent_nodes, ask.max_depth)
        matches = index.matches()[: 1 if ask.chain else MAX_CONTINUATIONS]
        for rank, (match, end) in enumerate(matches):
            tokens = index.tokens[end : end + depth]
            score = 1.0 if rank == 0 else _RUNNER_UP
            scores = []
            for i in range(len(tokens)):
                score *= repeat_probability(match + i)
                scores.append(score)
            tree = tree.merge(TokenTree.chain(tokens, scores))
        return tree.cut(ask.sent_nodes, ask.max_depth)
