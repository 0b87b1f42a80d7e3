"""What a drafter is: whatever can propose the tokens that come next."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from workers import limits
from workers.checkpoint import FeatureKind
from workers.request import Mode, SamplingParams
from workers.rpc.messages import Features, Verified
from workers.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted for a session.

    A step of the target verifies at most `max_nodes` nodes, likelier than `price` each; none is deeper than
    `max_depth`. What is `drawn` comes from the drafter's own law, and the tree says which. While the target
    waits, a second costs `pace` tokens. Trees may hold more nodes, for later steps.
    """

    session: int
    max_nodes: int
    max_depth: int
    chain: bool
    mode: Mode = "sequential"
    price: float = 0.0
    pace: float = 0.0
    drawn: bool = False

    @property
    def sent_nodes(self) -> int:
        """Nodes of a proposal at most."""
        return min(limits.MAX_TREE_NODES, limits.LOOKAHEAD * self.max_nodes)


@dataclass(frozen=True, slots=True)
class Learning:
    """What a drafter that learns while it serves has done since its start: fields of WorkerStatus."""

    online_updates: int = 0
    online_reverts: int = 0
    online_compared: int = 0
    online_right: int = 0
    online_right_before: int = 0


class Drafter(ABC):
    """Proposes token trees for many sessions. After `warm_up` all calls come from one thread.

    Nothing that it returns can make an answer wrong: the target verifies every token.
    `vocabulary_fingerprint` is of the vocabulary that it works on, empty if any will do;
    `feature_window` is how many positions back it reads features, 0 if it reads none, `feature_kind` which,
    and `feature_width` how many values of a position. One that `reads_choices` works beside the target only.
    Its `number` is no other's who drafts for the same target: what two draw has nothing in common.
    """

    number: int = 0
    vocabulary_fingerprint: str = ""
    feature_window: int = 0
    feature_width: int = 0
    feature_kind: FeatureKind | None = None
    reads_choices: bool = False

    @property
    def learning(self) -> Learning:
        """What it has learned while it served."""
        return Learning()

    def warm_up(self) -> None:
        """Do once what takes long the first time, before there is any session."""
        return

    def belongs_to(self, session: int, key_id: str) -> None:
        """Whose a session is, said before it opens: only drafters that learn from answers need to know."""
        return

    def predicted(self, session: int, prediction: Sequence[int]) -> None:
        """What the caller expects a session's answer to be, said before it opens."""
        return

    @abstractmethod
    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """A session begins with these committed tokens."""

    @abstractmethod
    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """These tokens were committed; features are of positions before them, where the drafter reads any."""

    def verified(self, session: int, step: Verified) -> None:
        """What the rows of a step say, for one that `reads_choices`; before `observe` of its tokens."""
        return

    @abstractmethod
    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """One tree for each ask, in order; an empty one proposes nothing, None is not ready yet."""

    @abstractmethod
    def close(self, session: int) -> None:
        """The session is over."""

    def end(self) -> None:
        """The drafter is over; no other call follows."""
        return

    def recall(self, ask: Ask) -> TokenTree | None:
        """What is known for a session without drafting anew: a hit, or None."""
        return None

    def grow(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """One more pass while the target verifies; trees that are worth sending again, else None.

        Empty if there is nothing more to do for any of these sessions.
        """
        return []
