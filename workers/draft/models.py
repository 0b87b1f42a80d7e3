"""Draft models: a model, the vocabulary that it guesses in, and the target's tokens as it reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer

from workers import checkpoint
from workers.draft import cut
from workers.engine.loading import load_module, wrap
from workers.engine.model import Model
from workers.vocabulary import SharedVocabulary, vocabulary_fingerprint


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model in the target's terms.

    `ids` int32 are the target's ids of what it guesses, None where they are the columns of its logits;
    `columns` are the logits that have one, None for all. `shared` translates the target's tokens if the
    draft has another tokenizer.
    """

    model: Model
    vocabulary_fingerprint: str
    ids: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    shared: SharedVocabulary | None = None

    def encode(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens as this model reads them."""
        return list(tokens) if self.shared is None else self.shared.to_draft(tokens)

    def guesses(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [rows, columns] of what can be guessed, float32."""
        return logits if self.columns is None else logits[:, self.columns].contiguous()


def load(reference: str, dtype: str, device: str, target: str | None) -> DraftModel:
    """Load a draft model: a whole model, or one that is cut from a target (see workers.draft.cut).

    `target` is the target's reference where the draft has another tokenizer: what both vocabularies share
    is then guessed. Raises CheckpointError, UnsupportedModel or SelfCheckError.
    """
    folder = checkpoint.resolve(reference)
    if target is None or cut.is_cut(folder):
        return wrap_draft(reference, *load_draft_module(reference, dtype, device))
    model = wrap(load_module(folder, dtype, device), folder.name)
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    theirs = AutoTokenizer.from_pretrained(checkpoint.resolve(target)).backend_tokenizer
    shared = SharedVocabulary(theirs, tokenizer)
    return DraftModel(
        model,
        vocabulary_fingerprint(theirs),
        ids=torch.tensor(shared.target_ids, dtype=torch.int32),
        columns=torch.tensor(shared.draft_ids),
        shared=shared,
    )


def load_draft_module(reference: str, dtype: str, device: str) -> tuple[Any, torch.Tensor | None]:
    """A draft as one of transformers' models, and the target's ids of what it guesses if it is cut."""
    folder = checkpoint.resolve(reference)
    if cut.is_cut(folder):
        return cut.load_cut_module(folder, dtype, device)
    return load_module(folder, dtype, device), None


def wrap_draft(reference: str, module: Any, ids: torch.Tensor | None) -> DraftModel:
    """The draft model of what `load_draft_module` has loaded."""
    folder = checkpoint.resolve(reference)
    if ids is not None:
        made = cut.wrap_cut(folder, module, ids)
        return DraftModel(made.model, made.vocabulary_fingerprint, made.ids)
    tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    return DraftModel(wrap(module, folder.name), vocabulary_fingerprint(tokenizer))
