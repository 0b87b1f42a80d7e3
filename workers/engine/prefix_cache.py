"""Keys and values of token prefixes that were computed before.

Whole blocks of 16 tokens are kept, each under its tokens and the block before it, so that equal prompts,
system prompts and earlier turns of a chat are found again. A hit is copied into the new sequence. The
blocks share the slots of the pool and give way, least recently used first, when a sequence needs them.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.engine.kv_cache import KVPool, KVSequence

_ROOT = 0


@dataclass(slots=True)
class _Block:
    number: int
    keys: torch.Tensor
    values: torch.Tensor
    features: torch.Tensor


class PrefixCache:
    """The cached blocks of one pool. `queries` and `hits` count tokens."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._numbers = itertools.count(_ROOT + 1)
        # A block's key names the block before it, so equal tokens behind different prefixes differ.
        self._blocks: OrderedDict[tuple[int, tuple[int, ...]], _Block] = OrderedDict()
        self.queries = 0
        self.hits = 0
        pool.attach_cache(self)

    @property
    def slots(self) -> int:
        """Slots of the pool that cached blocks hold."""
        return len(self._blocks) * KVPool.GRAIN

    def restore(self, kv: KVSequence, tokens: Sequence[int]) -> int:
        """Fill an empty sequence with what is cached of `tokens`; the number of tokens filled.

        The last token is never filled: it must be computed to know what follows.
        """
        self.queries += len(tokens)
        found = self._find(tokens[:-1])
        # Looked up and reserved in this order, a block that is about to be copied could be evicted.
        if not found or not kv.reserve(len(found) * KVPool.GRAIN):
            return 0
        for index, block in enumerate(found):
            self._pool.layout.write_block(kv, index, block.keys, block.values)
            kv.features[_slots(index)] = block.features
        kv.length = len(found) * KVPool.GRAIN
        self.hits += kv.length
        return kv.length

    def store(self, kv: KVSequence, tokens: Sequence[int]) -> None:
        """Keep the whole blocks of a sequence whose committed slots hold `tokens`."""
        before = _ROOT
        for index in range(kv.length // KVPool.GRAIN):
            key = (before, tuple(tokens[_slots(index)]))
            block = self._blocks.get(key)
            if block is None:
                if not self._pool.take_for_cache():
                    return
                keys, values = self._pool.layout.read_block(kv, index)
                features = kv.features[_slots(index)].clone()
                block = self._blocks[key] = _Block(next(self._numbers), keys, values, features)
            before = block.number
        self._find(tokens[: kv.length])

    def evict(self, slots: int) -> int:
        """Give up at least `slots` slots if there are as many; the number given up."""
        freed = 0
        while freed < slots and self._blocks:
            self._blocks.popitem(last=False)
            freed += KVPool.GRAIN
        return freed

    def _find(self, tokens: Sequence[int]) -> list[_Block]:
        """The cached blocks that `tokens` begin with; they become the most recently used."""
        found: list[_Block] = []
        keys = []
        before = _ROOT
        for start in range(0, len(tokens) - KVPool.GRAIN + 1, KVPool.GRAIN):
            key = (before, tuple(tokens[start : start + KVPool.GRAIN]))
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
            keys.append(key)
            before = block.number
        # From the end: a block without the one before it could not be found, so that goes last.
        for key in reversed(keys):
            self._blocks.move_to_end(key)
        return found


def _slots(index: int) -> slice:
    """The slots of a block."""
    return slice(index * KVPool.GRAIN, (index + 1) * KVPool.GRAIN)
