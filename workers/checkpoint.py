"""From a model reference to a folder that transformers can load.

A reference is `package://module/file.gguf` (a file inside an installed Python package), a local path
(a folder in Hugging Face's format, or a .gguf file), or a hub id such as `org/name`. GGUF files are
converted once, to float32 safetensors, and kept in the cache folder.
"""

import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final, Literal

from filelock import FileLock

from workers.cache import cache_dir

logger = logging.getLogger(__name__)

FeatureKind = Literal["last", "three"]
"""What a drafter reads of its target: see workers.engine.features."""

PACKAGE_SCHEME: Final = "package://"
MODEL_CONFIG: Final = "config.json"
DRAFT_CONFIG: Final = "draft.json"
HEAD_CONFIG: Final = "eagle.json"
EXIT_CONFIG: Final = "exit.json"
MEDUSA_CONFIG: Final = "medusa.json"
MASKS_FILE: Final = "masks.safetensors"
_CONFIGS: Final = (MODEL_CONFIG, DRAFT_CONFIG, HEAD_CONFIG, MEDUSA_CONFIG, EXIT_CONFIG)
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_MAX_HEADER_BYTES: Final = 100 * 2**20
_HUB_FILES: Final = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]


class CheckpointError(ValueError):
    """The reference leads to no usable model; the message says why and what to do."""


def resolve(reference: str) -> Path:
    """The folder of a model, converting or downloading it if that was not done before.

    Raises CheckpointError.
    """
    source = locate(reference)
    if source is None:
        return _download(reference)
    if source.suffix == ".gguf":
        return _convert(source)
    return source


def locate(reference: str) -> Path | None:
    """Where a package or path reference points, without converting; None for a hub id.

    Raises CheckpointError if nothing is there.
    """
    if reference.startswith(PACKAGE_SCHEME):
        return _in_package(reference)
    path = Path(reference).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGS):
            raise CheckpointError(f"{path} is no model: it has none of {', '.join(_CONFIGS)}")
        return path
    if path.exists():
        raise CheckpointError(f"{path} is neither a model folder nor a .gguf file")
    if _HUB_ID.fullmatch(reference) and not reference.startswith("."):
        return None
    raise CheckpointError(
        f"model {reference!r} was not found: give an existing path, a hub id (org/name), "
        "or package://module/file.gguf"
    )


def already_there(reference: str) -> Path | None:
    """The folder of a model that needs neither a download nor a conversion, else None.

    Raises CheckpointError if a path or package holds no model.
    """
    source = locate(reference)
    if source is not None and source.suffix == ".gguf":
        source = _converted_folder(source)
    return source if source is not None and source.exists() else None


def read_json(file: Path) -> dict[str, Any]:
    """What a JSON file of a checkpoint says; raises CheckpointError if it cannot be read."""
    try:
        content = json.loads(file.read_text())
        if not isinstance(content, dict):
            raise ValueError(f"{type(content).__name__} instead of an object")
        return content
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from error


def describe(file: Path, release: int, *keys: str) -> dict[str, Any]:
    """What a checkpoint of ours says of itself, of the format that this `release` reads, with these keys.

    Raises CheckpointError.
    """
    content = read_json(file)
    if content.get("format") != release:
        raise CheckpointError(
            f"{file.parent} has format {content.get('format')}; this release reads {release}"
        )
    if missing := [key for key in keys if key not in content]:
        raise CheckpointError(f"{file} cannot be read: it lacks {', '.join(missing)}")
    return content


def head_features(reference: str) -> FeatureKind:
    """What an EAGLE head reads of its target: "last" or "three" (see workers.engine.features).

    Reads no tensors. Raises CheckpointError if the folder holds no head.
    """
    folder = resolve(reference)
    if (folder / HEAD_CONFIG).is_file():
        version = read_json(folder / HEAD_CONFIG).get("version")
        return "three" if version == "eagle3" else "last"
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            names |= set(json.loads(stream.read(min(size, _MAX_HEADER_BYTES))))
    if "fc.weight" not in {name.removeprefix("model.") for name in names}:
        raise CheckpointError(f"{folder} holds no EAGLE head in safetensors")
    return "three" if any(".midlayer." in f".{name}" for name in names) else "last"


def holds_medusa(folder: Path) -> bool:
    """Whether a folder is of Medusa heads: ours, or published ones."""
    config = folder / MODEL_CONFIG
    published = config.is_file() and "medusa_num_heads" in read_json(config)
    return published or (folder / MEDUSA_CONFIG).is_file()


def check_drafter(folder: Path, kind: str) -> None:
    """Raise CheckpointError if a drafter of this kind cannot be made from a folder; reads no tensors."""
    if kind == "eagle":
        head_features(str(folder))
    if kind == "medusa" and not (folder / MEDUSA_CONFIG).is_file():
        if not holds_medusa(folder):
            raise CheckpointError(
                f"{folder} holds no Medusa heads: train some (python -m workers.training medusa), or give a "
                f"folder whose {MODEL_CONFIG} has medusa_num_heads"
            )
        if not any(folder.glob("*.safetensors")):
            raise CheckpointError(
                f"{folder} holds Medusa heads, but not as safetensors: pickled weights are not loaded; "
                "docs/drafters.md has a command that converts them"
            )
    if kind == "mask" and not (folder / MASKS_FILE).is_file():
        raise CheckpointError(
            f"{folder} holds no mask drafter: train one (python -m workers.training mask)"
        )


def _in_package(reference: str) -> Path:
    module, _, file = reference.removeprefix(PACKAGE_SCHEME).partition("/")
    if not module.isidentifier() or not file:
        raise CheckpointError(f"{reference!r} is not of the form package://module/file.gguf")
    # The package is looked up, never imported: it may need dependencies that nothing here does.
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(
            f"{reference}: no package {module!r} is installed (`make setup` installs the one of the "
            "default model)"
        )
    folder = Path(spec.submodule_search_locations[0])
    path = (folder / file).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.exists():
        beside = path.parent if path.parent.is_dir() else folder
        models = [*beside.glob("*.gguf"), *(config.parent for config in _configs_below(beside))]
        held = ", ".join(sorted({model.name for model in models}))
        raise CheckpointError(f"{reference}: the package holds {held or 'no model'} there")
    return path


def _configs_below(folder: Path) -> list[Path]:
    """The configs of models that lie in folders of a folder."""
    return [file for name in _CONFIGS for file in folder.glob(f"*/{name}")]


def _download(reference: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(reference, allow_patterns=_HUB_FILES))
    except Exception as error:
        raise CheckpointError(
            f"model {reference!r} is no local path and could not be fetched from the hub: {error}"
        ) from error


def _converted_folder(file: Path) -> Path:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    return cache_dir("models") / f"{file.stem}-{digest}"


def _convert(file: Path) -> Path:
    folder = _converted_folder(file)
    # Draft and target may start at the same moment; one converts, the other waits.
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            logger.info("converting %s once, to %s", file, folder)
            made = Path(tempfile.mkdtemp(dir=folder.parent))
            try:
                _write_converted(file, made)
                os.replace(made, folder)
            except Exception as error:
                shutil.rmtree(made, ignore_errors=True)
                raise CheckpointError(f"cannot convert {file}: {error}") from error
    return folder


def _write_converted(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are plain float32 by now; what is left of the quantiser refuses to be saved.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
