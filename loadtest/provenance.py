"""Where a result came from: stands beside every number that is kept."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("ray", "torch", "transformers", "grpcio")


def provenance() -> dict[str, Any]:
    """Command line, commit, versions, processor, date."""
    return {
        "argv": sys.argv,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    result = subprocess.run(command, capture_output=True, text=True, cwd=here, check=False)
    return result.stdout.strip() or "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
