"""The native CPU library: built from the C files here when first needed, and called through ctypes.

It is compiled for the processor at hand and kept in the cache folder under a hash of sources, flags and
processor, so a start after the first builds nothing.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from workers.cache import cache_dir

logger = logging.getLogger(__name__)

_FOLDER: Final = Path(__file__).parent
_FLAGS: Final = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-pthread",
    "-shared",
    "-fPIC",
    "-Wno-psabi",
)


class BuildError(RuntimeError):
    """The library could not be built; the message says why."""


@cache
def library() -> ctypes.CDLL:
    """The loaded library; raises BuildError where there is no C compiler."""
    files = sorted([*_FOLDER.glob("*.c"), *_FOLDER.glob("*.h")])
    identity = [file.read_bytes() for file in files] + [" ".join(_FLAGS).encode(), _processor()]
    digest = hashlib.sha256(b"\0".join(identity)).hexdigest()[:16]
    path = cache_dir("native") / f"slipstream-{digest}.so"
    if not path.exists():
        _build(path, [str(file) for file in files if file.suffix == ".c"])
    return ctypes.CDLL(str(path))


@cache
def available() -> bool:
    """Whether the library can be used here; logs why not."""
    try:
        library()
    except BuildError as error:
        logger.warning("no native kernels, torch operations instead, slower: %s", error)
        return False
    return True


def _build(path: Path, sources: list[str]) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BuildError("no C compiler: install gcc or clang, or set CC")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *_FLAGS, "-o", str(made), *sources, "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise BuildError(f"{' '.join(command)} failed: {result.stderr.strip()[-500:]}")
        os.replace(made, path)
    logger.info("built the native kernels: %s", path)


def _processor() -> bytes:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return (platform.processor() or platform.machine()).encode()
    wanted = {line for line in lines if line.startswith(("model name", "flags"))}
    return "".join(sorted(wanted)).encode()
