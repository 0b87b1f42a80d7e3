"""Predicted outputs: the request says what it expects, and that is drafted.

Most of an edited text is the text before; where an answer leaves its prediction, the place is found again
(workers/prediction.py). Drafting takes no time, so only the target's price limits how far it goes.
"""

from collections.abc import Sequence

from workers import limits
from workers.draft.drafter import Ask, Drafter
from workers.prediction import Alignment
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.tree import TokenTree


class PredictionDrafter(Drafter):
    """Drafts from the predictions of requests; needs no model."""

    def __init__(self) -> None:
        self._alignments: dict[int, Alignment] = {}

    def predicted(self, session: int, prediction: Sequence[int]) -> None:
        """See Drafter."""
        self._alignments[session] = Alignment(prediction)

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        return

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        self._alignments[session].observe(tokens)

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """See Drafter."""
        return [self._propose(self._alignments[ask.session], ask) for ask in asks]

    def close(self, session: int) -> None:
        """See Drafter."""
        self._alignments.pop(session, None)

    @staticmethod
    def _propose(alignment: Alignment, ask: Ask) -> TokenTree:
        most = min(limits.MAX_PREDICTED_NODES, ask.max_depth)
        return TokenTree.chain(*alignment.upcoming(most))
