"""The files of a datastore, and what it says about itself.

A folder holds `datastore.json`; `tokens.npy`, all texts one after the other, a separator behind each; and
`suffixes.npy`, the positions of all tokens, sorted by the SORTED tokens from there on. Tokens are big-endian,
so that their bytes are in the order of their numbers.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

DESCRIPTION: Final = "datastore.json"
TOKENS: Final = "tokens.npy"
SUFFIXES: Final = "suffixes.npy"
SORTED: Final = 32
"""Tokens by which positions are sorted: a match and what is proposed behind it."""

_FORMAT: Final = 1


def separator(token_bytes: int) -> int:
    """What ends a text, where tokens have so many bytes: more than any token."""
    return (1 << 8 * token_bytes) - 1


class DatastoreError(ValueError):
    """A folder holds no usable datastore; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a datastore says about itself; `num_tokens` counts separators, too."""

    vocabulary_fingerprint: str
    num_tokens: int
    num_texts: int
    format: int = _FORMAT

    def write(self, folder: Path) -> None:
        """Write it to a folder."""
        (folder / DESCRIPTION).write_text(json.dumps(asdict(self), indent=2) + "\n")


def describe(folder: Path) -> Description:
    """What the datastore in a folder says about itself. Raises DatastoreError if there is none."""
    advice = "build one with python -m workers.datastore build"
    try:
        described = Description(**json.loads((folder / DESCRIPTION).read_text()))
    except OSError as error:
        raise DatastoreError(f"{folder} holds no datastore: {advice}") from error
    except (TypeError, ValueError) as error:
        raise DatastoreError(f"{folder / DESCRIPTION} is broken: {advice}") from error
    if described.format != _FORMAT:
        raise DatastoreError(
            f"{folder} has format {described.format}, this version reads {_FORMAT}: {advice}"
        )
    for name in (TOKENS, SUFFIXES):
        if not (folder / name).is_file():
            raise DatastoreError(f"{folder} lacks {name}: {advice}")
    return described


def check_vocabulary(folder: Path, fingerprint: str) -> Description:
    """What the datastore says, if it is of this vocabulary. Raises DatastoreError else."""
    described = describe(folder)
    if described.vocabulary_fingerprint != fingerprint:
        raise DatastoreError(
            f"{folder} was built with another vocabulary than the target's: build one with "
            "python -m workers.datastore build, --tokenizer being the target's model"
        )
    return described
