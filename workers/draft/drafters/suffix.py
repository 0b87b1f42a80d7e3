"""Suffix decoding: what most often followed the last tokens, in this answer and in earlier ones of its key.

Prompt and answer are kept as a suffix automaton that grows with the answer; of what followed before, the
likeliest is proposed, and the more the longer the match is (SuffixDecoding, arXiv 2411.04975).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from workers.draft.automaton import SuffixAutomaton
from workers.draft.calibration import SAME_TEXT, Doubt
from workers.draft.counting import Match
from workers.draft.drafter import Ask
from workers.draft.drafters.counting import CountedSession, CountingDrafter
from workers.draft.history import History

_SPAN: Final = 4
"""Depth of a proposal for each token of the longest match."""


@dataclass(slots=True)
class SuffixSession(CountedSession):
    """An answer, and all sequences that occur in it."""

    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)


class SuffixDrafter(CountingDrafter[SuffixSession]):
    """Drafts from the session's own tokens, and the key's earlier answers; needs no model."""

    def __init__(self, history: History | None) -> None:
        super().__init__(history, Doubt(SAME_TEXT))

    def make_session(self, key_id: str, tokens: Sequence[int]) -> SuffixSession:
        """See CountingDrafter."""
        return SuffixSession(key_id, list(tokens), len(tokens), text=SuffixAutomaton(tokens))

    def read(self, session: SuffixSession, tokens: Sequence[int]) -> None:
        """See CountingDrafter."""
        session.text.extend(tokens)

    def matches(self, session: SuffixSession) -> Iterator[Match]:
        """See CountingDrafter."""
        return session.text.matches()

    def most_nodes(self, ask: Ask) -> int:
        """See CountingDrafter."""
        return ask.sent_nodes

    def span(self, length: int) -> int:
        """See CountingDrafter."""
        return _SPAN * length
