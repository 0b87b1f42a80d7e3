"""Vocabularies: whether two are the same, and what two different ones share."""

import hashlib
from collections.abc import Sequence

from tokenizers import Tokenizer

from workers.text import TokenBytes


def vocabulary_fingerprint(tokenizer: Tokenizer) -> str:
    """A hash over the map from ids to tokens."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{index} {token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


class SharedVocabulary:
    """Tokens that a target and a draft of another tokenizer both have: those of the same bytes.

    Token-level intersection, as in Timor et al., arXiv 2502.05202. `draft_ids` and `target_ids` are
    parallel, ascending by draft id.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._target_bytes = TokenBytes(target)
        self._draft = draft
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
        pairs = []
        for token, index in sorted(draft.get_vocab().items(), key=lambda item: item[1]):
            shared = (
                names.get(token) if token in draft_special else by_bytes.get(draft_bytes.of(index))
            )
            if shared is not None:
                pairs.append((index, shared))
        self.draft_ids = [draft_id for draft_id, _ in pairs]
        self.target_ids = [target_id for _, target_id in pairs]
        self._of_target = {target_id: draft_id for draft_id, target_id in reversed(pairs)}

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens in the draft's vocabulary; what it lacks is spelt in its own tokens."""
        written: list[int] = []
        for token in tokens:
            shared = self._of_target.get(token)
            if shared is not None:
                written.append(shared)
                continue
            text = self._target_bytes.of(token).decode(errors="replace")
            written += self._draft.encode(text, add_special_tokens=False).ids
        return written
