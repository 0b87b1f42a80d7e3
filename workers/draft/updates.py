"""Updates of low rank: what a draft learns while it serves, and copies of a module that have it."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Updates = Mapping[str, torch.Tensor]
"""By `<linear layer>.up` [out, rank] and `<linear layer>.down` [rank, in]: weight + up @ down."""


def learnable(module: Any) -> list[str]:
    """The linear layers of one of transformers' models that updates can change: all but its head."""
    prefix = module.base_model_prefix
    return [
        f"{prefix}.{name}"
        for name, layer in module.base_model.named_modules()
        if type(layer) is nn.Linear
    ]


@torch.no_grad()
def updated(module: Any, updates: Updates) -> Any:
    """A copy of a module with these updates; what they leave as it is, is shared with the module."""
    shared = {id(tensor): tensor for tensor in module.parameters()}
    made = copy.deepcopy(module, shared)
    for name in {key.rpartition(".")[0] for key in updates}:
        layer = made.get_submodule(name)
        weight = layer.weight
        up, down = (updates[f"{name}.{part}"].to(weight.device) for part in ("up", "down"))
        changed = (weight.float() + up @ down).to(weight.dtype)
        layer.weight = nn.Parameter(changed, requires_grad=False)
    return made
