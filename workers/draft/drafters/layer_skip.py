"""Self-speculation: the target without some of its layers drafts for it (Draft & Verify, arXiv 2309.08168).

The draft's cache is its own: a layer behind one that was left out sees other states than in the target, so
its keys and values are of no use there. Whole layers are left out, attention and MLP together.
"""

import logging
import random
from collections import deque
from collections.abc import Sequence
from typing import Final

from workers.draft import skips
from workers.draft.drafters.model import ModelDrafter, ModelSession
from workers.draft.growth import Grown
from workers.draft.models import DraftModel
from workers.engine.kv_cache import KVPool
from workers.engine.model import Model
from workers.engine.rows import RowBatch, SequenceRows
from workers.request import SamplingParams
from workers.sampling import rank_children

logger = logging.getLogger(__name__)

WINDOW: Final = 64
"""Last tokens of an answer on which sets are compared."""

_LEAST_SCORED: Final = 8
_MOST_SCORED: Final = 1024
_LEAST_DIFFERING: Final = 12


class LayerSkipSession(ModelSession):
    """`recent` are the answer's last tokens, `opened` how many it began with."""

    def __init__(self, pool: KVPool, sampling: SamplingParams, model: Model) -> None:
        super().__init__(pool, sampling, model)
        self.recent: deque[int] = deque(maxlen=WINDOW)
        self.opened = 0


class LayerSkipDrafter(ModelDrafter):
    """Drafts with the layers of `host` that are not in `skip`, and with `online` learns which to skip.

    A set that has shown to be better drafts the answers that begin then.
    """

    def __init__(
        self,
        host: Model,
        vocabulary_fingerprint: str,
        skip: Sequence[int],
        online: bool,
        num_slots: int,
        width: int,
        steps: int,
        floor: float,
    ) -> None:
        part = host.part(skips.kept(skip, host.num_layers))
        super().__init__(DraftModel(part, vocabulary_fingerprint), num_slots, width, steps, floor)
        self._search = SkipSearch(host, skip, part) if online else None

    def make_session(self, sampling: SamplingParams) -> LayerSkipSession:
        """See TreeDrafter."""
        return LayerSkipSession(self._pool, sampling, self.model)

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        super().open(session, tokens, sampling)
        self._mine(self._sessions[session]).opened = len(tokens)

    def take(self, session: ModelSession) -> Grown:
        """See TreeDrafter."""
        self._mine(session).recent.extend(session.pending)
        return super().take(session)

    def close(self, session: int) -> None:
        """See Drafter; an answer that is over says which set would have drafted it better."""
        try:
            if self._search is not None:
                self._search.judge(self._mine(self._sessions[session]), self._pool)
                self.model = self._search.part
        finally:
            super().close(session)

    @staticmethod
    def _mine(session: ModelSession) -> LayerSkipSession:
        assert isinstance(session, LayerSkipSession)
        return session


class SkipSearch:
    """Races another set of layers against the one in use, on the ends of answers (SWIFT, arXiv 2410.06916).

    Both read the same tokens in one pass each; a set is right where its first guess, with the answer's own
    noise, is the token that the target took. One layer is exchanged for another at a time; the first and the
    last layer stay. All sets are of one size, so that one pool of caches serves them.
    """

    def __init__(self, host: Model, skip: Sequence[int], part: Model) -> None:
        self.skip = tuple(sorted(skip))
        self.part = part
        self._host = host
        self._random = random.Random(0)
        self._inner = range(1, host.num_layers - 1)
        self._challenge()

    def judge(self, session: LayerSkipSession, pool: KVPool) -> None:
        """Compare the two sets on the end of an answer, and decide if enough was seen."""
        tokens = list(session.recent)
        scored = min(session.length - session.opened, len(tokens) - 1)
        if self._rival is None or scored < _LEAST_SCORED:
            return
        right = self._right(self.part, tokens, scored, session, pool)
        rivals = self._right(self._rival, tokens, scored, session, pool)
        if not (right and rivals):
            return
        self._lead += sum(rivals) - sum(right)
        self._differ += sum(a != b for a, b in zip(right, rivals, strict=True))
        self._scored += scored
        # The sign test on the tokens where they differ: two standard deviations decide.
        decided = self._differ >= _LEAST_DIFFERING and self._lead**2 > 4 * self._differ
        if decided and self._lead > 0:
            self.skip, self.part = self._rival_skip, self._rival
            logger.info("answers that begin now are drafted without layers %s", self.skip)
        if decided or self._scored >= _MOST_SCORED:
            self._challenge()

    def _challenge(self) -> None:
        """Begin a race with a set that differs by one exchange; with none if there is nothing to exchange."""
        self._lead = self._differ = self._scored = 0
        self._rival: Model | None = None
        leave = [layer for layer in self._inner if layer not in self.skip]
        enter = [layer for layer in self._inner if layer in self.skip]
        if leave and enter:
            exchanged = {self._random.choice(leave), self._random.choice(enter)}
            self._rival_skip = tuple(sorted(set(self.skip) ^ exchanged))
            layers = skips.kept(self._rival_skip, self._host.num_layers)
            self._rival = self._host.part(layers)

    @staticmethod
    def _right(
        part: Model, tokens: list[int], scored: int, session: LayerSkipSession, pool: KVPool
    ) -> list[bool]:
        """Whether a part's first guess of each of the last `scored` tokens is right; empty without room."""
        kv = pool.sequence()
        try:
            if not kv.reserve(len(tokens)):
                return []
            rows = range(len(tokens) - 1 - scored, len(tokens) - 1)
            logits = part.forward(RowBatch([SequenceRows(kv, tokens, rows)]))
            first = session.length - scored
            return [
                rank_children(row, None, session.sampling, first + i, 1.0, 1)[0] == [token]
                for i, (row, token) in enumerate(zip(logits, tokens[-scored:], strict=True))
            ]
        finally:
            kv.free()
