"""Where what is made once is kept: $SLIPSTREAM_CACHE, or ~/.cache/slipstream."""

import os
from pathlib import Path


def cache_dir(kind: str) -> Path:
    """The folder for one kind of thing, created if it is not there."""
    root = os.environ.get("SLIPSTREAM_CACHE") or Path.home() / ".cache" / "slipstream"
    path = Path(root) / kind
    path.mkdir(parents=True, exist_ok=True)
    return path
