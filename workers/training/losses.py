"""Divergences between the target's law p and the draft's q, as DistillSpec has them (arXiv 2310.08461).

Legend: T rows, V draft vocabulary. Both are laws over the draft vocabulary.
"""

from collections.abc import Callable
from typing import Final

import torch

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def forward_kl(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """KL(p || q) per row, from log-probabilities [T, V] to [T]."""
    return (target.exp() * (target - draft)).sum(-1)


def reverse_kl(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """KL(q || p) per row."""
    return (draft.exp() * (draft - target)).sum(-1)


def jensen_shannon(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Jensen–Shannon divergence per row, both sides weighted alike."""
    mixed = torch.logaddexp(target, draft) - torch.log(torch.tensor(2.0))
    return (forward_kl(target, mixed) + forward_kl(draft, mixed)) / 2


def total_variation(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Total variation distance per row: 1 - Σ min(p, q), what rejection sampling rejects."""
    return (target.exp() - draft.exp()).abs().sum(-1) / 2


DIVERGENCES: Final[dict[str, Divergence]] = {
    "fkl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "tvd": total_variation,
}
