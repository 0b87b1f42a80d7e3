"""Locust against the real server: both doors, streams that are given up, exit codes, reports."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Server

pytestmark = pytest.mark.e2e


def locust(server: Server, *options: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: it patches sockets and threads."""
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
    command += ["--only-summary", "--host", server.http, "--grpc-host", server.grpc_address]
    # Users who wait finish what they asked, however busy the machine.
    command += ["--stop-timeout", "60"]
    return subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )


def test_both_doors_under_arrivals_that_wait_for_nobody(server: Server, tmp_path: Path) -> None:
    html = tmp_path / "load.html"
    options = ["--rate", "5", "--run-time", "5s", "--max-tokens", "16", "--cancel-share", "0.4"]
    options += ["--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000", "--mix", "translation:1"]
    result = locust(server, *options, "--html", str(html), "--json-file", str(tmp_path / "stats"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ITL per token" in result.stdout
    assert html.stat().st_size > 0
    rows = {row["stream"]: row for row in json.loads(html.with_suffix(".json").read_text())["rows"]}
    http, grpc = rows["http-stream /v1/chat/completions"], rows["grpc-stream Generate"]
    for row in (http, grpc):
        assert row["answered"] > 0
        assert row["given_up"] > 0
        assert row["failed"] == 0
        assert row["goodput_share"] == 1.0
        assert row["ttft_p50"] > 0
        assert row["itl_token_p50"] <= row["itl_chunk_p99"]
    assert rows["all"]["answered"] == http["answered"] + grpc["answered"]
    events = statistics(tmp_path / "stats.json")
    assert {"ttft", "tpot", "itl per chunk", "itl per token", "sent late"} <= set(events)
    # Given up, and counted as that only.
    assert events["ttft"] == rows["all"]["answered"]
    assert events["Generate, given up"] == grpc["given_up"]
    assert events["/v1/chat/completions"] == http["answered"]


def statistics(path: Path) -> dict[str, int]:
    """How often each of Locust's own events came."""
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return {entry["name"]: entry["num_requests"] for entry in found}


def test_users_who_wait_and_a_failure_that_shows(server: Server) -> None:
    options = ["--users", "2", "--spawn-rate", "2", "--run-time", "3s", "--model", "nobody"]
    result = locust(server, *options)
    said = result.stdout + result.stderr
    assert result.returncode == 1, said
    assert "404: " in said
    assert "NOT_FOUND: " in said


def test_limits_that_nobody_keeps_fail_without_a_failed_request(server: Server) -> None:
    options = ["HttpStreamUser", "--users", "1", "--run-time", "2s", "--max-tokens", "4"]
    result = locust(server, *options, "--shape", "ramp", "--slo-ttft-ms", "0.01")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "less than --slo-share 0.99" in result.stderr
