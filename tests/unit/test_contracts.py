"""Who may import whom, and that generated files are what their sources say."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = ["protos/inference.proto", "protos/speculation.proto"]

# What the coordinator's package may use of the workers': nothing that needs torch.
FROM_WORKERS = {
    "workers.checkpoint",
    "workers.grammar",
    "workers.limits",
    "workers.prediction",
    "workers.pricing",
    "workers.request",
    "workers.rpc",
    "workers.text",
    "workers.tracing",
    "workers.tree",
}
FORBIDDEN = {
    "deployments": {"torch", "transformers", "loadtest", "numpy"},
    "workers": {"ray", "fastapi", "starlette", "uvicorn", "deployments", "loadtest", "pydantic"},
    "loadtest": {"torch", "transformers", "ray", "deployments", "workers"},
    "protos": {"deployments", "workers", "loadtest", "torch", "ray"},
}


def imports(path: Path, everywhere: bool) -> Iterator[str]:
    """Modules that a file imports: at its top level, or everywhere in it."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(package: str) -> None:
    files = [f for f in (ROOT / package).rglob("*.py") if "_pb2" not in f.name]
    # What measures from the inside knows the packages; the rest of loadtest sees what users see.
    # So does the program that runs ours beside its rivals' programs.
    inside = {ROOT / "loadtest" / "inside", ROOT / "loadtest" / "peers" / "programs"}
    files = [f for f in files if not inside & set(f.parents)]
    assert files
    for file in files:
        for module in imports(file, everywhere=True):
            assert not within(module, FORBIDDEN[package]), f"{file} imports {module}"


def test_the_coordinator_needs_nothing_of_the_workers_that_needs_torch() -> None:
    for file in (ROOT / "deployments").rglob("*.py"):
        for module in imports(file, everywhere=False):
            if within(module, {"workers"}) and module != "workers":
                assert within(module, FROM_WORKERS), f"{file} imports {module}"


def test_the_mathematics_of_trees_needs_no_torch() -> None:
    for name in (
        "tree.py",
        "grammar.py",
        "limits.py",
        "request.py",
        "text.py",
        "leases.py",
        "checkpoint.py",
        "prediction.py",
    ):
        assert not any(
            within(m, {"torch"}) for m in imports(ROOT / "workers" / name, everywhere=False)
        )


def test_importing_the_application_loads_no_torch() -> None:
    code = "import sys, deployments.app, deployments.check; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert result.returncode == 0


def test_generated_modules_are_what_the_protos_say(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, *PROTOS], cwd=ROOT, check=True)
    made = sorted((tmp_path / "protos").iterdir())
    assert len(made) == 6
    for file in made:
        assert file.read_text() == (ROOT / "protos" / file.name).read_text(), (
            f"{file.name} is stale: run make proto"
        )


@pytest.mark.parametrize("proto", PROTOS)
def test_every_rpc_and_field_is_explained(proto: str) -> None:
    lines = (ROOT / proto).read_text().splitlines()
    for number, line in enumerate(lines):
        text = line.strip()
        is_field = text.endswith(";") and "=" in text and not text.startswith(("syntax", "//"))
        if is_field or text.startswith("rpc "):
            above = lines[number - 1].strip()
            unspecified = text.split()[0].endswith("_UNSPECIFIED")
            assert above.startswith("//") or unspecified, f"{proto}:{number + 1}: {text}"
