"""What drafters have in common that guess several positions in one pass: trees from calibrated accuracies.

There is nothing to look behind: a tree is whole when its guesses are made, and is made anew from every
commit.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import torch

from workers import sampling
from workers.draft.drafter import Ask, Drafter
from workers.draft.levels import GUESSES, Accuracies, best_tree
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.tree import TokenTree

_NOBODY: Final = -1
_WARM_UP: Final = 8


class LevelSession:
    """What is known of one answer.

    `length` tokens are committed, `levels` are the guesses that were made behind the last of them.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self.length = 0
        self.levels: list[list[int]] = []

    def take(self, tokens: Sequence[int]) -> None:
        """These tokens are committed."""
        self.length += len(tokens)
        self.levels = []


SessionT = TypeVar("SessionT", bound=LevelSession)


class LevelDrafter(Drafter, Generic[SessionT]):
    """Guesses all levels of a tree at once; sessions share a pass.

    `ids` int32 are the target's ids of what is guessed.
    """

    def __init__(self, ids: torch.Tensor, accuracies: Accuracies) -> None:
        self._ids = ids
        self._accuracies = accuracies
        self._sessions: dict[int, SessionT] = {}

    @abstractmethod
    def make_session(self, sampling: SamplingParams) -> SessionT:
        """The state of a new session."""

    @abstractmethod
    def guess(self, sessions: Sequence[SessionT]) -> list[torch.Tensor | None]:
        """Logits behind what each session has committed, float32 [K, V]; None where they are not ready yet.

        No rows, [0, V], for a session that drafts no more.
        """

    def blank_features(self, count: int) -> list[Features]:
        """Features of the first positions, for warming up."""
        return []

    def warm_up(self) -> None:
        """See Drafter."""
        self.open(_NOBODY, [0] * _WARM_UP, SamplingParams())
        self.observe(_NOBODY, [], self.blank_features(_WARM_UP - 1))
        self.propose([Ask(_NOBODY, _WARM_UP, _WARM_UP, chain=False)])
        self.close(_NOBODY)

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        self._sessions[session] = self.make_session(sampling)
        self._sessions[session].take(tokens)

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        known = self._sessions[session]
        if tokens:
            self._accuracies.observe(known.levels, tokens)
            known.take(tokens)

    def close(self, session: int) -> None:
        """See Drafter."""
        del self._sessions[session]

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """See Drafter."""
        sessions = [self._sessions[ask.session] for ask in asks]
        guessed = self.guess(sessions)
        return [
            None if logits is None else self._tree(session, ask, logits)
            for session, ask, logits in zip(sessions, asks, guessed, strict=True)
        ]

    def _tree(self, session: SessionT, ask: Ask, logits: torch.Tensor) -> TokenTree:
        """The best tree of the guesses, which are ranked by the target's rule and noise."""
        session.levels = []
        for depth, row in enumerate(logits[: ask.max_depth]):
            places, _ = sampling.rank_children(
                row, self._ids, session.sampling, session.length + depth, 1.0, GUESSES
            )
            session.levels.append(self._ids[places].tolist())
        shown = 1 if ask.chain else GUESSES
        levels = [
            list(zip(tokens[:shown], self._accuracies.at(depth), strict=False))
            for depth, tokens in enumerate(session.levels)
        ]
        return best_tree(levels, ask.sent_nodes)
