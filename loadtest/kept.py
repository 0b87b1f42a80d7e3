"""Results that outlive a run that is broken off: one JSON object a line, behind one of the run's options."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """The results so far, dataclasses of one kind; their lists come back as tuples."""

    def __init__(self, file: Path, kind: type[T], options: dict[str, Any]) -> None:
        """Ends the process, with status 2 and the reason, if the file is of a run with other options."""
        self.items: list[T] = []
        self._file = file
        self._kind = kind
        if not file.exists():
            file.write_text(json.dumps(options) + "\n")
            return
        first, *lines = file.read_text().splitlines()
        if json.loads(first) != json.loads(json.dumps(options)):
            reason = f"{file} is of another run, {first}: remove it or take another --out"
            print(f"error: {reason}", file=sys.stderr)
            sys.exit(2)
        self.items = [self._read(line) for line in lines]

    def add(self, item: T) -> None:
        """Keep a result."""
        line = json.dumps(asdict(item))  # type: ignore[call-overload]
        with self._file.open("a") as stream:
            stream.write(line + "\n")
        self.items.append(self._read(line))

    def _read(self, line: str) -> T:
        fields = json.loads(line)
        return self._kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
