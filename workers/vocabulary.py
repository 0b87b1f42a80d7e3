"""Vocabularies: whether two are the same, and what two different ones share."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from workers.text import TokenBytes

_BYTE: Final = re.compile("<0x[0-9A-F]{2}>")


def vocabulary_fingerprint(tokenizer: Tokenizer) -> str:
    """A hash over the map from ids to tokens."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index} {token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def fingerprint_of(folder: Path) -> str:
    """The fingerprint of the vocabulary of the model in a folder."""
    from transformers import AutoTokenizer

    return vocabulary_fingerprint(AutoTokenizer.from_pretrained(folder).backend_tokenizer)


class SharedVocabulary:
    """Tokens that a target and a draft of another tokenizer both have: those of the same bytes.

    Token-level intersection, as in Timor et al., arXiv 2502.05202. `draft_ids` and `target_ids` are
    parallel, ascending by draft id.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target_bytes = TokenBytes(target)
        draft_bytes = TokenBytes(draft)
        # Special tokens have no bytes of their own; they are shared by name.
        special = {added.content for added in target.get_added_tokens_decoder().values()}
        by_bytes = {
            self._target_bytes.of(index): index
            for token, index in sorted(target.get_vocab().items(), key=lambda item: -item[1])
            if token not in special
        }
        names = target.get_vocab()
        draft_special = {added.content for added in draft.get_added_tokens_decoder().values()}
        # Where a byte has a token of its own and one for spelling, a draft writes the first.
        ordered = sorted(
            draft.get_vocab().items(), key=lambda item: (bool(_BYTE.fullmatch(item[0])), item[1])
        )
        self._of_target: dict[int, int] = {}
        self._spelling: dict[bytes, int] = {}
        for token, index in ordered:
            if token in draft_special:
                shared = names.get(token)
            else:
                self._spelling.setdefault(draft_bytes.of(index), index)
                shared = by_bytes.get(draft_bytes.of(index))
            if shared is not None:
                self._of_target.setdefault(shared, index)
        pairs = sorted((index, shared) for shared, index in self._of_target.items())
        self.draft_ids = [draft_id for draft_id, _ in pairs]
        self.target_ids = [target_id for _, target_id in pairs]
        self._longest = max(map(len, self._spelling), default=0)

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens in the draft's vocabulary; what it lacks is spelt in its longest tokens."""
        written: list[int] = []
        for token in tokens:
            shared = self._of_target.get(token)
            if shared is not None:
                written.append(shared)
                continue
            written += self._spell(self._target_bytes.of(token))
        return written

    def _spell(self, text: bytes) -> list[int]:
        """Bytes in the draft's tokens; its tokenizer would see words where a token of the target ends."""
        written = []
        while text:
            size = next(
                (
                    n
                    for n in range(min(self._longest, len(text)), 0, -1)
                    if text[:n] in self._spelling
                ),
                0,
            )
            if size:
                written.append(self._spelling[text[:size]])
            # A byte that no token of the draft has is left out.
            text = text[max(1, size) :]
        return written
