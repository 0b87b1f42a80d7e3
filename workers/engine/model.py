"""A causal language model, run over flat rows."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from workers.checkpoint import FeatureKind
from workers.engine import attention, experts, linear, support
from workers.engine.features import FeatureTap
from workers.engine.kv_cache import KVPool, KVShape
from workers.engine.rows import RowBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a model once it is loaded."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    weights_fingerprint: str
    dtype: str
    row_invariant: bool = False
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


class Model:
    """A model on one device.

    Made by `workers.engine.loading.load_model`. `forward` takes the rows of any number of sequences,
    puts their keys and values into their caches, and returns the logits that they want.
    """

    def __init__(self, module: Any, info: ModelInfo, kv_shape: KVShape) -> None:
        self.info = info
        self.device = module.device
        self.kv_shape = kv_shape
        self.backend = attention.choose_backend(kv_shape)
        self.module = module
        packed = linear.can_pack(module.dtype, module.device)
        has_experts = experts.prepare(module, packed)
        if packed:
            linear.pack_linears(module)
        # Routers of experts are plain products, whatever the layers are.
        plain = has_experts or not packed
        self._min_rows = linear.PLAIN_MIN_ROWS if plain else linear.PACKED_MIN_ROWS
        support.set_attention(module, attention.IMPLEMENTATION)
        self._tap: FeatureTap | None = None

    def keep_features(self, kind: FeatureKind) -> None:
        """Keep these features of every row in the caches; before a pool is made."""
        self._tap = FeatureTap(self.module, kind)
        self.kv_shape = replace(self.kv_shape, feature_width=self._tap.width)

    def pool(self, num_slots: int) -> KVPool:
        """A KV cache of this many slots for this model."""
        return KVPool(self.kv_shape, self.backend, num_slots)

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> torch.Tensor:
        """Run a step: logits [wanted rows, vocabulary], float32.

        The caches must have room for the rows; the rows are not committed (see KVSequence.keep). Kept
        features go to the caches, too.
        """
        # Padding keeps every matrix product at a size from which on a row's bits do not depend on
        # the number of rows. Padding rows belong to no sequence and attend to nothing.
        padding = [0] * max(0, self._min_rows - batch.num_rows)
        tokens = torch.tensor([batch.tokens() + padding], device=self.device)
        positions = torch.tensor([batch.positions() + padding], device=self.device)
        arguments = {
            "input_ids": tokens,
            "position_ids": positions,
            "use_cache": False,
            "attention_step": self.backend.step(batch),
        }
        logits = self._run(arguments, batch.wanted())
        if self._tap is not None:
            features = self._tap.take()
            for first, rows in zip(batch.first_rows, batch.sequences, strict=True):
                start, count = rows.kv.length + rows.first, len(rows.tokens)
                rows.kv.features[start : start + count] = features[first : first + count]
        return logits

    def _run(self, arguments: dict[str, Any], wanted: list[int]) -> torch.Tensor:
        if not wanted:
            self.module.base_model(**arguments)
            return torch.empty(0, self.info.vocab_size)
        rows = wanted + wanted[:1] * max(0, self._min_rows - len(wanted))
        kept = torch.tensor(rows, device=self.device)
        logits = self.module(**arguments, logits_to_keep=kept).logits
        return logits[0, : len(wanted)].float()  # type: ignore[no-any-return]
