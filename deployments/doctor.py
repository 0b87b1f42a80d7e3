"""Whether this machine can serve a config file, by machine, packages, config, models and ports; what to do.

Nothing is started, downloaded or converted. Exits with 1 if something stands in the way.
"""

import argparse
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from packaging.requirements import Requirement

from deployments.check import BUILDERS, busy_ports, check_file, serve_answers
from deployments.config import AppConfig, DraftAppConfig, EarlyExitArgs, LoadedArgs, ModelArgs
from workers.checkpoint import already_there, locate

PYTHONS: Final = ((3, 11), (3, 13))
CPU_INFO: Final = Path("/proc/cpuinfo")
GIB: Final = 2**30

App = AppConfig | DraftAppConfig
Level = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and what to do about it; only FAIL stands in the way."""

    level: Level
    what: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"\n      → {self.advice}" if self.advice else ""
        return f"{self.level:<4}  {self.what}{advice}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "config", type=Path, nargs="?", default=Path("deployments.yaml"), metavar="FILE"
    )


def run(options: argparse.Namespace) -> int:
    """Print what was found; 1 if something stands in the way."""
    failed = 0
    for finding in examine(options.config):
        print(finding)
        failed += finding.level == "FAIL"
    if failed:
        print(f"\n{failed} of these stand in the way of serving {options.config}", file=sys.stderr)
        return 1
    print(f"\nready: serve run {options.config}")
    return 0


def examine(path: Path) -> Iterator[Finding]:
    """Everything that is to be said about serving this config file here."""
    yield from python_and_packages()
    yield from processor()
    problems = check_file(path)
    for problem in problems:
        yield Finding("FAIL", f"{path}: {problem}", "correct the file; README has every key")
    if problems:
        return
    yield Finding("ok", f"{path}: every level of it is valid")
    config = yaml.safe_load(path.read_text())
    apps = [
        schema.model_validate(application["args"])
        for application in config["applications"]
        if issubclass(schema := BUILDERS[application["import_path"]][0], AppConfig | DraftAppConfig)
    ]
    yield from places(config)
    yield from devices(apps)
    for app in apps:
        yield from models(app)
    yield from memory(apps)
    yield from ports(config)


def python_and_packages() -> Iterator[Finding]:
    """Python's version, and whether all packages that we need are there in versions that fit."""
    version = sys.version_info[:2]
    shown = ".".join(map(str, sys.version_info[:3]))
    low, high = PYTHONS
    if low <= version <= high:
        yield Finding("ok", f"Python {shown}")
    else:
        wanted = " to ".join(".".join(map(str, bound)) for bound in PYTHONS)
        yield Finding(
            "FAIL", f"Python {shown} is not supported", f"use {wanted}: make setup PYTHON=…"
        )
    try:
        needed = importlib.metadata.requires("slipstream") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("FAIL", "the package slipstream is not installed here", "make setup")
        return
    misfits = [misfit for text in needed if (misfit := _misfit(Requirement(text)))]
    for misfit in misfits:
        yield Finding("FAIL", misfit, "make setup")
    if not misfits:
        yield Finding("ok", f"all packages that it needs, with torch {_version('torch')}")


def processor() -> Iterator[Finding]:
    """What the CPU can do that steps and drafts gain from."""
    cores = _cores()
    flags = CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    if "avx512_bf16" in flags or "amx_bf16" in flags:
        yield Finding("ok", f"{cores} cores with bfloat16 and 512-bit vectors")
    else:
        yield Finding(
            "note",
            f"{cores} cores without 512-bit bfloat16: a step of several rows costs more than one",
            "measure which max_draft_tokens pays: make bench",
        )
    from workers.engine.native.library import BuildError, library

    try:
        library()
        yield Finding("ok", "a C compiler: native kernels are built")
    except BuildError as error:
        yield Finding("note", f"no native kernels, steps are slower: {error}", "install gcc")


def places(config: dict[str, Any]) -> Iterator[Finding]:
    """Whether Ray has room for the replicas that the file asks for."""
    asked = 0.0
    for application in config["applications"]:
        named = {d["name"]: d for d in application.get("deployments") or []}
        for name in BUILDERS[application["import_path"]][1]:
            options = named.get(name, {})
            replicas = options.get("num_replicas") or 1
            scaling = options.get("autoscaling_config")
            if scaling or not isinstance(replicas, int):
                replicas = (scaling or {}).get("min_replicas", 1)
            asked += replicas * (options.get("ray_actor_options") or {}).get("num_cpus", 1)
    cores = _cores()
    if asked > cores:
        yield Finding(
            "FAIL",
            f"the replicas ask for {asked:g} CPUs, and this machine has {cores}: some would never start",
            "lower num_replicas or ray_actor_options.num_cpus, or add machines to the cluster",
        )
    else:
        yield Finding("ok", f"the replicas ask for {asked:g} of {cores} CPUs")


def devices(apps: Sequence[App]) -> Iterator[Finding]:
    """Whether GPUs that are asked for are there."""
    wanted = {model.device for app in apps for model in _models(app)} - {"cpu"}
    if wanted and not (Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi")):
        yield Finding(
            "FAIL",
            f"device {', '.join(sorted(wanted))}, but there is no NVIDIA GPU here",
            "set device: cpu, or run where there is one; make gpu-check says whether it serves well",
        )


def models(app: App) -> Iterator[Finding]:
    """Whether models are there, and drafts speak their target's vocabulary."""
    for model in _models(app):
        # Its config was found valid: the reference leads somewhere.
        if already_there(model.reference) is not None:
            yield Finding("ok", f"{model.name}: {model.reference} is ready")
        elif locate(model.reference) is None:
            yield Finding("note", f"{model.name}: {model.reference} will be fetched from the hub")
        else:
            yield Finding("note", f"{model.name}: {model.reference} will be converted, once")
    target = app.target.model if isinstance(app, AppConfig) else app.target
    for draft in app.drafts:
        if isinstance(draft, ModelArgs) and draft.vocabulary == "same":
            yield from _same_vocabulary(draft, target)


def memory(apps: Sequence[App]) -> Iterator[Finding]:
    """Whether the weights on CPU fit into what is free, as far as they are there to be measured."""
    from workers.memory import available_bytes

    found = {
        folder
        for app in apps
        for model in _models(app)
        if model.device == "cpu" and (folder := already_there(model.reference)) is not None
    }
    files = [file for folder in found for file in folder.glob("*.safetensors")]
    needed, left = sum(file.stat().st_size for file in files), available_bytes()
    shown = f"weights of {needed / GIB:.1f} GiB on disk, {left / GIB:.1f} GiB of memory free"
    if needed > left:
        advice = "take smaller models, free memory, or move drafts to other machines"
        yield Finding("FAIL", shown, advice)
    else:
        yield Finding("ok", shown)


def ports(config: dict[str, Any]) -> Iterator[Finding]:
    """Whether the ports are free, or Serve's."""
    problems = busy_ports(config)
    for problem in problems:
        yield Finding("FAIL", problem)
    port = (config.get("http_options") or {}).get("port", 8000)
    if not problems and serve_answers("127.0.0.1", port):
        yield Finding("note", f"Ray Serve runs on port {port}: serve run changes what it serves")
    elif not problems:
        yield Finding("ok", f"port {port} and the gRPC port are free")


@dataclass(frozen=True, slots=True)
class _Model:
    """A model of a config."""

    name: str
    reference: str
    device: str


def _models(app: App) -> Iterator[_Model]:
    if isinstance(app, AppConfig):
        yield _Model("target", app.target.model, app.target.device)
    for draft in app.drafts:
        if isinstance(draft, LoadedArgs):
            yield _Model(draft.name, draft.model, draft.device)
        elif isinstance(draft, EarlyExitArgs) and draft.model is not None:
            # Its layers are the target's own.
            yield _Model(draft.name, draft.model, "cpu")


def _same_vocabulary(draft: ModelArgs, target: str) -> Iterator[Finding]:
    """Whether a draft model guesses in its target's tokens; one that was cut from it has no tokenizer."""
    from workers.vocabulary import fingerprint_of

    folders = already_there(draft.model), already_there(target)
    if any(f is None or not (f / "tokenizer.json").is_file() for f in folders):
        return
    theirs, ours = (fingerprint_of(folder) for folder in folders if folder is not None)
    if theirs == ours:
        yield Finding("ok", f"{draft.name}: it has the target's vocabulary")
    else:
        yield Finding(
            "FAIL",
            f"{draft.name}: its vocabulary is not the target's",
            "take a draft with the target's tokenizer, or set vocabulary: shared",
        )


def _misfit(requirement: Requirement) -> str:
    """What is wrong with an installed package; empty if nothing is."""
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return ""
    installed = _version(requirement.name)
    if installed is None:
        return f"the package {requirement.name} is not installed"
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"{requirement.name} {installed} does not fit: {requirement.specifier} is needed"
    return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    return os.cpu_count() or 1
