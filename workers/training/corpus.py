"""Training text: token ids of prompts and of what the target answered.

A corpus file is an .npz with `prompt_ids`, `prompt_offsets`, `output_ids`, `output_offsets` (row i is
`ids[offsets[i]:offsets[i + 1]]`) and `temperature` per row, as `data` writes it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

DRAFT_VOCABULARY: Final = 16384
"""Tokens that a draft can guess, where nothing else is said."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Text:
    """One conversation: `tokens` hold the prompt and, from `answer_from` on, the answer."""

    tokens: Ids
    answer_from: int


class Corpus:
    """The texts of some corpus files, at most `max_length` tokens each, in an order that mixes the files."""

    def __init__(self, files: Sequence[Path], max_length: int) -> None:
        self._texts: list[Text] = []
        for file in files:
            with np.load(file) as content:
                self._texts += _texts(content, max_length)
        if not self._texts:
            raise ValueError(f"no text in {', '.join(map(str, files))}")
        order = np.random.default_rng(0).permutation(len(self._texts))
        self._texts = [self._texts[index] for index in order]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Text:
        return self._texts[index]

    def digest(self) -> str:
        """A hash of all texts in their order."""
        digest = hashlib.sha256()
        for text in self._texts:
            digest.update(text.tokens.tobytes())
        return digest.hexdigest()[:16]

    def counts(self, vocab_size: int) -> Ids:
        """How often each token occurs in answers: int64 [V]."""
        counts = np.zeros(vocab_size, np.int64)
        for text in self._texts:
            counts += np.bincount(text.tokens[text.answer_from :], minlength=vocab_size)
        return counts


def epochs(texts: range, seed: int, skip: int) -> Iterator[int]:
    """Texts for ever, shuffled anew each epoch; the first `skip` are left out, to resume there."""
    epoch, skipped = 0, skip
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(texts)
        yield from (int(text) for text in order[min(skipped, len(order)) :])
        skipped = max(0, skipped - len(order))
        epoch += 1


def draft_vocabulary(counts: Ids, size: int) -> Ids:
    """The `size` most frequent tokens, ascending; of equal ones the smaller id."""
    chosen: Ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    return chosen


def _texts(content: Any, max_length: int) -> Iterator[Text]:
    prompts, prompt_ends = content["prompt_ids"], content["prompt_offsets"]
    outputs, output_ends = content["output_ids"], content["output_offsets"]
    for row in range(len(prompt_ends) - 1):
        prompt = prompts[prompt_ends[row] : prompt_ends[row + 1]]
        output = outputs[output_ends[row] : output_ends[row + 1]]
        tokens = np.concatenate([prompt, output]).astype(np.int64)[:max_length]
        if len(prompt) < len(tokens):
            yield Text(tokens, len(prompt))
