"""From token ids to text, token by token, and where a stop string ends it."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tokenizers import Tokenizer

_REPLACEMENT: Final = "�"
_CONTEXT_TOKENS: Final = 6
# A character has at most four bytes, so after this many undecodable tokens some never become text.
_MAX_PENDING: Final = 8


class Detokenizer:
    """Text of a growing sequence of tokens.

    `add` returns the text that a token completes: nothing while a character is only partly there. The
    pieces, with `flush` at the end, add up to the text of all tokens. Special tokens have no text unless
    they are shown.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int], show_special_tokens: bool = False
    ) -> None:
        """`context` are the tokens before: what text a token stands for can depend on them."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = not show_special_tokens
        for size in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_PENDING):
            self._ids = list(context[-size:])
            # A window that begins inside a character would spoil the bytes after it.
            if not self._decode().startswith(_REPLACEMENT):
                break
        self._read = len(self._ids)
        self._emitted = len(self._decode())

    def add(self, token: int) -> str:
        """Text that this token completes."""
        self._ids.append(token)
        text = self._decode()
        if not text.endswith(_REPLACEMENT):
            return self._advance(text)
        if len(self._ids) - self._read < _MAX_PENDING:
            return ""
        # Not a character in the making any more; only the last one may still be.
        complete = text[:-1]
        new, self._emitted = complete[self._emitted :], max(self._emitted, len(complete))
        return new

    def flush(self) -> str:
        """What is left at the end; incomplete characters become U+FFFD."""
        return self._advance(self._decode())

    def _advance(self, text: str) -> str:
        new = text[self._emitted :]
        if new:
            # The last piece that has text stays as context for the next one.
            del self._ids[: self._read]
            self._emitted = len(self._decode())
        self._read = len(self._ids)
        return new

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens))


@dataclass(slots=True)
class StopStrings:
    """Finds the first stop string in growing text.

    `add` returns the text that can be shown: what could still become a stop string is held back.
    `found` is the stop string that ended the text, if one did; it is cut from the text unless `include`.
    """

    strings: tuple[str, ...]
    include: bool = False
    found: str | None = field(default=None, init=False)
    held_back: str = field(default="", init=False)

    def add(self, text: str) -> str:
        """Append text; returns what can be shown. After a stop string was found, nothing more is."""
        if self.found is not None:
            return ""
        if not self.strings:
            return text
        text = self.held_back + text
        hits = [(at, string) for string in self.strings if (at := text.find(string)) >= 0]
        if hits:
            at, self.found = min(hits)
            self.held_back = ""
            return text[: at + len(self.found) * self.include]
        keep = max(self._overlap(text, string) for string in self.strings)
        self.held_back = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once the text cannot grow any more."""
        text, self.held_back = self.held_back, ""
        return text

    @staticmethod
    def _overlap(text: str, string: str) -> int:
        """Length of the longest end of `text` that begins `string`."""
        for length in range(min(len(text), len(string) - 1), 0, -1):
            if string.startswith(text[len(text) - length :]):
                return length
        return 0


_BLOCK: Final = "▁"


class TokenBytes:
    """The bytes that single tokens of a tokenizer stand for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"], ensure_ascii=False)
        self._byte_level = '"ByteLevel"' in decoder
        self._spaces_as_blocks = _BLOCK in decoder

    def of(self, token: int) -> bytes:
        """The bytes of one token, also where they are part of a character."""
        name = self._tokenizer.id_to_token(token) or ""
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
            return bytes.fromhex(name[3:5])
        if self._byte_level and all(char in _BYTE_OF for char in name):
            return bytes(_BYTE_OF[char] for char in name)
        if self._spaces_as_blocks:
            # Decoded alone, a word would lose the space before it.
            return name.replace(_BLOCK, " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _byte_of() -> dict[str, int]:
    """The characters with which byte-level BPE writes bytes (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = _byte_of()
