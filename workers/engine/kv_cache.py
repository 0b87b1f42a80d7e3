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
    """What one slot holds: keys and values, and `feature_width` hidden values for drafters, if any."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    feature_width: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        values = 2 * self.layers * self.kv_heads * self.head_dim + self.feature_width
        return values * self.dtype.itemsize


class KVLayout(Protocol):
    """How an attention backend lays a sequence out in memory."""

    def allocate(self, shape: KVShape, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised keys and values of `capacity` slots, a multiple of 16."""

    def copy(self, source: "KVSequence", keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the slots of `source` into newly allocated keys and values, which hold more."""

    def move(self, sequence: "KVSequence", source: Sequence[int], target: Sequence[int]) -> None:
        """Move slots within a sequence, one after the other; none moves up."""

    def read_block(self, sequence: "KVSequence", index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the keys and values of slots 16 × index to 16 × index + 15."""

    def write_block(
        self, sequence: "KVSequence", index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put back what `read_block` returned."""


class SlotCache(Protocol):
    """A cache that uses slots of the pool for as long as no sequence needs them."""

    @property
    def slots(self) -> int:
        """Slots that it holds."""

    def evict(self, slots: int) -> int:
        """Give up at least `slots` slots if it holds as many; the number given up."""


class KVPool:
    """A fixed number of slots, shared by the sequences of a worker."""

    GRAIN = 16

    def __init__(self, shape: KVShape, layout: KVLayout, num_slots: int) -> None:
        self.shape = shape
        self.layout = layout
        self.num_slots = num_slots // self.GRAIN * self.GRAIN
        self.free_slots = self.num_slots
        self._sequences: set[KVSequence] = set()
        self._cache: SlotCache | None = None

    @property
    def cached_slots(self) -> int:
        """Slots that the attached cache holds."""
        return 0 if self._cache is None else self._cache.slots

    @property
    def available_slots(self) -> int:
        """Slots that a sequence can get: the free ones and those of the cache."""
        return self.free_slots + self.cached_slots

    def attach_cache(self, cache: SlotCache) -> None:
        """Let a cache use slots that no sequence needs."""
        self._cache = cache

    def take_for_cache(self) -> bool:
        """Take the slots of one block for the attached cache, from older blocks if need be."""
        if not self._make_free(self.GRAIN):
            return False
        self.free_slots -= self.GRAIN
        return True

    def sequence(self) -> "KVSequence":
        """A new, empty sequence."""
        return KVSequence(self)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the slots of all sequences and the free ones add up."""
        held = sum(sequence.capacity for sequence in self._sequences)
        if held + self.cached_slots + self.free_slots != self.num_slots:
            raise RuntimeError(
                f"KV pool of {self.num_slots} slots: {held} held, {self.cached_slots} cached, "
                f"{self.free_slots} free"
            )
        for sequence in self._sequences:
            if sequence.length > sequence.capacity:
                raise RuntimeError(f"sequence of length {sequence.length} in {sequence.capacity}")

    def _make_free(self, slots: int) -> bool:
        """Whether `slots` slots are free, after the cache gave up what is missing."""
        if slots > self.available_slots:
            return False
        if self._cache is not None and slots > self.free_slots:
            self.free_slots += self._cache.evict(slots - self.free_slots)
        return True

    def _resize(self, sequence: "KVSequence", capacity: int) -> None:
        self.free_slots -= capacity - sequence.capacity
        if capacity:
            self._sequences.add(sequence)
        else:
            self._sequences.discard(sequence)


class KVSequence:
    """The slots of one sequence; `length` of them are committed.

    `features` [capacity, feature width] are what drafters read of each slot's token.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.length = 0
        self.capacity = 0
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self.features = torch.empty(0)

    def reserve(self, slots: int) -> bool:
        """Make room for `slots` slots in all; False, and no change, if the pool has too few."""
        if slots <= self.capacity:
            return True
        grain = self._pool.GRAIN
        needed = -(-slots // grain) * grain
        if not self._pool._make_free(needed - self.capacity):
            return False
        # Growing in steps of an eighth keeps the cost of copying a small part of a token's.
        roomy = -(-(slots + max(64, slots // 8)) // grain) * grain
        capacity = roomy if roomy - self.capacity <= self._pool.free_slots else needed
        keys, values = self._pool.layout.allocate(self._pool.shape, capacity)
        shape = self._pool.shape
        features = torch.empty(
            capacity, shape.feature_width, dtype=shape.dtype, device=shape.device
        )
        if self.capacity:
            # Rows behind the committed ones may be of a tree that is still growing.
            self._pool.layout.copy(self, keys, values)
            features[: self.capacity] = self.features
        self._pool._resize(self, capacity)
        self.keys, self.values, self.features, self.capacity = keys, values, features, capacity
        return True

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last step, ascending: they become the next positions."""
        moved = [(row, i) for i, row in enumerate(rows) if row != i]
        if moved:
            source = [self.length + row for row, _ in moved]
            target = [self.length + i for _, i in moved]
            self._pool.layout.move(self, source, target)
            self.features[target] = self.features[source]
        self.length += len(rows)

    def free(self) -> None:
        """Give all slots back."""
        self._pool._resize(self, 0)
        self.length = self.capacity = 0
        self.keys = self.values = self.features = torch.empty(0)
