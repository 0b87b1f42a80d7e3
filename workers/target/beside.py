"""Drafters in the target's own process: features and proposals go between them on the spot.

The coordinator gets a copy of each proposal, for its statistics and its choice of drafters.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from workers.draft.group import GroupSession
from workers.rpc import messages as m


class BesideSession:
    """The drafters of one answer beside its target; told of commits on the target's thread.

    `asked` are the names that propose from the next commit on, set from the event loop; `told` those that
    propose on the last one.
    """

    def __init__(
        self, drafting: GroupSession, drafters: Iterable[str], feature_window: int
    ) -> None:
        self.asked = self.told = frozenset(drafters)
        self._drafting = drafting
        self._window = feature_window
        self._begun = False
        self._held_from: int | None = None
        self._held: list[int] = []
        self._news: m.Commit | None = None

    def committed(
        self,
        base_len: int,
        tokens: Sequence[int],
        features_from: Callable[[int], Sequence[m.Features]],
    ) -> None:
        """Tokens became part of the answer; the drafters hear of it with `tell`.

        While nobody is asked they hear nothing, and later all that they have missed: the target keeps its
        features, which `features_from` a position on are.
        """
        self.told = self.asked
        if self._held_from is None:
            self._held_from = base_len
        self._held += tokens
        if not self.told:
            return
        features: Sequence[m.Features] = ()
        if self._window:
            missing = self._held_from - 1
            features = features_from(
                missing if self._begun else max(0, self._held_from - self._window)
            )
        self._begun = True
        self._news = m.Commit(self._held_from, tuple(self._held), tuple(features), self.told)
        self._held_from, self._held = None, []

    def tell(self, price: float, pace: float) -> None:
        """Tell the drafters what is new: after the coordinator was, or proposals overtake their commit."""
        news, self._news = self._news, None
        if news is not None:
            self._drafting.commit(replace(news, price=price, pace=pace))

    def close(self) -> None:
        """The answer is over."""
        self._drafting.close()
