"""What a checkpoint was made from, so that it can be made again."""

import hashlib
import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

RECIPE: Final = "recipe.json"
_PACKAGES: Final = ("torch", "transformers", "numpy", "safetensors")


def write_recipe(
    folder: Path,
    options: dict[str, Any],
    corpus: dict[str, Any],
    trained_parameters: int,
    curve: list[dict[str, Any]],
) -> None:
    """Write recipe.json beside a checkpoint's weights; of paths only names are kept."""
    content = {
        "options": {name: _told(value) for name, value in options.items()},
        "commit": _commit(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in _PACKAGES},
        "device": _device(),
        "corpus": corpus,
        "trained_parameters": trained_parameters,
        "curve": curve,
    }
    (folder / RECIPE).write_text(json.dumps(content, indent=1) + "\n")


def _told(value: Any) -> Any:
    if isinstance(value, Path):
        return value.name
    return [_told(part) for part in value] if isinstance(value, list) else value


def file_digest(file: Path) -> str:
    """The SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _commit() -> str:
    """The commit of the working tree, with + behind it if files differ from it; empty without git."""
    folder = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ("+" if changed else "")


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
