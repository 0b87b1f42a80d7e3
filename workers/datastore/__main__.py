"""Build a datastore, which a drafter of kind `datastore` searches.

    python -m workers.datastore build --tokenizer MODEL --corpus FILE... --out FOLDER

MODEL is the target's reference. Corpus files are .jsonl (a string a line, or an object with a `text`), .npz
(what `python -m workers.training data` records) or plain text. Building takes about 50 bytes of memory a
token.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tqdm import tqdm

from workers import checkpoint
from workers.datastore import files
from workers.datastore.corpus import read
from workers.datastore.suffix_array import suffix_array
from workers.vocabulary import vocabulary_fingerprint


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        from transformers import AutoTokenizer

        folder = checkpoint.resolve(options.tokenizer)
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
        made = build(tokenizer, options.corpus, options.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {made.num_tokens} tokens of {made.num_texts} texts")
    return 0


def build(tokenizer: Tokenizer, corpus: Sequence[Path], out: Path) -> files.Description:
    """Write the datastore of some files to a folder. Raises ValueError or OSError."""
    if (out / files.DESCRIPTION).exists():
        raise ValueError(f"{out} holds a datastore already: give another folder")
    tokens, num_texts = _tokens(tokenizer, corpus)
    rounds = int(math.log2(files.SORTED)) + 1
    with tqdm(total=rounds, desc="sorting", unit="round") as bar:
        suffixes = suffix_array(tokens, files.SORTED, bar.update)
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / files.TOKENS, tokens)
    np.save(out / files.SUFFIXES, suffixes)
    made = files.Description(vocabulary_fingerprint(tokenizer), len(tokens), num_texts)
    # Last: a folder with a description is a whole datastore.
    made.write(out)
    return made


def _tokens(tokenizer: Tokenizer, corpus: Sequence[Path]) -> tuple[npt.NDArray[Any], int]:
    """All texts, a separator behind each, and how many they are."""
    largest = max(tokenizer.get_vocab().values())
    dtype = np.dtype(">u2" if largest < files.separator(2) else ">u4")
    separator = np.array([files.separator(dtype.itemsize)], dtype)
    pieces = []
    total = sum(file.stat().st_size for file in corpus)
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True) as bar:
        for file in corpus:
            for text in read(file, tokenizer, bar.update):
                if len(text) and text.max() > largest:
                    raise ValueError(
                        f"{file} has token {text.max()}, the vocabulary ends at {largest}: it was "
                        "recorded with another model"
                    )
                pieces += [text.astype(dtype), separator]
    if not pieces:
        raise ValueError(f"no text in {', '.join(map(str, corpus))}")
    # Said again: joined arrays are else of the machine's own byte order.
    return np.concatenate(pieces, dtype=dtype), len(pieces) // 2


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m workers.datastore",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command = parser.add_subparsers(required=True).add_parser("build", help="build a datastore")
    command.add_argument("--tokenizer", required=True, help="the target's model reference")
    command.add_argument("--corpus", required=True, type=Path, nargs="+", help="files of texts")
    command.add_argument("--out", required=True, type=Path, help="a new folder")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
