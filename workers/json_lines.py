"""Files of JSON lines, as users write them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each object with the number of its line, from 1; empty lines are left out.

    Raises ValueError for a line that is no object.
    """
    # Only "\n" ends a line: JSON may hold U+2028 and the like as they are.
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number} is no JSON object")
        yield number, row
