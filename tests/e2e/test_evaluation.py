"""An evaluation harness that others wrote, before a real server: the same answers and scores on and off.

It is installed in an environment of its own the first time, which takes minutes.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.peers.rivals import interpreter
from tests.e2e.conftest import Server
from workers.cache import cache_dir

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

TASK = {
    "task": "sums",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "What is {{a}} plus {{b}}? Answer with the number.",
    "doc_to_target": "{{sum}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 48, "temperature": 0},
    "filter_list": [
        {
            "name": "last-number",
            "filter": [
                {"function": "regex", "regex_pattern": r"(\d+)", "group_select": -1},
                {"function": "take_first"},
            ],
        }
    ],
    "metric_list": [{"metric": "exact_match"}],
}


def evaluate(python: Path, tasks: Path, server: Server, speculation: dict[str, Any]) -> Any:
    """(scores, what was answered to each question)."""
    out = tasks / f"out-{len(list(tasks.glob('out-*')))}"
    where = f"model={server.model},base_url={server.http}/v1/chat/completions,num_concurrent=2"
    command = [str(python), "-m", "lm_eval", "run", "--model", "local-chat-completions"]
    command += ["--model_args", where, "--tasks", "sums", "--include_path", str(tasks)]
    command += ["--gen_kwargs", json.dumps({"temperature": 0, "speculation": speculation})]
    command += ["--apply_chat_template", "--log_samples", "--output_path", str(out)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tasks / "cache")}
    environment = {**os.environ, **offline, "OPENAI_API_KEY": "none"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    (scores,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    said = [json.loads(line) for line in samples.open()]
    answers = {sample["doc_id"]: sample["resps"] for sample in said}
    return json.loads(scores.read_text())["results"]["sums"], answers


def test_scores_are_the_same_with_and_without_drafts(server: Server, tmp_path: Path) -> None:
    python = interpreter("lm-eval", cache_dir("environments"), os.environ.get("PIP_FLAGS", ""))
    questions = [{"a": a, "b": b, "sum": str(a + b)} for a in range(2, 6) for b in range(1, 6)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(task))
    off, plain = evaluate(python, tmp_path, server, {"enabled": False})
    on, drafted = evaluate(python, tmp_path, server, {"enabled": True})
    assert len(plain) == len(questions)
    assert drafted == plain
    assert on == off
    assert off["exact_match,last-number"] > 0.0
