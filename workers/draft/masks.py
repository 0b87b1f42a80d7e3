"""Mask drafters: a draft that is cut from its target, and tokens of its own for what is still to come.

The row of the last committed token guesses the next one, as in any causal model. Behind it stand mask tokens,
which see everything before them and each other; each guesses one position further. So one pass guesses all of
them, in the manner of SpecDec (arXiv 2203.16487). What a mask leaves in the cache is never kept.

A checkpoint is a cut draft (see workers.draft.cut) with `masks.safetensors` beside it: `masks` [M, H].
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from workers.checkpoint import MASKS_FILE, CheckpointError, check_drafter
from workers.draft.cut import CutModel, load_cut_module, wrap_cut

MASKS: Final = "masks"


@dataclass(frozen=True, slots=True)
class MaskedDraft:
    """A loaded mask drafter; `masks` are token ids, which only its own embedding knows."""

    draft: CutModel
    masks: tuple[int, ...]


def load_masked(folder: Path, dtype: str, device: str) -> MaskedDraft:
    """Load a mask drafter; raises CheckpointError, UnsupportedModel or SelfCheckError."""
    check_drafter(folder, "mask")
    module, vocabulary = load_cut_module(folder, dtype, device)
    masks = load_file(folder / MASKS_FILE, device=device)[MASKS]
    first = _add_tokens(module, masks, folder)
    ids = tuple(range(first, first + len(masks)))
    return MaskedDraft(wrap_cut(folder, module, vocabulary), ids)


def save_masks(folder: Path, masks: torch.Tensor) -> None:
    """Put masks [M, H] beside a cut draft, in bfloat16."""
    save_file({MASKS: masks.detach().to(torch.bfloat16).cpu().contiguous()}, folder / MASKS_FILE)


def _add_tokens(module: Any, embedded: torch.Tensor, folder: Path) -> int:
    """Let a model read tokens with these embeddings [M, H], behind its vocabulary; the first's id."""
    embedding = module.get_input_embeddings()
    known = embedding.weight
    if embedded.shape[1] != known.shape[1]:
        raise CheckpointError(
            f"{folder}: masks of {embedded.shape[1]} values for a model of {known.shape[1]}"
        )
    grown = torch.cat([known.detach(), embedded.to(known.dtype)])
    embedding.weight = nn.Parameter(grown, requires_grad=False)
    embedding.num_embeddings = len(grown)
    return len(known)
