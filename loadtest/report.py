"""What a measurement leaves behind: a table, the numbers, and where they came from."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.provenance import provenance


def write(folder: Path, name: str, table: str, rows: Sequence[Any], **more: Any) -> None:
    """Write NAME.md and NAME.json (the rows are dataclasses), and print the table and what was written."""
    (folder / f"{name}.md").write_text(table)
    result = {"provenance": provenance(), **more, "rows": [asdict(row) for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1))
    print(table)
    print("written: " + ", ".join(str(path) for path in sorted(folder.glob(f"{name}.*"))))
