"""Medusa: heads that guess several positions from one state of the target (arXiv 2401.10774).

The state of the position before the last committed token is all that is read: it knows what the target took
that token from, not the token itself.
"""

from collections.abc import Sequence

import torch

from workers.draft.drafters.level_drafter import LevelDrafter, LevelSession
from workers.draft.features import as_tensor, blank
from workers.draft.levels import Accuracies
from workers.draft.medusa import MedusaHeads
from workers.engine import linear
from workers.request import SamplingParams
from workers.rpc.messages import Features


class MedusaSession(LevelSession):
    """`features` are the newest that came."""

    features: Features | None = None

    def state(self) -> torch.Tensor | None:
        """The target's state before the last committed token, [H], if it is known."""
        if self.features is None:
            return None
        row = self.length - 2 - self.features.first_position
        return as_tensor(self.features)[row] if 0 <= row < self.features.rows else None


class MedusaDrafter(LevelDrafter[MedusaSession]):
    """Drafts with heads on the target's last state."""

    feature_window = 2
    feature_kind = "last"

    def __init__(
        self,
        heads: MedusaHeads,
        dtype: torch.dtype,
        device: str,
        vocabulary_fingerprint: str,
        accuracies: Accuracies,
    ) -> None:
        super().__init__(heads.vocabulary.cpu(), len(heads.heads), accuracies)
        self.vocabulary_fingerprint = vocabulary_fingerprint
        self.feature_width = heads.width
        self._heads = heads.to(device).to(dtype)
        self._dtype = dtype
        self._device = torch.device(device)
        if linear.can_pack(dtype, self._device):
            linear.pack_linears(self._heads)

    def make_session(self, sampling: SamplingParams) -> MedusaSession:
        """See LevelDrafter."""
        return MedusaSession(sampling)

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        super().observe(session, tokens, features)
        if features:
            self._sessions[session].features = features[-1]

    def blank_features(self, count: int) -> list[Features]:
        """See LevelDrafter."""
        return [blank(count, self.feature_width, self._dtype)]

    @torch.inference_mode()
    def guess(self, sessions: Sequence[MedusaSession]) -> list[torch.Tensor | None]:
        """See LevelDrafter."""
        states = [session.state() for session in sessions]
        known = [state for state in states if state is not None]
        if not known:
            return [None] * len(sessions)
        rows = torch.stack(known).to(self._device, self._dtype)
        logits = iter(self._heads(rows).transpose(0, 1).float().contiguous().cpu())
        return [None if state is None else next(logits) for state in states]
