"""Sets of layers that a draft leaves out: where they come from, and whether they fit a model.

A file of `python -m workers.training skip_search` is JSON with `format` and `skip`, a list of layers from 0.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 1


def every_second(num_layers: int) -> tuple[int, ...]:
    """Every second inner layer: where SWIFT begins (arXiv 2410.06916)."""
    return tuple(range(2, num_layers - 1, 2))


def kept(skip: Iterable[int], num_layers: int) -> list[int]:
    """The layers that are left, ascending."""
    left_out = set(skip)
    return [layer for layer in range(num_layers) if layer not in left_out]


def load(file: str) -> tuple[int, ...]:
    """The set in a file that the search has written; raises ValueError if there is none."""
    try:
        content = json.loads(Path(file).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']}; this release reads {FORMAT}")
        return tuple(int(layer) for layer in content["skip"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"skip: {file} is no set of layers that can be read: {error!r}") from error


def save(file: Path, skip: Sequence[int], found: dict[str, Any]) -> None:
    """Write a set, and what was found about it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"format": FORMAT, "skip": sorted(skip), **found}, indent=1) + "\n")


def check(drafter: str, skip: Sequence[int], num_layers: int) -> None:
    """Raise ValueError unless the target has these layers, each is named once, and one is left."""
    wrong = sorted(layer for layer in skip if not 0 <= layer < num_layers)
    if wrong:
        raise ValueError(
            f"drafter {drafter!r}: skip names layers {wrong}, but the target has {num_layers}, from 0 to "
            f"{num_layers - 1}"
        )
    if len(set(skip)) < len(skip):
        raise ValueError(f"drafter {drafter!r}: skip names a layer twice: {sorted(skip)}")
    if len(skip) == num_layers:
        raise ValueError(f"drafter {drafter!r}: skip leaves none of the {num_layers} layers")
