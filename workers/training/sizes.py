"""What drafters of a target take in memory, by the target's shape: no weight is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from workers.draft.eagle import EagleHead, HeadConfig
from workers.draft.medusa import MedusaHeads
from workers.engine.features import feature_width
from workers.engine.kv_cache import KVShape

_LLAMAS_LAYER: Final = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: of `weights`, and `per_token` of every token of answers in the making that is kept."""

    weights: int = 0
    per_token: int = 0


class Sizes:
    """A target, and what is made for it, in one dtype.

    `layers` is 0 if the target has no list of layers that can be taken apart. `embeds` says whether heads
    find its embedding and its head, `heads_fit` whether EAGLE heads can be trained for it.
    """

    def __init__(self, target: Path, dtype: torch.dtype, vocabulary: int) -> None:
        """Of drafts that can guess so many tokens of the vocabulary."""
        config = AutoConfig.from_pretrained(target)
        # Shapes only: the largest target takes no memory here.
        with torch.device("meta"):
            self._module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self._config = config.get_text_config()
        self.dtype = str(dtype).removeprefix("torch.")
        self._dtype = dtype
        found = getattr(self._module.base_model, "layers", None)
        self._layers = found if isinstance(found, nn.ModuleList) else nn.ModuleList()
        self.layers = len(self._layers)
        self.hidden = int(self._config.hidden_size)
        self.vocabulary = int(self._config.vocab_size)
        self.guessed = min(vocabulary, self.vocabulary)
        names = {name for name, _ in self._layers[-1].named_parameters()} if self.layers else set()
        self.embeds = hasattr(self._module.base_model, "embed_tokens")
        self.heads_fit = self.embeds and names == _LLAMAS_LAYER
        self.feature_bytes = feature_width(self._config, "three") * dtype.itemsize

    @property
    def loading_bytes(self) -> int:
        """What a cut draft takes while it loads: the whole target, in float32."""
        return _parameters(self._module) * torch.float32.itemsize

    def cut(self, layers: Sequence[int]) -> Memory:
        """A draft that is cut from the target, with these layers."""
        kept = sum(_parameters(self._layers[layer]) for layer in layers)
        embedding = self.vocabulary * self.hidden
        head = self.guessed * self.hidden
        return self._memory(embedding + kept + self.hidden + head, len(layers))

    def eagle(self) -> Memory:
        """An EAGLE-3 head, with its copy of the target's embedding."""
        with torch.device("meta"):
            embedding = torch.empty(self.vocabulary, self.hidden)
            config = HeadConfig("eagle3", self._config, self.guessed)
            head = EagleHead(config, embedding, torch.arange(self.guessed))
        return self._memory(_parameters(head), 1)

    def medusa(self, heads: int, blocks: int) -> Memory:
        """Medusa heads, with their part of the target's head."""
        with torch.device("meta"):
            projection = torch.empty(self.guessed, self.hidden)
            made = MedusaHeads(heads, blocks, torch.arange(self.guessed), [projection])
        return self._memory(_parameters(made), 0)

    def part(self, layers: int, adapter: bool) -> Memory:
        """Some of the target's own layers, and an adapter behind them: one layer more, and a norm."""
        own = _parameters(self._layers[-1]) + self.hidden if adapter else 0
        return self._memory(own, layers + adapter)

    def _memory(self, values: int, layers: int) -> Memory:
        config = self._config
        heads = config.num_attention_heads
        shape = KVShape(
            layers,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or self.hidden // heads,
            self._dtype,
            torch.device("meta"),
        )
        return Memory(values * self._dtype.itemsize, shape.slot_bytes)


def first_and_last(layers: int, kept: int) -> tuple[int, ...]:
    """Which of a target's layers to cut a draft from: of those kept, three in ten at the end."""
    last = max(1, 3 * kept // 10)
    return (*range(kept - last), *range(layers - last, layers))


def _parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
