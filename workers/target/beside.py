"""Drafters in the target's own process: they take turns with it, and features and proposals stay there.

The coordinator gets a copy of each proposal, for its statistics and its choice of drafters.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from workers.draft.group import DrafterGroup, GroupSession
from workers.request import DRAWN
from workers.rpc import messages as m

News = tuple[GroupSession, m.Commit]


class BesideSession:
    """The drafters of one answer beside its target; what they hear of `known` tokens of it.

    `asked` are the names that may propose, set from the event loop; `told` those that were to propose on the
    last commit. With `reads_choices` they want to know what the rows of each step say.
    """

    def __init__(
        self,
        drafting: GroupSession,
        drafters: Iterable[str],
        feature_window: int,
        reads_choices: bool,
        known: int,
    ) -> None:
        self.reads_choices = reads_choices
        self.asked = self.told = frozenset(drafters)
        self._drafting = drafting
        self._window = feature_window
        self._known = known
        self._begun = False

    @classmethod
    def open(
        cls, group: DrafterGroup, request: m.OpenTarget, send: Callable[[Any], None]
    ) -> "BesideSession":
        """Let the drafters that a request names, of those in the group, draft for it; `send` hears them."""
        opened = m.OpenDraft(
            lease_id="",
            tokens=request.tokens,
            sampling=request.sampling,
            drafters=request.drafters,
            max_nodes=request.max_nodes,
            prediction=request.prediction,
            chain=request.chain,
            max_len=request.prompt_len + request.stopping.max_tokens,
            mode=request.mode,
            drawn=request.verification in DRAWN,
            key_id=request.key_id,
        )
        return cls(
            group.open(opened, send),
            request.drafters,
            group.feature_window(request.drafters),
            group.reads_choices(request.drafters),
            len(request.tokens),
        )

    def news(
        self,
        tokens: Sequence[int],
        features_from: Callable[[int], Sequence[m.Features]],
        price: float,
        pace: float,
        affordable: bool,
        verified: m.Verified | None,
    ) -> News | None:
        """What the drafters are to hear before their turn, if there is anything, of all committed `tokens`.

        While nobody is asked, or it is not affordable, they hear nothing, and later all that they have
        missed: the target keeps its features, which `features_from` a position on are.
        """
        self.told = self.asked if affordable else frozenset()
        first = self._known
        if not self.told or len(tokens) == first:
            return None
        features: Sequence[m.Features] = ()
        if self._window:
            features = features_from(first - 1 if self._begun else max(0, first - self._window))
        self._begun = True
        self._known = len(tokens)
        new = tuple(tokens[first:])
        news = m.Commit(first, new, tuple(features), self.told, price, pace, verified)
        return self._drafting, news

    def close(self) -> None:
        """The answer is over."""
        self._drafting.close()
