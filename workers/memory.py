"""How much memory this process can still have."""

from pathlib import Path
from typing import Final

import psutil

_CGROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes(cgroups: Path = _CGROUPS) -> int:
    """What the machine has left, or the container if its limit leaves less.

    Files that the kernel keeps in memory until somebody needs it count as free, as they do for the machine.
    """
    left = psutil.virtual_memory().available
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        text = _read(cgroups / limit)
        if text.isdecimal():
            statistics = dict(
                line.split()
                for line in _read((cgroups / limit).parent / "memory.stat").splitlines()
            )
            taken = int(_read(cgroups / used)) - int(statistics.get(cached, 0))
            left = min(left, max(0, int(text) - taken))
    return left


def _read(path: Path) -> str:
    """A file's text; empty where there is none."""
    return path.read_text().strip() if path.is_file() else ""
