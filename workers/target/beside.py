"""Drafters in the target's own process: features and proposals go between them on the spot.

The coordinator gets a copy of each proposal, for its statistics and its choice of drafters.
"""

from collections.abc import Iterable, Sequence
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
        self._news: m.Commit | None = None

    def reads_from(self, base_len: int) -> int | None:
        """The first position whose features a commit at `base_len` must bring; None if none are read."""
        if not self._window:
            return None
        return base_len - 1 if self._begun else max(0, base_len - self._window)

    def committed(
        self, base_len: int, tokens: Sequence[int], features: Sequence[m.Features]
    ) -> None:
        """Tokens became part of the answer; the drafters hear of it with `tell`."""
        self._begun = True
        self.told = self.asked
        self._news = m.Commit(base_len, tuple(tokens), tuple(features), self.told)

    def tell(self, price: float, pace: float) -> None:
        """Tell the drafters what is new: after the coordinator was, or proposals overtake their commit."""
        news, self._news = self._news, None
        if news is not None:
            self._drafting.commit(replace(news, price=price, pace=pace))

    def close(self) -> None:
        """The answer is over."""
        self._drafting.close()
