"""SpecDec: mask tokens behind what is committed, all of whose guesses come from one pass (arXiv 2203.16487).

Committed tokens are read as any causal model reads them, and stay in the cache; masks do not.
"""

from collections.abc import Sequence
from typing import Final

import torch

from workers.draft.drafters.level_drafter import LevelDrafter, LevelSession
from workers.draft.levels import Accuracies
from workers.draft.masks import MaskedDraft
from workers.engine.kv_cache import KVPool
from workers.engine.rows import RowBatch, SequenceRows
from workers.request import SamplingParams

MAX_ROWS: Final = 256
"""Committed tokens of one session that a pass reads at most."""


class MaskSession(LevelSession):
    """`unread` tokens are committed but not in the cache yet; `logits` follow them once they are."""

    def __init__(self, pool: KVPool, sampling: SamplingParams) -> None:
        super().__init__(sampling)
        self.kv = pool.sequence()
        self.unread: list[int] = []
        self.logits: torch.Tensor | None = None

    def take(self, tokens: Sequence[int]) -> None:
        """See LevelSession."""
        super().take(tokens)
        self.unread += tokens
        self.logits = None


class MaskDrafter(LevelDrafter[MaskSession]):
    """Drafts with some layers of the target and masks."""

    def __init__(self, masked: MaskedDraft, num_slots: int, accuracies: Accuracies) -> None:
        super().__init__(masked.draft.ids, 1 + len(masked.masks), accuracies)
        self.vocabulary_fingerprint = masked.draft.vocabulary_fingerprint
        self._model = masked.draft.model
        self._masks = masked.masks
        self._pool = self._model.pool(num_slots)

    def make_session(self, sampling: SamplingParams) -> MaskSession:
        """See LevelDrafter."""
        return MaskSession(self._pool, sampling)

    def close(self, session: int) -> None:
        """See Drafter."""
        self._sessions[session].kv.free()
        super().close(session)

    def guess(self, sessions: Sequence[MaskSession]) -> list[torch.Tensor | None]:
        """See LevelDrafter."""
        while work := [(s, rows) for s in sessions if (rows := self._next_rows(s)) is not None]:
            logits = self._model.forward(RowBatch([rows for _, rows in work])).cpu()
            index = 0
            for session, rows in work:
                session.kv.keep(range(len(rows.tokens) - rows.mutual))
                if rows.wanted:
                    session.logits = logits[index : index + len(rows.wanted)]
                    index += len(rows.wanted)
        return [session.logits for session in sessions]

    def _next_rows(self, session: MaskSession) -> SequenceRows | None:
        """The next rows of a session, masks behind the last of them; None if there are none."""
        if session.logits is not None:
            return None
        tokens, rest = session.unread[:MAX_ROWS], session.unread[MAX_ROWS:]
        masks = () if rest else self._masks
        count = len(tokens) + len(masks)
        slots = session.kv.length + count
        if slots > self._model.info.max_model_len or not session.kv.reserve(slots):
            session.logits = torch.empty(0, len(self._ids))
            return None
        session.unread = rest
        wanted = () if rest else range(len(tokens) - 1, count)
        return SequenceRows(session.kv, [*tokens, *masks], wanted, mutual=len(masks))
