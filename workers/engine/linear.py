"""Linear layers for CPU: weights packed once, and results that do not depend on the row count."""

from typing import Final, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from workers.engine.native.linear import PackedWeight

PACKED_MIN_ROWS: Final = 2
"""From this many rows on, a packed layer gives a row the same bits whatever shares the call."""

PLAIN_MIN_ROWS: Final = 4
"""The same for torch's own linear in float32."""


class PackedLinear(nn.Module):
    """A linear layer with its weight in oneDNN's own blocked layout.

    Input [..., in] to [..., out]. Twice as fast as `nn.Linear` at few rows, because nothing is
    reordered per call.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = None if bias is None else bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, self.in_features)
        out = torch.ops.mkldnn._linear_pointwise(flat, self._weight, self._bias, "none", [], "")
        shaped: torch.Tensor = out.view(*rows.shape[:-1], self.out_features)
        return shaped


class NativeLinear(nn.Module):
    """A linear layer in bfloat16 through the native library: faster than oneDNN's at few rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = PackedWeight(weight, bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = self._weight(rows.reshape(-1, self.in_features))
        return out.view(*rows.shape[:-1], self.out_features)


class PlainLinear(nn.Module):
    """A linear layer as torch has it: for devices without packed ones."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight = weight.detach()
        self._bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self._weight, self._bias)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this processor has packed layers for the type."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def pack_linears(model: nn.Module) -> None:
    """Replace every linear layer of a model by a packed one, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, packed(child.weight, child.bias))
            elif isinstance(child, Conv1D):  # GPT-2's, with the weight the other way round
                weight = cast(torch.Tensor, child.weight)
                setattr(module, name, packed(weight.mT.contiguous(), child.bias))


def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """The packed layer for a weight [out, in]."""
    kind = NativeLinear if PackedWeight.serves(weight) else PackedLinear
    return kind(weight, bias)
