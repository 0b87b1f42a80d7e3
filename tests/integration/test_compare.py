"""A comparison from end to end: plain, lookup and a drafter of another package, beside a tiny target."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from workers.compare import __main__ as command
from workers.compare import replay, run
from workers.compare.trace import Answer, Round, read
from workers.engine.model import Model
from workers.engine.rows import RowBatch
from workers.pricing import StepTimes
from workers.request import SamplingParams
from workers.target.budget import Budget

PACKAGE = """
from workers.draft.drafters.lookup import LookupDrafter

class Failing(LookupDrafter):
    def propose(self, asks):
        raise RuntimeError("told to fail")

def make(target):
    return LookupDrafter()

def fail(target):
    return Failing()
"""
SETTINGS = ["plain", "lookup", "compared_package:make", "compared_package:make+lookup"]
QUESTIONS = [
    {"question_id": 81, "category": "a", "turns": ["0123456789 0123456789", "again, the same"]},
    {"question_id": 82, "category": "a", "turns": ["the cat in the hat, the cat in the hat"]},
    {"question_id": 99, "category": "b", "turns": ["hello"]},
]


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison whose target's steps are slow and whose further rows are free, so that drafts pay."""
    (tmp_path / "compared_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "compared_package", raising=False)
    forward = Model.forward

    def slow(model: Model, batch: RowBatch) -> torch.Tensor:
        time.sleep(0.003)
        return forward(model, batch)

    monkeypatch.setattr(Model, "forward", slow)
    times = StepTimes({(rows, 0): 0.003 for rows in (1, 8, 64)})
    monkeypatch.setattr(run, "measure_step_times", lambda *_: times)
    # Answers of few tokens repeat themselves.
    params = run.SamplingParams
    few = tuple((token, 100.0) for token in (65, 66, 67))
    monkeypatch.setattr(
        run, "SamplingParams", lambda *args, **named: params(*args, logit_bias=few, **named)
    )
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    made = ["--target", str(tiny.llama()), "--prompts", str(prompts)]
    made += ["--out", str(tmp_path / "out"), "--max-tokens", "40", "--num-threads", "1"]
    for drafter in SETTINGS[1:]:
        made += ["--drafter", drafter]
    return made


def test_drafters_that_run_the_targets_layers(arguments: list[str], tmp_path: Path) -> None:
    assert command.main([*arguments, "--drafter", "{kind: layer_skip, name: own, skip: [1]}"]) == 0
    trace = read(tmp_path / "out" / "trace.jsonl")
    assert any(r.draft_s for r in trace.rounds if r.setting == "own")


@pytest.fixture
def patient(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every draft is waited for and verified, and answers are what the model says without a bias."""
    monkeypatch.setattr(run, "SamplingParams", SamplingParams)
    monkeypatch.setattr(Budget, "covers", lambda _: True)
    monkeypatch.setattr(run._TracingPolicy, "lets_draft", lambda *_: True)
    monkeypatch.setattr(run._TracingPolicy, "price", lambda *_: (0.0, 0.0))
    return arguments


def test_drafters_that_read_different_features(
    patient: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *patient,
        "--drafter",
        f"{{kind: eagle, name: head, model: {tiny.trained_head('eagle3')}}}",
    ]
    arguments += ["--drafter", f"{{kind: medusa, model: {tiny.trained_medusa()}}}"]
    assert command.main([*arguments, "--drafter", "medusa+lookup"]) == 0
    trace = read(tmp_path / "out" / "trace.jsonl")
    for setting in ("head", "medusa", "medusa+lookup"):
        assert any(r.accepted for r in trace.rounds if r.setting == setting)
    both = ["--drafter", "medusa+head", "--out", str(tmp_path / "both")]
    assert command.main([*arguments, *both]) == 2
    assert "medusa+head: its drafters read different features" in capsys.readouterr().err


def test_rules_of_verification_side_by_side(
    patient: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*patient[:10], "--drafter", f"{{kind: model, name: own, model: {tiny.llama()}}}"]
    arguments += ["--verification", "coupled", "rejection", "block"]
    assert command.main([*arguments, "--chain"]) == 2
    assert "at temperature 0 all rules are the same" in capsys.readouterr().err
    arguments += ["--temperature", "1"]
    assert command.main(arguments) == 2
    assert "add --chain" in capsys.readouterr().err
    assert command.main([*arguments, "--chain"]) == 0
    trace = read(tmp_path / "out" / "trace.jsonl")
    for setting in ("own", "own@rejection", "own@block"):
        mine = [r for r in trace.rounds if r.setting == setting]
        assert sum(r.accepted for r in mine) > sum(len(r.selected) for r in mine) / 2
    texts = {a.setting: a for a in trace.answers if a.question == 99}
    assert texts["own"].same_as(texts["plain"])
    assert not texts["own@rejection"].same_as(texts["plain"])
    assert replay.main([str(tmp_path / "out" / "trace.jsonl"), "--price", "0.2"]) == 0
    assert "rejection" not in capsys.readouterr().out.rpartition("would be |")[2]


def test_from_end_to_end_and_on_where_it_broke_off(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert command.main([*arguments, "--temperature", "0.5", "--seed", "3"]) == 0
    trace = read(out / "trace.jsonl")
    assert [a.setting for a in trace.answers if a.question == 81] == SETTINGS
    # Another setting begins with each question.
    assert [a.setting for a in trace.answers if a.question == 82] == SETTINGS[1:] + SETTINGS[:1]
    for answer in trace.answers:
        rounds = [
            r for r in trace.rounds if (r.setting, r.question) == (answer.setting, answer.question)
        ]
        assert [len(r.committed) for r in rounds] == answer.lengths
        for number, turn in enumerate(answer.turns):
            assert len(turn.tokens) == 40
            mine = [r for r in rounds if r.turn == number]
            assert turn.tokens[1:] == tuple(token for r in mine for token in r.committed)
            assert mine[0].base_len == turn.prompt_len + 1
            assert turn.prefill_s < turn.seconds
    for setting in SETTINGS:
        mine = [r for r in trace.rounds if r.setting == setting]
        drafted, accepted = sum(len(r.selected) for r in mine), sum(r.accepted for r in mine)
        if setting == "plain":
            assert not drafted
        else:
            assert 0 < accepted < drafted
            assert any(r.draft_s for r in mine)
    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert [(row["category"], row["setting"], row["questions"]) for row in rows[:5]] == [
        *(("all", setting, 3) for setting in SETTINGS),
        ("a", "plain", 2),
    ]
    assert all(row["equal"] == row["questions"] for row in rows)
    assert rows[1]["tau"]["median"] > 1.0
    assert (out / "compare.md").read_text().count("\n") == 2 + 3 * len(SETTINGS)
    assert (out / "compare.png").stat().st_size > 1000
    files = sorted((out / "spec_bench").iterdir())
    assert len(files) == len(SETTINGS)
    for file in files:
        answers = [json.loads(line) for line in file.open()]
        assert [a["question_id"] for a in answers] == [81, 82, 99]
        assert len(answers[0]["choices"][0]["turns"]) == 2
    assert replay.main([str(out / "trace.jsonl"), "--price", "0.2"]) == 0
    assert capsys.readouterr().out.count("compared_package:make") >= 4

    # Broken off while an answer was written.
    lines = (out / "trace.jsonl").read_text().splitlines(keepends=True)
    half = len(lines) // 2
    (out / "trace.jsonl").write_text("".join(lines[:half]) + lines[half][:30])
    kept = read(out / "trace.jsonl")
    assert 0 < len(kept.answers) < len(trace.answers)
    assert command.main([*arguments, "--temperature", "0.5", "--seed", "3"]) == 0
    again = read(out / "trace.jsonl")
    assert again.answers[: len(kept.answers)] == kept.answers
    assert [(a.setting, a.question) for a in again.answers] == [
        (a.setting, a.question) for a in trace.answers
    ]
    assert all(a.same_as(b) for a, b in zip(again.answers, trace.answers, strict=True))
    assert command.main([*arguments, "--temperature", "0.5", "--seed", "4"]) == 2
    assert "seed: 3, not 4" in capsys.readouterr().err


def test_another_text_is_noticed(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run.Bench.answer

    def one_token_off(bench: run.Bench, setting: str, question: Any) -> tuple[list[Round], Answer]:
        rounds, answer = whole(bench, setting, question)
        if setting == "lookup" and question.id == 82:
            (turn,) = answer.turns
            tokens = (*turn.tokens[:-1], turn.tokens[-1] + 1)
            answer = dataclasses.replace(answer, turns=(dataclasses.replace(turn, tokens=tokens),))
        return rounds, answer

    monkeypatch.setattr(run.Bench, "answer", one_token_off)
    assert command.main(arguments) == 1
    said = capsys.readouterr()
    assert "other answers than plain decoding's: question 82, lookup\n" in said.err
    assert "2/3" in said.out


def test_what_is_wrong_ends_it_with_a_reason(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*arguments, "--drafter", "compared_package:fail"]) == 2
    assert "compared_package:fail: the drafter failed" in capsys.readouterr().err
    assert command.main([*arguments, "--max-tokens", "900"]) == 2
    assert "question 81 takes up to" in capsys.readouterr().err
    assert command.main([*arguments, "--drafter", "nothing"]) == 2
    assert "'nothing' is neither" in capsys.readouterr().err
