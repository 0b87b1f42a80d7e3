"""Configuration of a draft worker. Defaults belong to the edge, where users write."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.prediction import PREDICTION


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
class PredictionConfig:
    """What requests expect; every target has it beside it."""

    name = PREDICTION
    kind = "prediction"
    num_threads = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A draft model.

    `model` is a reference as in `workers.checkpoint`, or a folder with a cut draft. `shared_vocabulary`
    allows another tokenizer than the target's. With `online` it learns from what is committed, where its
    tokenizer is the target's. `width` rows a session are expanded at once, `steps` times a
    proposal; guesses less likely than `floor` are not looked behind. `num_slots` tokens fit into its cache.
    """

    name: str
    model: str
    dtype: str
    device: str
    shared_vocabulary: bool
    online: bool
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


@dataclass(frozen=True, slots=True)
class LayerSkipConfig:
    """The target with some of its layers left out; only beside it.

    `skip` are their numbers, or a file that `skip_search` has written; None leaves out every second inner
    one. With `online` others are tried while answers end. The rest as in ModelConfig.
    """

    name: str
    skip: tuple[int, ...] | str | None
    online: bool
    width: int
    steps: int
    floor: float
    num_slots: int

    kind = "layer_skip"
    num_threads = 0


@dataclass(frozen=True, slots=True)
class EarlyExitConfig:
    """The first layers of the target, and what comes behind them; only beside it.

    `model` is a folder with an adapter that `early_exit` has trained. Without one the target's own norm and
    head stand behind its first `layers`. The rest as in ModelConfig.
    """

    name: str
    model: str | None
    layers: int | None
    width: int
    steps: int
    floor: float
    num_slots: int

    kind = "early_exit"
    num_threads = 0


@dataclass(frozen=True, slots=True)
class JacobiConfig:
    """Parallel decoding: the target's own passes refine `block` guesses; only beside it."""

    name: str
    block: int

    kind = "jacobi"
    num_threads = 0


@dataclass(frozen=True, slots=True)
class LookaheadConfig:
    """A window of Jacobi guesses and a pool of the n-grams that it makes; only beside the target.

    The window has `window` columns of `ngram` - 1 tokens; at most `guesses` n-grams are verified at once.
    """

    name: str
    window: int
    ngram: int
    guesses: int

    kind = "lookahead"
    num_threads = 0


DrafterConfig = (
    LookupConfig
    | PredictionConfig
    | SuffixConfig
    | DatastoreConfig
    | ModelConfig
    | EagleConfig
    | MedusaConfig
    | MaskConfig
    | LayerSkipConfig
    | EarlyExitConfig
    | JacobiConfig
    | LookaheadConfig
    | CustomConfig
)

WeightedConfig = ModelConfig | EagleConfig | MedusaConfig | MaskConfig | EarlyExitConfig
"""Drafters whose weights can be reloaded."""


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One draft worker and its drafters; `target` is the reference of the model that they draft for."""

    drafters: tuple[DrafterConfig, ...]
    target: str
