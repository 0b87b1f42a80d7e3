"""A model on several ranks, each with a part of every layer and of the KV cache.

Rank 0 plans and decides. The others repeat what it does to its caches and take part in its steps: what was
done since the last step travels with the next one. transformers' plan splits the layers. The ranks' parts of
a sum are added in the order of ranks, so a row's bits do not depend on where in a step it stands.
"""

import itertools
import logging
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    RowwiseParallel,
    get_kv_heads_per_rank,
)

from workers.engine import attention
from workers.engine.kv_cache import KVSequence, KVShape
from workers.engine.rows import RowBatch, SequenceRows
from workers.engine.support import UnsupportedModel

logger = logging.getLogger(__name__)

_LOADING: Final = timedelta(minutes=30)
"""One rank may read its part of the weights this much later than another."""

_IDLE: Final = timedelta(days=3650)
"""Between two steps the ranks wait for rank 0, however long that takes."""


class OrderedSum(RowwiseParallel):  # type: ignore[misc]
    """A layer split by its inputs, whose parts are added in the order of ranks, in float32."""

    def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> torch.Tensor:
        """See transformers' TensorParallelLayer."""
        parts = [torch.empty_like(output) for _ in range(mesh.size())]
        dist.all_gather(parts, output.contiguous(), group=mesh.get_group())
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        bias = module._parameters.get("bias")
        if bias is not None:
            total += bias.to_local() if isinstance(bias, DTensor) else bias
        return total.to(output.dtype)


@dataclass(frozen=True, slots=True)
class Place:
    """Which of `size` ranks a process is; they meet in `folder`, new and empty, of one machine."""

    rank: int
    size: int
    folder: Path


class Ranks:
    """The ranks of one model, seen from one of them."""

    def __init__(self, place: Place, device: str) -> None:
        """Meet the others; each takes one device of its own. Returns once all are there."""
        self.place = place
        os.environ |= {
            "RANK": str(place.rank),
            # Every process sees its own device only.
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(place.size),
            "GLOO_SOCKET_IFNAME": _loopback(),
        }
        for style in ("rowwise", "rowwise_rep"):
            ALL_PARALLEL_STYLES.register(style, OrderedSum())
        dist.init_process_group(
            "nccl" if device.startswith("cuda") else "gloo",
            store=FileStore(str(place.folder / "ranks"), place.size),
            rank=place.rank,
            world_size=place.size,
            timeout=_LOADING,
        )
        self._orders = dist.new_group(backend="gloo", timeout=_IDLE)

    def leave(self) -> None:
        """Part from the others."""
        dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.place.rank == 0

    def tell(self, order: Any) -> None:
        """Rank 0 tells the others something; anything that can be pickled."""
        dist.broadcast_object_list([order], src=0, group=self._orders)

    def hear(self) -> Any:
        """What rank 0 says next. Raises RuntimeError if it is no more."""
        orders = [None]
        dist.broadcast_object_list(orders, src=0, group=self._orders)
        return orders[0]


def check_divides(config: Any, size: int) -> None:
    """Raise UnsupportedModel, with the numbers, unless a text config's heads and layers split by `size`."""
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        raise UnsupportedModel(
            f"a model of type {config.model_type!r} has experts, which are served on one rank only: "
            f"tensor_parallel_size must be 1, not {size}"
        )
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModel(
            f"transformers has no tensor parallel plan for a model of type {config.model_type!r}: "
            f"tensor_parallel_size must be 1, not {size}"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = config.intermediate_size
    undivided = heads % size or width % size
    if undivided or get_kv_heads_per_rank(plan, kv_heads, size) is None:
        raise UnsupportedModel(
            f"tensor_parallel_size {size} must divide the model's {heads} attention heads, {kv_heads} "
            f"key-value heads and {width} values between its feed-forward layers"
        )


def is_split(module: torch.nn.Module) -> bool:
    """Whether a model's layers are split among ranks."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


@dataclass(slots=True)
class _Order:
    """What rank 0 did to its caches since its last step, and the rows of the next; None: the end."""

    done: list[tuple[Any, ...]]
    rows: list[tuple[int, int, SequenceRows]] | None


class Leader:
    """An attention backend for rank 0: the other ranks do what it does.

    Caches are known by the numbers of their keys.
    """

    def __init__(self, inner: attention.AttentionBackend, ranks: Ranks) -> None:
        self.name = inner.name
        self.row_invariant = inner.row_invariant
        self._inner = inner
        self._ranks = ranks
        self._done: deque[tuple[Any, ...]] = deque()
        self._known: dict[int, int] = {}
        self._numbers = itertools.count(1)

    def allocate(self, shape: KVShape, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVLayout."""
        keys, values = self._inner.allocate(shape, capacity)
        self._done.append(("allocate", self._enter(keys), capacity))
        return keys, values

    def copy(self, source: KVSequence, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See KVLayout."""
        self._inner.copy(source, keys, values)
        self._done.append(("copy", self._number(source.keys), self._number(keys)))

    def move(self, sequence: KVSequence, source: Sequence[int], target: Sequence[int]) -> None:
        """See KVLayout."""
        self._inner.move(sequence, source, target)
        self._done.append(("move", self._number(sequence.keys), list(source), list(target)))

    def read_block(self, sequence: KVSequence, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVLayout."""
        keys, values = self._inner.read_block(sequence, index)
        self._done.append(("read", self._number(sequence.keys), index, self._enter(keys)))
        return keys, values

    def write_block(
        self, sequence: KVSequence, index: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """See KVLayout."""
        self._inner.write_block(sequence, index, keys, values)
        self._done.append(("write", self._number(sequence.keys), index, self._number(keys)))

    def step(self, batch: RowBatch) -> attention.AttentionStep:
        """See AttentionBackend."""
        self._tell(
            [
                (
                    self._number(rows.kv.keys),
                    rows.kv.length,
                    replace(rows, kv=None),  # type: ignore[arg-type]
                )
                for rows in batch.sequences
            ]
        )
        return self._inner.step(batch)

    def stop(self) -> None:
        """Let the other ranks end."""
        self._tell(None)

    def _tell(self, rows: list[tuple[int, int, SequenceRows]] | None) -> None:
        # Caches are dropped on whatever thread forgets them last: take what is there, one by one.
        done = [self._done.popleft() for _ in range(len(self._done))]
        self._ranks.tell(_Order(done, rows))

    def _enter(self, keys: torch.Tensor) -> int:
        number = next(self._numbers)
        self._known[id(keys)] = number
        weakref.finalize(keys, self._forget, id(keys), number)
        return number

    def _forget(self, key: int, number: int) -> None:
        del self._known[key]
        self._done.append(("drop", number))

    def _number(self, keys: torch.Tensor) -> int:
        return self._known[id(keys)]


@dataclass(slots=True)
class _Cache:
    """A sequence's slots as another rank has them, or a block of the prefix cache."""

    keys: torch.Tensor
    values: torch.Tensor
    capacity: int = 0
    length: int = 0
    features: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class Follower:
    """The caches of another rank, and its part in the steps."""

    def __init__(self, model: Any, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._caches: dict[int, Any] = {}

    def run(self) -> None:
        """Take part until rank 0 ends. Raises RuntimeError if it is lost."""
        while True:
            order: _Order = self._ranks.hear()
            for done in order.done:
                self._repeat(*done)
            if order.rows is None:
                return
            sequences = []
            for number, length, rows in order.rows:
                rows.kv = self._caches[number]
                rows.kv.length = length
                sequences.append(rows)
            self._model.forward(RowBatch(sequences))

    def _repeat(self, what: str, number: int, *details: Any) -> None:
        layout = self._model.backend
        match what, details:
            case "allocate", (capacity,):
                keys, values = layout.allocate(self._model.kv_shape, capacity)
                self._caches[number] = _Cache(keys, values, capacity)
            case "copy", (into,):
                layout.copy(
                    self._caches[number], self._caches[into].keys, self._caches[into].values
                )
            case "move", (source, target):
                layout.move(self._caches[number], source, target)
            case "read", (index, block):
                self._caches[block] = _Cache(*layout.read_block(self._caches[number], index))
            case "write", (index, block):
                cached = self._caches[block]
                layout.write_block(self._caches[number], index, cached.keys, cached.values)
            case "drop", ():
                del self._caches[number]


def _loopback() -> str:
    """The name of the loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    raise OSError("this machine has no loopback interface, on which ranks would meet")
