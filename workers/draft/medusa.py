"""Medusa heads: one state of the target, and guesses of several positions from it (arXiv 2401.10774).

The state behind the target's last norm at a position has the law of the next token. Head k, counted from 1,
guesses the token k positions behind that one. A head is some residual blocks and a projection to the
vocabulary: the target's own, frozen and shared by all heads, or one a head, as published checkpoints have it.
Legend: K heads, H hidden, V draft vocabulary.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from workers.checkpoint import (
    MEDUSA_CONFIG,
    MODEL_CONFIG,
    CheckpointError,
    check_drafter,
    describe,
    read_json,
)
from workers.draft.target_weights import embedding_and_head

WEIGHTS_FILE: Final = "medusa.safetensors"
FORMAT: Final = 1

_PUBLISHED: Final = re.compile(r"(\d+)\.(\d+)\.(.+)")


class ResidualBlock(nn.Module):
    """A linear layer beside the state itself; new, it changes nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.silu(self.linear(states))


class MedusaHeads(nn.Module):
    """K heads of some blocks each; `projections` [V, H] are one for all of them, or one a head."""

    vocabulary: torch.Tensor

    def __init__(
        self, heads: int, blocks: int, vocabulary: torch.Tensor, projections: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self.width = projections[0].shape[1]
        self.blocks = blocks
        self.register_buffer("vocabulary", vocabulary.to(torch.int32))
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(self.width) for _ in range(blocks))) for _ in range(heads)
        )
        self.projections = nn.ModuleList(_frozen(weight) for weight in projections)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """States [..., H] to logits [K, ..., V]."""
        made = torch.stack([head(states) for head in self.heads])
        if len(self.projections) == 1:
            return cast(torch.Tensor, self.projections[0](made))
        logits = [one(state) for one, state in zip(self.projections, made, strict=True)]
        return torch.stack(logits)


def new_heads(heads: int, blocks: int, target: Path, vocabulary: torch.Tensor) -> MedusaHeads:
    """Untrained heads in float32, each of which guesses as the target does; the projection is frozen."""
    _, head = embedding_and_head(target)
    made = MedusaHeads(heads, blocks, vocabulary, [head[vocabulary.long()]])
    made.projections.to(torch.bfloat16)
    return made


def save_heads(folder: Path, heads: MedusaHeads, target: str) -> None:
    """Write a checkpoint of heads that `new_heads` made: bfloat16, without what the target has."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "target": target,
        "heads": len(heads.heads),
        "blocks": heads.blocks,
    }
    (folder / MEDUSA_CONFIG).write_text(json.dumps(content, indent=1) + "\n")
    kept = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in heads.state_dict().items()
        if not name.startswith("projections.")
    }
    save_file({name: t.contiguous().cpu() for name, t in kept.items()}, folder / WEIGHTS_FILE)


def load_heads(folder: Path, target: Path) -> MedusaHeads:
    """Heads in float32, from our own checkpoint or a published one; raises CheckpointError.

    `target` is the folder of the model that they belong to: where they have no projections of their own, its
    language-model head is theirs.
    """
    check_drafter(folder, "medusa")
    published = not (folder / MEDUSA_CONFIG).is_file()
    heads, blocks, weights = _read_published(folder) if published else _read_ours(folder)
    _, target_head = embedding_and_head(target)
    if published:
        projections = [weights.pop(f"projections.{head}.weight") for head in range(heads)]
        vocabulary = torch.arange(len(projections[0]))
    else:
        vocabulary = weights.pop("vocabulary")
    size, width = target_head.shape
    reads = weights["heads.0.0.linear.weight"].shape[1]
    fits = len(vocabulary) == size if published else int(vocabulary.max()) < size
    if reads != width or not fits:
        raise CheckpointError(
            f"{folder}: these heads read {reads} values and guess tokens up to {int(vocabulary.max())}; "
            f"{target.name} has states of {width} values and {size} tokens: they belong to another model"
        )
    if not published:
        projections = [target_head[vocabulary.long()]]
    made = MedusaHeads(heads, blocks, vocabulary, projections)
    missing, unexpected = made.load_state_dict(weights, strict=False)
    lacking = [name for name in missing if name.startswith("heads.")]
    if lacking or unexpected:
        raise CheckpointError(
            f"{folder}: Medusa heads lack {lacking}, and have {unexpected} that nothing reads"
        )
    return made.float().eval().requires_grad_(False)


Read = tuple[int, int, dict[str, torch.Tensor]]
"""Heads, blocks of each, and their tensors under our names."""


def _read_ours(folder: Path) -> Read:
    content = describe(folder / MEDUSA_CONFIG, FORMAT, "heads", "blocks")
    return content["heads"], content["blocks"], load_file(folder / WEIGHTS_FILE)


def _read_published(folder: Path) -> Read:
    """Heads under `{head}.{block}.linear.…` and `{head}.{blocks}.weight`, alone or within a model."""
    content = read_json(folder / MODEL_CONFIG)
    heads, blocks = content["medusa_num_heads"], content["medusa_num_layers"]
    published: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        published |= load_file(file)
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in published.items():
        matched = _PUBLISHED.fullmatch(name.removeprefix("medusa_head."))
        if matched is None or int(matched[1]) >= heads:
            continue
        head, part, rest = int(matched[1]), int(matched[2]), matched[3]
        ours = f"heads.{head}.{part}.{rest}" if part < blocks else f"projections.{head}.{rest}"
        weights[ours] = tensor.float()
    for head in range(heads):
        if not weights.keys() >= {f"heads.{head}.0.linear.weight", f"projections.{head}.weight"}:
            raise CheckpointError(
                f"{folder}: of its {heads} Medusa heads, {head} lacks the tensors of published checkpoints, "
                f"{head}.0.linear.weight and {head}.{blocks}.weight"
            )
    return heads, blocks, weights


def _frozen(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
