"""Configuration of a draft worker. Defaults belong to the edge, where users write."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LookupConfig:
    """Prompt lookup."""

    name: str

    kind = "lookup"
    num_threads = 0


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """Suffix decoding. With `learn`, the last `history_tokens` of served answers are drafted from, too."""

    name: str
    learn: bool
    history_tokens: int

    kind = "suffix"
    num_threads = 0


@dataclass(frozen=True, slots=True)
class DatastoreConfig:
    """Retrieval from the datastore in `folder`; the rest as in SuffixConfig."""

    name: str
    folder: str
    learn: bool
    history_tokens: int

    kind = "datastore"
    num_threads = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A draft model.

    `model` is a reference as in `workers.checkpoint`, or a folder with a cut draft. `shared_vocabulary`
    allows another tokenizer than the target's. `width` rows a session are expanded at once, `steps` times a
    proposal; guesses less likely than `floor` are not looked behind. `num_slots` tokens fit into its cache.
    """

    name: str
    model: str
    dtype: str
    device: str
    shared_vocabulary: bool
    width: int
    steps: int
    floor: float
    num_slots: int
    num_threads: int

    kind = "model"


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE head.

    `model` is a folder with a head, ours or a published one. `window` is how many positions back it attends
    and reads features; the rest as in ModelConfig.
    """

    name: str
    model: str
    dtype: str
    device: str
    window: int
    width: int
    steps: int
    floor: float
    num_slots: int
    num_threads: int

    kind = "eagle"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Medusa heads; `model` is a folder with some, ours or published ones."""

    name: str
    model: str
    dtype: str
    device: str
    num_threads: int

    kind = "medusa"


@dataclass(frozen=True, slots=True)
class MaskConfig:
    """A mask drafter; `model` is a folder with one. `num_slots` tokens fit into its cache."""

    name: str
    model: str
    dtype: str
    device: str
    num_slots: int
    num_threads: int

    kind = "mask"


@dataclass(frozen=True, slots=True)
class CustomConfig:
    """A drafter of somebody else's package: `factory` is `package.module:function`, called with `options`."""

    name: str
    factory: str
    options: Mapping[str, Any]

    kind = "custom"
    num_threads = 0


WeightedConfig = ModelConfig | EagleConfig | MedusaConfig | MaskConfig
"""Drafters whose weights can be reloaded."""

DrafterConfig = LookupConfig | SuffixConfig | DatastoreConfig | WeightedConfig | CustomConfig


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One draft worker and its drafters; `target` is the reference of the model that they draft for."""

    drafters: tuple[DrafterConfig, ...]
    target: str
