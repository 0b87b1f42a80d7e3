"""A container's limit counts as much as the machine's memory."""

from pathlib import Path

import psutil
import pytest

from workers.memory import available_bytes

MIB = 2**20


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_less_what_is_taken(tmp_path: Path, version: int) -> None:
    """Cached files are not taken: the kernel drops them."""
    if version == 2:
        files = {"memory__max": 100 * MIB, "memory__current": 70 * MIB}
        statistics = f"anon 5\ninactive_file {30 * MIB}"
        write(tmp_path, **{k: str(v) for k, v in files.items()}, memory__stat=statistics)
    else:
        files = {"memory__limit_in_bytes": 100 * MIB, "memory__usage_in_bytes": 70 * MIB}
        statistics = f"inactive_file 1\ntotal_inactive_file {30 * MIB}"
        write(tmp_path / "memory", **{k: str(v) for k, v in files.items()}, memory__stat=statistics)
    assert available_bytes(tmp_path) == 60 * MIB


def test_no_limit_is_the_machines(tmp_path: Path) -> None:
    write(tmp_path, memory__max="max", memory__current="5")
    machine = psutil.virtual_memory().available
    assert available_bytes(tmp_path) == pytest.approx(machine, rel=0.05)
    assert available_bytes(tmp_path / "nothing") == pytest.approx(machine, rel=0.05)
