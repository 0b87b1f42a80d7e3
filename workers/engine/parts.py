"""A part of one of transformers' models: some of its layers, with its embedding, last norm and head.

Nothing is copied: the part's layers are the model's own.
"""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Ending:
    """What stands for the layers that a part leaves out: one layer like the model's last, and a norm."""

    layer: Any
    norm: Any


def part_of(module: Any, layers: Sequence[int], ending: Ending | None) -> Any:
    """These layers of a model, in this order, and then the ending.

    Raises ValueError if it has no list of layers.
    """
    if not isinstance(getattr(module.base_model, "layers", None), nn.ModuleList):
        kind = module.config.model_type
        raise ValueError(f"a model of type {kind!r} has no list of layers to leave some out of")
    part, inner = _shallow(module), _shallow(module.base_model)
    setattr(part, module.base_model_prefix, inner)
    kept = [module.base_model.layers[layer] for layer in layers]
    types = getattr(inner.config, "layer_types", None)
    kinds = None if types is None else [types[layer] for layer in layers]
    if ending is not None:
        kept.append(ending.layer)
        inner.norm = ending.norm
        if types is not None and kinds is not None:
            kinds.append(types[-1])
    inner.layers = nn.ModuleList(kept)
    inner.config = part.config = copy.deepcopy(inner.config)
    inner.config.num_hidden_layers = len(kept)
    if kinds is not None:
        inner.config.layer_types = kinds
    return part


def _shallow(module: Any) -> Any:
    """A module with the parts of another, whose own list of parts, and hooks, may change."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    made._forward_hooks = OrderedDict()
    made._forward_pre_hooks = OrderedDict()
    return made
