"""Attention over the KV cache, behind the attention interface of transformers.

transformers' models call whatever function is registered under `config._attn_implementation`; ours
puts the new keys and values into the cache and lets the step's backend attend. The step travels as a
keyword argument through `forward`. There is one backend for CPUs, `native`, and one of plain torch
operations for every device.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, cast

import torch
from transformers import AttentionInterface

from workers.engine.kv_cache import KVLayout, KVPool, KVSequence, KVShape
from workers.engine.native.attention import NativeAttention
from workers.engine.rows import RowBatch

IMPLEMENTATION: Final = "slipstream"


class AttentionStep(Protocol):
    """Attention of one step."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Query [1, heads, rows, dim], key and value [1, kv heads, rows, dim] to [1, rows, heads, dim].

        Keys and values are put into the cache first. `window` 0 and `softcap` 0 mean none.
        """


class PartStep:
    """Attention of a part of a model: its layers have the planes of their places in the cache."""

    def __init__(self, step: AttentionStep, planes: Mapping[int, int]) -> None:
        """`planes` of the cache by the numbers that the layers have in the whole."""
        self._step = step
        self._planes = planes

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """As AttentionStep.attend."""
        plane = self._planes[layer]
        return self._step.attend(plane, query, key, value, scale, window, softcap)


class AttentionBackend(KVLayout, Protocol):
    """A cache layout and the attention over it."""

    name: str
    row_invariant: bool

    def step(self, batch: RowBatch) -> AttentionStep:
        """Prepare the attention of one step."""


def choose_backend(shape: KVShape) -> AttentionBackend:
    """The fastest backend for such a cache."""
    return NativeAttention() if NativeAttention.serves(shape) else TorchAttention()


def slipstream_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    *,
    attention_step: AttentionStep,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention layers call; see transformers' AttentionInterface."""
    if attention_mask is not None:
        raise ValueError("the model made a mask of its own; this engine masks by position")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention_step.attend(
        cast(int, module.layer_idx), query, key, value, scale, sliding_window or 0, softcap or 0.0
    )
    return out, None


AttentionInterface.register(IMPLEMENTATION, slipstream_attention)


class TorchAttention:
    """Plain torch operations, in float32: for every device, and the reference for the others."""

    name = "torch"
    row_invariant = False

    def allocate(self, shape: KVShape, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [layer, kv head, slot, dim]."""
        size = (shape.layers, shape.kv_heads, capacity, shape.head_dim)
        empty = torch.empty(2, *size, dtype=shape.dtype, device=shape.device)
        return empty[0], empty[1]

    def copy(self, source: KVSequence, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy all slots."""
        keys[:, :, : source.capacity] = source.keys
        values[:, :, : source.capacity] = source.values

    def move(self, sequence: KVSequence, source: Sequence[int], target: Sequence[int]) -> None:
        """Move slots in every layer and head."""
        for planes in (sequence.keys, sequence.values):
            planes[:, :, list(target)] = planes[:, :, list(source)]

    def read_block(self, sequence: KVSequence, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy one block out."""
        slots = slice(index * KVPool.GRAIN, (index + 1) * KVPool.GRAIN)
        return sequence.keys[:, :, slots].clone(), sequence.values[:, :, slots].clone()

    def write_block(
        self, sequence: KVSequence, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Copy one block in."""
        slots = slice(index * KVPool.GRAIN, (index + 1) * KVPool.GRAIN)
        sequence.keys[:, :, slots] = keys
        sequence.values[:, :, slots] = values

    def step(self, batch: RowBatch) -> "TorchStep":
        """Make the masks of a step."""
        return TorchStep(batch)


class TorchStep:
    """Attention of one step; `attend` is called once a layer."""

    def __init__(self, batch: RowBatch) -> None:
        self._batch = batch
        self._visible: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []
        for rows in batch.sequences:
            base, count = rows.kv.length, len(rows.tokens)
            mask = torch.zeros(count, base + rows.first + count, dtype=torch.bool)
            contiguous, beyond = rows.visible()
            for row, (until, path) in enumerate(zip(contiguous, beyond, strict=True)):
                mask[row, :until] = True
                mask[row, [base + other for other in path]] = True
            device = rows.kv.keys.device
            self._visible.append(mask.to(device))
            slots = [*range(base), *(base + depth for depth in rows.all_depths())]
            self._positions.append(torch.tensor(slots, device=device))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """As AttentionStep.attend."""
        _, heads, rows, dim = query.shape
        out = query.new_zeros(1, rows, heads, dim)
        sequences = zip(self._batch.sequences, self._batch.first_rows, strict=True)
        for (sequence, first), mask, positions in zip(
            sequences, self._visible, self._positions, strict=True
        ):
            kv, count = sequence.kv, len(sequence.tokens)
            here = slice(first, first + count)
            start = kv.length + sequence.first
            end = start + count
            kv.keys[layer, :, start:end] = key[0, :, here]
            kv.values[layer, :, start:end] = value[0, :, here]
            if window:
                near = positions > positions[start:, None] - window
                mask = mask & near
            keys = kv.keys[layer, :, :end].float()  # [kv heads, slots, dim]
            values = kv.values[layer, :, :end].float()
            grouped = query[0, :, here].float().reshape(len(keys), -1, count, dim)
            scores = grouped @ keys[:, None].mT * scale  # [kv heads, group, rows, slots]
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            attended = (weights @ values[:, None]).reshape(heads, count, dim)
            out[0, here] = attended.transpose(0, 1).to(out.dtype)
        return out
