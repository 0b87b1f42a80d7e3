"""Retrieval: what followed the last tokens in a corpus, and in earlier answers of the same key.

The longest end of up to 16 tokens that occurs in the datastore is found, what follows it makes a tree, and of
that the likeliest 64 nodes are proposed (REST, arXiv 2311.08252).
"""

from collections.abc import Iterator, Sequence
from typing import Final

from workers.datastore.index import Datastore
from workers.draft.calibration import OTHER_TEXTS, Doubt
from workers.draft.counting import Match
from workers.draft.drafter import Ask
from workers.draft.drafters.counting import CountedSession, CountingDrafter
from workers.draft.history import History

_SPAN: Final = 10
_NODES: Final = 64


class DatastoreDrafter(CountingDrafter[CountedSession]):
    """Drafts from a datastore, and the key's earlier answers; needs no model."""

    def __init__(
        self, store: Datastore, vocabulary_fingerprint: str, history: History | None
    ) -> None:
        super().__init__(history, Doubt(OTHER_TEXTS))
        self.vocabulary_fingerprint = vocabulary_fingerprint
        self._store = store

    def make_session(self, key_id: str, tokens: Sequence[int]) -> CountedSession:
        """See CountingDrafter."""
        return CountedSession(key_id, list(tokens), len(tokens))

    def read(self, session: CountedSession, tokens: Sequence[int]) -> None:
        """See CountingDrafter; the tokens are all that is known of an answer."""
        return

    def matches(self, session: CountedSession) -> Iterator[Match]:
        """See CountingDrafter."""
        return self._store.find(session.tokens)

    def most_nodes(self, ask: Ask) -> int:
        """See CountingDrafter."""
        return min(_NODES, ask.sent_nodes)

    def span(self, length: int) -> int:
        """See CountingDrafter."""
        return _SPAN
