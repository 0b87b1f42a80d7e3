"""Attention on CPU through the native library."""

import ctypes
from collections.abc import Sequence
from typing import Final

import torch

from workers.engine.kv_cache import KVSequence, KVShape
from workers.engine.native.library import available, library
from workers.engine.rows import RowBatch

_LANES: Final = 16
_DTYPES: Final = (torch.float32, torch.bfloat16)


class _Sequence(ctypes.Structure):
    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("first_row", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("base", ctypes.c_int32),
        ("first_slot", ctypes.c_int32),
        ("contiguous", ctypes.c_void_p),
        ("tail_start", ctypes.c_void_p),
        ("tail", ctypes.c_void_p),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        ("layer", ctypes.c_int32),
        ("query_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("bfloat16", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class NativeAttention:
    """The CPU backend, float32 and bfloat16: bitwise row invariant by construction."""

    name = "native"
    row_invariant = True

    def __init__(self) -> None:
        self._library = library()

    @staticmethod
    def serves(shape: KVShape) -> bool:
        """Whether this backend can hold such a cache."""
        return (
            shape.device.type == "cpu"
            and shape.dtype in _DTYPES
            and shape.head_dim % 2 == 0
            and available()
        )

    def allocate(self, shape: KVShape, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [layer, kv head, block, dim, 16] and values [layer, kv head, slot, padded dim].

        In bfloat16 a block of keys is [dim / 2, 16, 2] in truth.
        """
        planes = (shape.layers, shape.kv_heads)
        padded = -(-shape.head_dim // _LANES) * _LANES
        return (
            torch.empty(*planes, capacity // _LANES, shape.head_dim, _LANES, dtype=shape.dtype),
            torch.empty(*planes, capacity, padded, dtype=shape.dtype),
        )

    def copy(self, source: KVSequence, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy all slots."""
        keys[:, :, : source.capacity // _LANES] = source.keys
        values[:, :, : source.capacity] = source.values

    def move(self, sequence: KVSequence, source: Sequence[int], target: Sequence[int]) -> None:
        """Move slots in every layer and head."""
        layers, kv_heads, _, head_dim, _ = sequence.keys.shape
        indices = ctypes.c_int32 * len(source)
        self._library.move_slots(
            ctypes.c_void_p(sequence.keys.data_ptr()),
            ctypes.c_void_p(sequence.values.data_ptr()),
            ctypes.c_int64(sequence.capacity),
            layers * kv_heads,
            head_dim,
            int(sequence.keys.dtype is torch.bfloat16),
            indices(*source),
            indices(*target),
            len(source),
        )

    def read_block(self, sequence: KVSequence, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy one block out."""
        slots = slice(index * _LANES, (index + 1) * _LANES)
        return sequence.keys[:, :, index].clone(), sequence.values[:, :, slots].clone()

    def write_block(
        self, sequence: KVSequence, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Copy one block in."""
        sequence.keys[:, :, index] = keys
        sequence.values[:, :, index * _LANES : (index + 1) * _LANES] = values

    def step(self, batch: RowBatch) -> "NativeStep":
        """Prepare a step: what is the same in every layer is made once."""
        return NativeStep(self._library, batch)


class NativeStep:
    """Attention of one step; `attend` is called once a layer. `sequences` are what the library reads."""

    def __init__(self, native: ctypes.CDLL, batch: RowBatch) -> None:
        self._library = native
        self.sequences = (_Sequence * len(batch.sequences))()
        self._alive: list[object] = []
        for entry, rows, first in zip(
            self.sequences, batch.sequences, batch.first_rows, strict=True
        ):
            contiguous, beyond = rows.visible()
            starts = [0]
            for path in beyond:
                starts.append(starts[-1] + len(path))
            entry.keys = rows.kv.keys.data_ptr()
            entry.values = rows.kv.values.data_ptr()
            entry.capacity = rows.kv.capacity
            entry.first_row = first
            entry.num_rows = len(rows.tokens)
            entry.base = rows.kv.length
            entry.first_slot = rows.kv.length + rows.first
            entry.contiguous = self._array(contiguous)
            entry.tail_start = self._array(starts)
            entry.tail = self._array([row for path in beyond for row in path])

    def _array(self, values: Sequence[int]) -> int:
        array = (ctypes.c_int32 * len(values))(*values)
        self._alive.append(array)
        return ctypes.addressof(array)

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
        _, heads, rows, dim = query.shape
        out = torch.zeros(1, rows, heads, dim, dtype=query.dtype)
        shape = _Shape(
            layer,
            heads,
            key.shape[1],
            dim,
            int(query.dtype is torch.bfloat16),
            window,
            scale,
            softcap,
        )
        failed = self._library.attend(
            self.sequences,
            len(self.sequences),
            ctypes.byref(shape),
            *_strided(query),
            *_strided(key),
            *_strided(value),
            ctypes.c_void_p(out.data_ptr()),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"attention over {rows} rows: no memory for the scores")
        return out


def _strided(tensor: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]:
    """Pointer, row stride and head stride of a [1, heads, rows, dim] tensor with a dense last axis."""
    if tensor.stride(3) != 1:
        raise ValueError(f"the head dimension must be dense, got strides {tensor.stride()}")
    return (
        ctypes.c_void_p(tensor.data_ptr()),
        ctypes.c_int64(tensor.stride(2)),
        ctypes.c_int64(tensor.stride(1)),
    )
