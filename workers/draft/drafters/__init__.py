"""From the configuration of a drafter to the drafter."""

from workers import checkpoint
from workers.draft.config import DrafterConfig, LookupConfig, ModelConfig
from workers.draft.drafter import Drafter
from workers.draft.drafters.lookup import LookupDrafter


def make(config: DrafterConfig, target: str) -> Drafter:
    """The drafter of a config, for the model of this reference.

    Raises ValueError if it cannot draft for it, and what loading a model raises.
    """
    match config:
        case LookupConfig():
            return LookupDrafter()
        case ModelConfig():
            return _model_drafter(config, target)


def _model_drafter(config: ModelConfig, target: str) -> Drafter:
    from transformers import AutoTokenizer

    from workers.draft import models
    from workers.draft.drafters.model import ModelDrafter
    from workers.vocabulary import vocabulary_fingerprint

    draft = models.load(
        config.model, config.dtype, config.device, target if config.shared_vocabulary else None
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.resolve(target)).backend_tokenizer
    if draft.vocabulary_fingerprint != vocabulary_fingerprint(tokenizer):
        raise ValueError(
            f"drafter {config.name!r}: its model has a vocabulary of {draft.model.info.vocab_size} "
            f"tokens, the target one of {tokenizer.get_vocab_size()}, and they differ; give a draft "
            "with the target's tokenizer, or set vocabulary: shared to draft what both have"
        )
    return ModelDrafter(draft, config.num_slots, config.width, config.steps, config.floor)
