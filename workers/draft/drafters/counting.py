"""What drafters from counts have in common: sessions, what they learn from answers, and how sure they are."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Generic, TypeVar

from workers.draft.calibration import OTHER_TEXTS, Doubt
from workers.draft.counting import MAX_MATCH, MAX_MATCHES, Found, Match, propose
from workers.draft.drafter import Ask, Drafter
from workers.draft.history import History
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.tree import TokenTree

LEAD: Final = 8
"""Tokens before an answer that are learned with it, so that its beginning is found."""


@dataclass(slots=True)
class CountedSession:
    """What is known of one answer: its committed tokens, the first `begun` of them from its start.

    `found` is what the last proposal was made of.
    """

    key_id: str
    tokens: list[int]
    begun: int
    found: list[Found] = field(default_factory=list)


SessionT = TypeVar("SessionT", bound=CountedSession)


class CountingDrafter(Drafter, Generic[SessionT]):
    """Drafts what most often followed; of served answers, if there is a history, those of the same key."""

    def __init__(self, history: History | None, doubt: Doubt) -> None:
        """`doubt` is that of matches in the drafter's own text."""
        self._history = history
        self._doubt = doubt
        self._history_doubt = Doubt(OTHER_TEXTS)
        self._keys: dict[int, str] = {}
        self._sessions: dict[int, SessionT] = {}

    @abstractmethod
    def make_session(self, key_id: str, tokens: Sequence[int]) -> SessionT:
        """The state of a new session."""

    @abstractmethod
    def read(self, session: SessionT, tokens: Sequence[int]) -> None:
        """Tokens were committed."""

    @abstractmethod
    def matches(self, session: SessionT) -> Iterator[Match]:
        """Where its last tokens occurred in the drafter's own text, the longest match first."""

    @abstractmethod
    def most_nodes(self, ask: Ask) -> int:
        """Nodes of a proposal at most."""

    @abstractmethod
    def span(self, length: int) -> int:
        """Depth of a proposal at most, by the length of the longest match."""

    def belongs_to(self, session: int, key_id: str) -> None:
        """See Drafter."""
        self._keys[session] = key_id

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        self._sessions[session] = self.make_session(self._keys.get(session, ""), tokens)

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        known = self._sessions[session]
        for found in known.found:
            found.judge(tokens)
        known.found = []
        known.tokens += tokens
        self.read(known, tokens)

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """See Drafter."""
        return [self._propose(self._sessions[ask.session], ask) for ask in asks]

    def close(self, session: int) -> None:
        """See Drafter."""
        self._keys.pop(session, None)
        known = self._sessions.pop(session, None)
        if known is not None and self._history is not None and len(known.tokens) > known.begun:
            self._history.learn(known.key_id, known.tokens[max(0, known.begun - LEAD) :])

    def _propose(self, session: SessionT, ask: Ask) -> TokenTree:
        texts = [(self.matches(session), self._doubt)]
        if self._history is not None:
            tail = session.tokens[-MAX_MATCH:]
            texts += [
                (text.find(tail), self._history_doubt) for text in self._history.of(session.key_id)
            ]
        session.found = [
            Found(some, doubt)
            for matches, doubt in texts
            if (some := list(islice(matches, MAX_MATCHES)))
        ]
        longest = max((found.matches[0].length for found in session.found), default=0)
        return propose(session.found, ask, self.most_nodes(ask), self.span(longest))
