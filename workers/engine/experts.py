"""Mixtures of experts whose rows do not depend on each other.

transformers' own grouped implementations pick their shapes by how many rows of the step chose an expert,
so a neighbour would change a row's bits. Here an expert's rows are padded to a count from which on that
does not happen, and a row's experts are always added in ascending order.
"""

from typing import Any, Final

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from workers.engine import linear
from workers.engine.support import UnsupportedModel

IMPLEMENTATION: Final = "slipstream"
_PACKED: Final = "slipstream_experts"


def prepare(module: Any, packed: bool) -> bool:
    """Make a model's experts, if it has any, row invariant; whether it has any.

    Raises UnsupportedModel for experts of another layout than [gate; up] and down, without biases.
    """
    found = [child for child in module.modules() if _is_experts(child)]
    for experts in found:
        unusual = (
            experts.has_bias
            or experts.is_transposed
            or experts.has_post_expert_norm
            or not (experts.is_concatenated and experts.has_gate)
        )
        if unusual:
            raise UnsupportedModel(f"{type(experts).__name__} has experts of an unusual layout")
        layer = linear.PackedLinear if packed else linear.PlainLinear
        object.__setattr__(
            experts,
            _PACKED,
            [
                (layer(gate_up, None), layer(down, None))
                for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True)
            ],
        )
        if packed:
            del experts.gate_up_proj, experts.down_proj
    if found:
        module.set_experts_implementation(IMPLEMENTATION)
    return bool(found)


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "_is_expert_parallel")


def _experts_forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Rows [T, H], their experts [T, k] and weights [T, k] to rows [T, H]."""
    out = torch.zeros_like(hidden_states)
    layers = getattr(experts, _PACKED)
    for expert in top_k_index.unique().tolist():
        rows, choice = torch.where(top_k_index == expert)
        gate_up, down = layers[expert]
        missing = max(0, linear.PLAIN_MIN_ROWS - len(rows))
        padded = torch.cat([rows, rows[:1].expand(missing)])
        states = down(experts._apply_gate(gate_up(hidden_states[padded])))[: len(rows)]
        weighted = states * top_k_weights[rows, choice, None]
        out.index_add_(0, rows, weighted.to(out.dtype))
    return out


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
