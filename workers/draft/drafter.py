"""What a drafter is: whatever can propose the tokens that come next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.checkpoint import FeatureKind
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Ask:
    """One proposal that is asked for: at most `max_nodes` nodes, none deeper than `max_depth`."""

    session: int
    max_nodes: int
    max_depth: int
    chain: bool


class Drafter(Protocol):
    """Proposes token trees for many sessions. All calls come from one thread.

    Nothing that it returns can make an answer wrong: the target verifies every token.
    `vocabulary_fingerprint` is of the vocabulary that it works on, empty if any will do;
    `feature_window` is how many positions back it reads features, 0 if it reads none, and
    `feature_kind` which.
    """

    vocabulary_fingerprint: str
    feature_window: int
    feature_kind: FeatureKind | None

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """A session begins with these committed tokens."""

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """These tokens were committed; features are of positions before them, where the drafter reads any."""

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        """One tree for each ask, in order; an empty one proposes nothing."""

    def close(self, session: int) -> None:
        """The session is over."""
