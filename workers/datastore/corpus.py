"""What datastores are built from: texts, or tokens that a model was recorded with."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Ids = npt.NDArray[np.int64]

_BATCH: Final = 256
_PIECE_BYTES: Final = 1 << 18


def read(file: Path, tokenizer: Tokenizer, progress: Callable[[int], object]) -> Iterator[Ids]:
    """The texts of a file, as tokens; `progress` gets numbers of bytes read, all of the file's in the end.

    An .npz file is one of recorded tokens (see workers.training.corpus) and its rows are texts; a .jsonl file
    has a text a line, a string or an object with a string `text`; any other is plain text, read in pieces.
    Raises ValueError for what is none of these.
    """
    if file.suffix == ".npz":
        yield from _recorded(file)
        progress(file.stat().st_size)
        return
    texts = _lines(file) if file.suffix == ".jsonl" else _pieces(file)
    while batch := list(islice(texts, _BATCH)):
        written = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        for text in written:
            yield np.array(text.ids, np.int64)
        progress(sum(size for _, size in batch))


def _recorded(file: Path) -> Iterator[Ids]:
    with np.load(file) as content:
        missing = {"prompt_ids", "prompt_offsets", "output_ids", "output_offsets"} - set(content)
        if missing:
            raise ValueError(f"{file} holds no recorded tokens: it lacks {', '.join(missing)}")
        rows = zip(_rows(content, "prompt"), _rows(content, "output"), strict=True)
        for prompt, output in rows:
            yield np.concatenate([prompt, output]).astype(np.int64)


def _rows(content: Any, part: str) -> Iterator[npt.NDArray[Any]]:
    ids, offsets = content[f"{part}_ids"], content[f"{part}_offsets"]
    for row in range(len(offsets) - 1):
        yield ids[offsets[row] : offsets[row + 1]]


def _lines(file: Path) -> Iterator[tuple[str, int]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                content = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}:{number} is no JSON: {error}") from error
            text = content.get("text") if isinstance(content, dict) else content
            if not isinstance(text, str):
                raise ValueError(f"{file}:{number} has no text: a string, or a string `text`")
            yield text, len(line)


def _pieces(file: Path) -> Iterator[tuple[str, int]]:
    with file.open("rb") as stream:
        while lines := stream.readlines(_PIECE_BYTES):
            piece = b"".join(lines)
            yield piece.decode(), len(piece)
