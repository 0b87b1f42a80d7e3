"""An independent draft language model: it runs ahead of the target in a tree (Leviathan et al., arXiv
2211.17192; the tree grows as in EAGLE-2, arXiv 2406.16858, and DySpec, arXiv 2410.11744).
"""

from collections.abc import Sequence

import torch

from workers.draft.drafters.tree_drafter import TreeDrafter, TreeSession
from workers.draft.growth import Grown
from workers.draft.models import DraftModel
from workers.engine.kv_cache import KVPool
from workers.engine.model import Model
from workers.engine.rows import RowBatch, SequenceRows
from workers.request import SamplingParams


class ModelSession(TreeSession):
    """`model` drafts this answer to its end; `unread` tokens, as it reads them, are not in its cache yet."""

    def __init__(self, pool: KVPool, sampling: SamplingParams, model: Model) -> None:
        super().__init__(pool, sampling)
        self.model = model
        self.unread: list[int] = []


class ModelDrafter(TreeDrafter[ModelSession]):
    """Drafts with a model of its own; rows of the tree that were right stay in its cache.

    Where another model, of the same kind, takes the place of `model`, it drafts the answers that begin then.
    """

    def __init__(
        self, draft: DraftModel, num_slots: int, width: int, steps: int, floor: float
    ) -> None:
        pool = draft.model.pool(num_slots)
        super().__init__(pool, draft.model.info.max_model_len, draft.ids, width, steps, floor)
        self.vocabulary_fingerprint = draft.vocabulary_fingerprint
        self.model = draft.model
        self._draft = draft

    def make_session(self, sampling: SamplingParams) -> ModelSession:
        """See TreeDrafter."""
        return ModelSession(self._pool, sampling, self.model)

    def take(self, session: ModelSession) -> Grown:
        """See TreeDrafter."""
        session.tree, rows, known = session.tree.reroot(session.pending)
        session.kv.keep(rows)
        session.unread += self.encode(session.pending[known:])
        return session.tree

    def unread(self, session: ModelSession, most: int) -> SequenceRows | None:
        """See TreeDrafter."""
        if not session.unread:
            return None
        tokens, session.unread = session.unread[:most], session.unread[most:]
        return SequenceRows(session.kv, tokens, [] if session.unread else [len(tokens) - 1])

    def run(self, work: Sequence[tuple[ModelSession, SequenceRows]]) -> torch.Tensor:
        """See TreeDrafter."""
        models = {id(session.model): session.model for session, _ in work}
        if len(models) == 1:
            (model,) = models.values()
            return self._draft.guesses(model.forward(RowBatch([rows for _, rows in work])))
        logits: list[torch.Tensor] = [torch.empty(0)] * len(work)
        for model in models.values():
            own = [i for i, (session, _) in enumerate(work) if session.model is model]
            made = self._draft.guesses(model.forward(RowBatch([work[i][1] for i in own])))
            for i, rows in zip(own, made.split([len(work[i][1].wanted) for i in own]), strict=True):
                logits[i] = rows
        return torch.cat(logits)

    def encode(self, tokens: Sequence[int]) -> list[int]:
        """See TreeDrafter."""
        return self._draft.encode(tokens)
