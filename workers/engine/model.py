"""A causal language model, run over flat rows."""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from workers.checkpoint import FeatureKind
from workers.engine import attention, experts, linear, support
from workers.engine.attention import PartStep
from workers.engine.features import FeatureTap
from workers.engine.kv_cache import KVPool
from workers.engine.native.decoder import NativeDecoder
from workers.engine.parts import Ending, part_of
from workers.engine.rows import RowBatch
from workers.engine.support import Examined
from workers.engine.tensor_parallel import is_split

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


class Runner(Protocol):
    """Runs the rows of a step through all layers."""

    @property
    def linears(self) -> list[Any]:
        """The packed layers in their order: callables of rows, with `in_features`."""

    def keep_features(self, kind: FeatureKind) -> int:
        """Return features of every row from now on; the width of a row's."""

    def run(self, batch: RowBatch, step: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [wanted rows, vocabulary], float32, and the features of all rows, if they are kept."""

    def part(self, layers: Sequence[int], ending: Ending | None) -> "Runner":
        """See Model.part."""


class Model:
    """A model on one device.

    Made by `workers.engine.loading.load_model`. `forward` takes the rows of any number of sequences,
    puts their keys and values into their caches, and returns the logits that they want.
    """

    def __init__(self, module: Any, info: ModelInfo, examined: Examined) -> None:
        self.info = info
        self._examined = examined
        self.device = module.device
        self.kv_shape = examined.kv_shape
        self.backend = attention.choose_backend(self.kv_shape)
        self.runner: Runner
        whole = not is_split(module)
        if whole and examined.scale is not None and NativeDecoder.serves(module, self.kv_shape):
            self.runner = NativeDecoder(
                module, examined.windows, examined.scale, info.max_model_len
            )
        else:
            self.runner = ModuleRunner(module, info.vocab_size)

    def keep_features(self, kind: FeatureKind) -> None:
        """Keep these features of every row in the caches; before a pool is made."""
        self.kv_shape = replace(self.kv_shape, feature_width=self.runner.keep_features(kind))

    @property
    def num_layers(self) -> int:
        """Layers that attend."""
        return self.kv_shape.layers

    def part(self, layers: Sequence[int], ending: Ending | None = None) -> "Model":
        """Some of the layers, in this order, with the model's embedding, last norm and head.

        No weight is copied. An `ending` adds a layer, and a norm in place of the last one. The part has
        caches of its own, whose planes are numbered by the places of its layers. Raises ValueError for a
        model that cannot be taken apart.
        """
        part = Model.__new__(Model)
        part.info, part.device, part.backend = self.info, self.device, self.backend
        part.runner = self.runner.part(layers, ending)
        count = len(layers) + (ending is not None)
        part.kv_shape = replace(self.kv_shape, layers=count, feature_width=0)
        return part

    def renewed(self, module: Any) -> "Model":
        """The model of a module that differs in its weights only; their caches are of one kind."""
        return Model(module, self.info, self._examined)

    def pool(self, num_slots: int) -> KVPool:
        """A KV cache of this many slots for this model."""
        return KVPool(self.kv_shape, self.backend, num_slots)

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> torch.Tensor:
        """Run a step: logits [wanted rows, vocabulary], float32.

        The caches must have room for the rows; the rows are not committed (see KVSequence.keep). Kept
        features go to the caches, too.
        """
        logits, features = self.runner.run(batch, self.backend.step(batch))
        if features is not None:
            for first, rows in zip(batch.first_rows, batch.sequences, strict=True):
                start, count = rows.kv.length + rows.first, len(rows.tokens)
                rows.kv.features[start : start + count] = features[first : first + count]
        return logits


class ModuleRunner:
    """Transformers' own module, for any architecture, with our attention and packed layers."""

    def __init__(self, module: Any, vocab_size: int) -> None:
        self.module = module
        self._vocab_size = vocab_size
        self._device = module.device
        # The parts of a split layer stay as transformers' plan has made them.
        packed = linear.can_pack(module.dtype, module.device) and not is_split(module)
        has_experts = experts.prepare(module, packed)
        if packed:
            linear.pack_linears(module)
        # Routers of experts are plain products, whatever the layers are.
        plain = has_experts or not packed
        self._min_rows = linear.PLAIN_MIN_ROWS if plain else linear.PACKED_MIN_ROWS
        support.set_attention(module, attention.IMPLEMENTATION)
        self._tap: FeatureTap | None = None
        self._planes: dict[int, int] | None = None

    @property
    def linears(self) -> list[Any]:
        """See Runner."""
        kinds = (linear.PackedLinear, linear.NativeLinear)
        return [layer for layer in self.module.modules() if isinstance(layer, kinds)]

    def keep_features(self, kind: FeatureKind) -> int:
        """See Runner."""
        self._tap = FeatureTap(self.module, kind)
        return int(self._tap.width)

    def run(self, batch: RowBatch, step: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See Runner."""
        # Padding keeps every matrix product at a size from which on a row's bits do not depend on
        # the number of rows. Padding rows belong to no sequence and attend to nothing.
        padding = [0] * max(0, self._min_rows - batch.num_rows)
        arguments = {
            "input_ids": torch.tensor([batch.tokens() + padding], device=self._device),
            "position_ids": torch.tensor([batch.positions() + padding], device=self._device),
            "use_cache": False,
            "attention_step": step if self._planes is None else PartStep(step, self._planes),
        }
        logits = self._logits(arguments, batch.wanted())
        return logits, None if self._tap is None else self._tap.take()

    def part(self, layers: Sequence[int], ending: Ending | None) -> "ModuleRunner":
        """See Model.part."""
        part = copy.copy(self)
        part.module = part_of(self.module, layers, ending)
        part._tap = None
        numbers = [*layers] if ending is None else [*layers, ending.layer.self_attn.layer_idx]
        part._planes = {layer: plane for plane, layer in enumerate(numbers)}
        return part

    def _logits(self, arguments: dict[str, Any], wanted: list[int]) -> torch.Tensor:
        if not wanted:
            self.module.base_model(**arguments)
            return torch.empty(0, self._vocab_size)
        rows = wanted + wanted[:1] * max(0, self._min_rows - len(wanted))
        kept = torch.tensor(rows, device=self._device)
        logits = self.module(**arguments, logits_to_keep=kept).logits
        return logits[0, : len(wanted)].float()  # type: ignore[no-any-return]
