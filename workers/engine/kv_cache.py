"""The KV cache: a pool of slots, and the sequences that hold some of them.

A slot holds the keys and values of one token in every layer. The committed tokens of a sequence lie
in its slots 0 … length - 1 in the order of their positions; a step writes its rows behind them, and
`keep` makes those that were accepted committed. The rest is overwritten by the next step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one slot holds."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVLayout(Protocol):
    """How an attention backend lays a sequence out in memory."""

    def allocate(self, shape: KVShape, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised keys and values of `capacity` slots, a multiple of 16."""

    def copy(self, source: "KVSequence", keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the committed slots of `source` into newly allocated keys and values."""

    def move(self, sequence: "KVSequence", source: Sequence[int], target: Sequence[int]) -> None:
        """Move slots within a sequence, one after the other; none moves up."""


class KVPool:
    """A fixed number of slots, shared by the sequences of a worker."""

    GRAIN = 16

    def __init__(self, shape: KVShape, layout: KVLayout, num_slots: int) -> None:
        self.shape = shape
        self.layout = layout
        self.num_slots = num_slots // self.GRAIN * self.GRAIN
        self.free_slots = self.num_slots
        self._sequences: set[KVSequence] = set()

    def sequence(self) -> "KVSequence":
        """A new, empty sequence."""
        return KVSequence(self)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the slots of all sequences and the free ones add up."""
        held = sum(sequence.capacity for sequence in self._sequences)
        if held + self.free_slots != self.num_slots:
            raise RuntimeError(
                f"KV pool of {self.num_slots} slots: {held} held, {self.free_slots} free"
            )
        for sequence in self._sequences:
            if sequence.length > sequence.capacity:
                raise RuntimeError(f"sequence of length {sequence.length} in {sequence.capacity}")

    def _resize(self, sequence: "KVSequence", capacity: int) -> None:
        self.free_slots -= capacity - sequence.capacity
        if capacity:
            self._sequences.add(sequence)
        else:
            self._sequences.discard(sequence)


class KVSequence:
    """The slots of one sequence; `length` of them are committed."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.length = 0
        self.capacity = 0
        self.keys: torch.Tensor
        self.values: torch.Tensor

    def reserve(self, slots: int) -> bool:
        """Make room for `slots` slots in all; False, and no change, if the pool has too few."""
        if slots <= self.capacity:
            return True
        grain = self._pool.GRAIN
        needed = -(-slots // grain) * grain
        if needed - self.capacity > self._pool.free_slots:
            return False
        # Growing in steps of an eighth keeps the cost of copying a small part of a token's.
        roomy = -(-(slots + max(64, slots // 8)) // grain) * grain
        capacity = roomy if roomy - self.capacity <= self._pool.free_slots else needed
        keys, values = self._pool.layout.allocate(self._pool.shape, capacity)
        if self.length:
            self._pool.layout.copy(self, keys, values)
        self._pool._resize(self, capacity)
        self.keys, self.values, self.capacity = keys, values, capacity
        return True

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last step, ascending: they become the next positions."""
        moved = [(row, i) for i, row in enumerate(rows) if row != i]
        if moved:
            self._pool.layout.move(
                self,
                [self.length + row for row, _ in moved],
                [self.length + i for _, i in moved],
            )
        self.length += len(rows)

    def free(self) -> None:
        """Give all slots back."""
        self._pool._resize(self, 0)
        self.length = self.capacity = 0
        self.keys = self.values = torch.empty(0)
