"""What drafters have in common that guess several positions in one pass: trees from calibrated accuracies.

There is nothing to look behind: a tree is whole when its guesses are made, and is made anew from every
commit.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Generic, TypeVar

import torch

from workers import sampling
from workers.draft.drafter import Ask, Drafter
from workers.draft.levels import GUESSES, Accuracies, best_tree
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.tree import Law, TokenTree

_NOBODY: Final = -1
_WARM_UP: Final = 8


class LevelSession:
    """What is known of one answer.

    `length` tokens are committed, `levels` are the guesses that were made behind the last of them. Where
    tokens are `drawn`, `draws` counts how often.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self.length = 0
        self.levels: list[list[int]] = []
        self.drawn = False
        self.draws = 0

    def take(self, tokens: Sequence[int]) -> None:
        """These tokens are committed."""
        self.length += len(tokens)
        self.levels = []


SessionT = TypeVar("SessionT", bound=LevelSession)


class LevelDrafter(Drafter, Generic[SessionT]):
    """Guesses all levels of a tree at once; sessions share a pass.

    `ids` int32 are the target's ids of what is guessed, `accuracies` those of its guesses at `depths` depths.
    """

    def __init__(self, ids: torch.Tensor, depths: int, accuracies: Accuracies) -> None:
        self._ids = ids
        self._accuracies = accuracies
        self._drawn_accuracies = Accuracies.usual(depths)
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
            self._rates(known).observe(known.levels, tokens)
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
        """The best tree of the guesses, which are ranked by the target's rule and noise, or drawn."""
        session.levels = []
        session.drawn = ask.drawn and not session.sampling.greedy
        laws: list[Law] = []
        for depth, row in enumerate(logits[: ask.max_depth]):
            if session.drawn:
                session.draws += 1
                tokens, law = sampling.draw_children(
                    row, self._ids, session.sampling, self.number, session.draws, GUESSES
                )
                laws.append(law)
            else:
                places, _ = sampling.rank_children(
                    row, self._ids, session.sampling, session.length + depth, 1.0, GUESSES
                )
                tokens = self._ids[places].tolist()
            session.levels.append(tokens)
        shown = 1 if ask.chain else GUESSES
        rates = self._rates(session)
        levels = [
            list(zip(tokens[:shown], rates.at(depth), strict=False))
            for depth, tokens in enumerate(session.levels)
        ]
        tree = best_tree(levels, ask.sent_nodes)
        return replace(tree, laws=tuple(laws[depth - 1] for depth in tree.depths() if laws))

    def _rates(self, session: SessionT) -> Accuracies:
        return self._drawn_accuracies if session.drawn else self._accuracies
