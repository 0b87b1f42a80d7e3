"""From the configuration of a drafter to the drafter."""

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from workers import checkpoint
from workers.draft.config import (
    CustomConfig,
    DatastoreConfig,
    DrafterConfig,
    EagleConfig,
    EarlyExitConfig,
    JacobiConfig,
    LayerSkipConfig,
    LookaheadConfig,
    LookupConfig,
    MaskConfig,
    MedusaConfig,
    ModelConfig,
    PredictionConfig,
    SuffixConfig,
)
from workers.draft.drafter import Drafter
from workers.draft.drafters import custom
from workers.draft.drafters.jacobi import JacobiDrafter
from workers.draft.drafters.lookahead import LookaheadDrafter
from workers.draft.drafters.lookup import LookupDrafter
from workers.draft.drafters.prediction import PredictionDrafter
from workers.draft.drafters.suffix import SuffixDrafter
from workers.draft.history import History
from workers.vocabulary import fingerprint_of, vocabulary_fingerprint

if TYPE_CHECKING:
    # A worker whose drafters have no model needs no torch.
    from workers.draft.models import DraftModel
    from workers.engine.model import Model


def make(config: DrafterConfig, target: str, host: "Model | None" = None) -> Drafter:
    """The drafter of a config, for the model of this reference, warmed up.

    `host` is that model itself, where it is whole and in this process: some kinds draft with its layers.
    Raises ValueError if it cannot draft for it, and what loading a model raises.
    """
    made: Drafter
    match config:
        case LookupConfig():
            made = LookupDrafter()
        case PredictionConfig():
            made = PredictionDrafter()
        case SuffixConfig():
            made = SuffixDrafter(_history(config))
        case DatastoreConfig():
            made = _datastore_drafter(config, target)
        case ModelConfig():
            made = _model_drafter(config, target)
        case EagleConfig():
            made = _eagle_drafter(config, target)
        case LayerSkipConfig():
            made = _layer_skip_drafter(config, target, _whole(config, host))
        case EarlyExitConfig():
            made = _early_exit_drafter(config, target, _whole(config, host))
        case JacobiConfig():
            made = JacobiDrafter(config.block)
        case LookaheadConfig():
            made = LookaheadDrafter(config.window, config.ngram, config.guesses)
        case MedusaConfig():
            made = _medusa_drafter(config, target)
        case MaskConfig():
            made = _mask_drafter(config, target)
        case CustomConfig():
            made = custom.make(config, target)
    made.number = zlib.crc32(config.name.encode())
    made.warm_up()
    return made


def _history(config: SuffixConfig | DatastoreConfig) -> History | None:
    return History(config.history_tokens) if config.learn else None


def _datastore_drafter(config: DatastoreConfig, target: str) -> Drafter:
    from workers.datastore.index import Datastore
    from workers.draft.drafters.datastore import DatastoreDrafter

    fingerprint = fingerprint_of(checkpoint.resolve(target))
    store = Datastore(Path(config.folder).expanduser(), fingerprint)
    return DatastoreDrafter(store, fingerprint, _history(config))


def _model_drafter(config: ModelConfig, target: str) -> Drafter:
    from workers.draft import models
    from workers.draft.drafters.model import ModelDrafter

    if config.online:
        return _online_drafter(config, target)
    draft = models.load(
        config.model, config.dtype, config.device, target if config.shared_vocabulary else None
    )
    _check_vocabulary(config, draft, target)
    return ModelDrafter(draft, config.num_slots, config.width, config.steps, config.floor)


def _online_drafter(config: ModelConfig, target: str) -> Drafter:
    from workers.draft import models, updates
    from workers.draft.drafters.online import OnlineDrafter
    from workers.draft.learner import ProcessLearner

    module, ids = models.load_draft_module(config.model, config.dtype, config.device)
    if config.shared_vocabulary or not updates.learnable(module):
        why = "has another tokenizer" if config.shared_vocabulary else "has no linear layers"
        raise ValueError(f"drafter {config.name!r} cannot learn: its model {why}; leave out online")
    draft = models.wrap_draft(config.model, updates.updated(module, {}), ids)
    _check_vocabulary(config, draft, target)
    learner = ProcessLearner(config.model, module, draft.model)
    tree = (config.num_slots, config.width, config.steps, config.floor)
    return OnlineDrafter(draft, learner, *tree)


def _check_vocabulary(config: ModelConfig, draft: "DraftModel", target: str) -> None:
    tokenizer = _tokenizer(target)
    if draft.vocabulary_fingerprint != vocabulary_fingerprint(tokenizer):
        raise ValueError(
            f"drafter {config.name!r}: its model has a vocabulary of {draft.model.info.vocab_size} "
            f"tokens, the target one of {tokenizer.get_vocab_size()}, and they differ; give a draft "
            "with the target's tokenizer, or set vocabulary: shared to draft what both have"
        )


def _eagle_drafter(config: EagleConfig, target: str) -> Drafter:
    import torch

    from workers.draft.drafters.eagle import EagleDrafter
    from workers.draft.eagle import load_head
    from workers.draft.head_runner import HeadRunner
    from workers.engine.loading import resolve_dtype

    head = load_head(checkpoint.resolve(config.model), checkpoint.resolve(target))
    dtype = resolve_dtype(config.dtype, torch.device(config.device))
    return EagleDrafter(
        HeadRunner(head, dtype, config.device, config.window),
        vocabulary_fingerprint(_tokenizer(target)),
        config.num_slots,
        config.window,
        config.width,
        config.steps,
        config.floor,
    )


def _layer_skip_drafter(config: LayerSkipConfig, target: str, host: "Model") -> Drafter:
    from workers.draft import skips
    from workers.draft.drafters.layer_skip import LayerSkipDrafter

    if config.skip is None:
        skip = skips.every_second(host.num_layers)
    else:
        skip = skips.load(config.skip) if isinstance(config.skip, str) else config.skip
    skips.check(config.name, skip, host.num_layers)
    return LayerSkipDrafter(
        host,
        vocabulary_fingerprint(_tokenizer(target)),
        skip,
        config.online,
        config.num_slots,
        config.width,
        config.steps,
        config.floor,
    )


def _early_exit_drafter(config: EarlyExitConfig, target: str, host: "Model") -> Drafter:
    from workers.draft import exits
    from workers.draft.drafters.model import ModelDrafter
    from workers.draft.models import DraftModel

    if config.model is None:
        assert config.layers is not None
        layers, ending = config.layers, None
    else:
        adapter = exits.load(checkpoint.resolve(config.model), checkpoint.resolve(target), host)
        layers, ending = adapter.layers, adapter.ending
    if not 0 < layers < host.num_layers:
        raise ValueError(
            f"drafter {config.name!r} exits behind {layers} layers, but the target has {host.num_layers}: "
            f"give 1 to {host.num_layers - 1}"
        )
    draft = DraftModel(host.part(range(layers), ending), vocabulary_fingerprint(_tokenizer(target)))
    return ModelDrafter(draft, config.num_slots, config.width, config.steps, config.floor)


def _whole(config: DrafterConfig, host: "Model | None") -> "Model":
    if host is None:
        raise ValueError(
            f"drafter {config.name!r} drafts with the target's own layers: it needs placement: target, and "
            "a target that is not split (tensor_parallel_size: 1)"
        )
    return host


def _medusa_drafter(config: MedusaConfig, target: str) -> Drafter:
    import torch

    from workers.draft.drafters.medusa import MedusaDrafter
    from workers.draft.levels import Accuracies
    from workers.draft.medusa import load_heads
    from workers.engine.loading import resolve_dtype

    folder = checkpoint.resolve(config.model)
    heads = load_heads(folder, checkpoint.resolve(target))
    return MedusaDrafter(
        heads,
        resolve_dtype(config.dtype, torch.device(config.device)),
        config.device,
        vocabulary_fingerprint(_tokenizer(target)),
        Accuracies.load(folder, len(heads.heads)),
    )


def _mask_drafter(config: MaskConfig, target: str) -> Drafter:
    from workers.draft.drafters.mask import MaskDrafter
    from workers.draft.levels import Accuracies
    from workers.draft.masks import load_masked

    folder = checkpoint.resolve(config.model)
    masked = load_masked(folder, config.dtype, config.device)
    if masked.draft.vocabulary_fingerprint != vocabulary_fingerprint(_tokenizer(target)):
        raise ValueError(
            f"drafter {config.name!r}: it was cut from a model with another vocabulary than the target's; "
            "train one for this target (python -m workers.training mask)"
        )
    accuracies = Accuracies.load(folder, 1 + len(masked.masks))
    return MaskDrafter(masked, config.num_slots, accuracies)


def _tokenizer(target: str) -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
        checkpoint.resolve(target)
    ).backend_tokenizer
    return tokenizer
