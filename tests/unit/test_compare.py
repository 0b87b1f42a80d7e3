"""What a comparison computes: intervals, acceptance, other prices, files."""

import json
import random
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_core import PydanticUndefined

from deployments.config import DrafterArgs, Named
from loadtest import prompts_file
from workers.compare import drafters, questions, spec_bench, statistics, temperatures
from workers.compare.drafters import Setting
from workers.compare.replay import as_it_was, by_price, by_times, main, replay
from workers.compare.trace import Answer, Round, Trace, TraceFile, Turn, depth_along, places, read
from workers.draft.config import CustomConfig, EagleConfig, LookupConfig
from workers.pricing import StepTimes
from workers.training import data
from workers.tree import TokenTree

# Under the anchor 5 and 6; under 5 are 7 and 8, under 7 is 9.
TREE = TokenTree((5, 6, 7, 8, 9), (-1, -1, 0, 0, 2), (0.6, 0.3, 0.4, 0.1, 0.2))
FLAT = StepTimes({(1, 0): 0.01, (8, 0): 0.01})
STEEP = StepTimes({(1, 0): 0.01, (8, 0): 0.08})


def round_(**changes: Any) -> Round:
    """Behind a prompt of three tokens, 5 was accepted and 8 came after it."""
    values: dict[str, Any] = {
        "setting": "x",
        "question": 1,
        "turn": 0,
        "base_len": 4,
        "tree": TREE,
        "selected": (0, 1, 2),
        "accepted": 1,
        "committed": (5, 8),
        "price": 0.25,
        "draft_s": 0.002,
        "wait_s": 0.001,
        "verify_s": 0.01,
    }
    return Round(**{**values, **changes})


def answer(setting: str = "x", question: int = 1, **changes: Any) -> Answer:
    turn = Turn("abc", 3, (1, 5, 8, 2), "length", 0.5, 0.1, (2, 1))
    return Answer(setting, question, changes.pop("category", "c"), (replace(turn, **changes),), 7.0)


ANSWERS = {("x", 1, 0): (3, (1, 5, 8, 2))}


def test_intervals_hold_the_median_and_narrow_with_more_questions() -> None:
    rng = random.Random(0)
    values = [rng.gauss(1.3, 0.2) for _ in range(400)]
    few, many = statistics.median(values[:20]), statistics.median(values)
    assert few == statistics.median(values[:20])
    for estimate in (few, many):
        assert estimate.low < estimate.median < estimate.high
    assert many.low < 1.3 < many.high
    assert many.high - many.low < (few.high - few.low) / 2
    assert statistics.median([2.0]) == statistics.Estimate(2.0, 2.0, 2.0)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(200):
        estimate = statistics.median([rng.expovariate(1.0) for _ in range(40)])
        covered += estimate.low <= 0.6931 <= estimate.high
    assert 180 <= covered <= 199


def test_acceptance_by_depth_and_rank() -> None:
    assert round_().tested() == [(1, 1, 2), (2, None, 1)]
    by_depth, by_rank = statistics.acceptance(
        [round_(), round_(committed=(6,), accepted=1), round_(committed=(4,), accepted=0)]
    )
    assert by_depth == (2 / 3, 0.0)
    assert by_rank == (1 / 4, 1 / 3)
    # Nothing was verified under the last one, and nothing is tested behind the end.
    assert round_(selected=(1,), committed=(6, 3)).tested() == [(1, 1, 1)]
    assert round_(selected=(), committed=(5,)).tested() == []


def test_places_and_depths() -> None:
    part = TREE.cut(3, 9)
    assert places(part, TREE) == (0, 1, 2)
    assert places(TREE.cut(4, 9), TREE) == (0, 1, 2, 4)
    assert depth_along(TREE, (5, 7, 9, 1)) == 3
    assert depth_along(TREE, (6, 7)) == 1
    assert depth_along(TREE, ()) == 0


def test_a_lower_price_verifies_more_and_accepts_what_the_answer_went_on_with() -> None:
    was = replay([round_()], ANSWERS, as_it_was, FLAT)
    assert (was.verified, was.accepted, was.tokens) == (3, 1, 2)
    # Node 8 was priced out, and would have been right: then the answer's last token comes with it.
    free = replay([round_()], ANSWERS, by_price(0.0, 8), FLAT)
    assert (free.verified, free.accepted, free.tokens) == (5, 2, 3)
    assert free.tokens_per_s == pytest.approx(3 / (0.01 + 0.003))
    assert replay([round_()], ANSWERS, by_price(0.25, 8), FLAT) == was
    assert replay([round_()], ANSWERS, by_price(0.0, 1), FLAT).verified == 1
    dear = replay([round_()], ANSWERS, by_price(1.0, 8), FLAT)
    assert (dear.verified, dear.accepted, dear.tokens) == (0, 0, 1)


def test_nothing_comes_behind_the_end_of_the_answer() -> None:
    short = {("x", 1, 0): (3, (1, 5))}
    assert replay([round_()], short, by_price(0.0, 8), FLAT).tokens == 1


def test_other_step_times_decide_how_much_is_verified() -> None:
    assert replay([round_()], ANSWERS, by_times(FLAT, 8), FLAT).verified == 5
    steep = replay([round_()], ANSWERS, by_times(STEEP, 8), STEEP)
    assert (steep.verified, steep.tokens) == (0, 1)
    assert replay([round_()], ANSWERS, as_it_was, STEEP).seconds == pytest.approx(0.043)


OPTIONS = {
    "seed": 0,
    "max_draft_tokens": 8,
    "settings": {name: {"verification": "coupled"} for name in ("plain", "x")},
}


def write_trace(file: Path, price: float = 0.25) -> TraceFile:
    run = {
        "options": OPTIONS,
        "step_times": [[1, 0, 0.01], [8, 0, 0.01]],
    }
    kept = TraceFile.start(file, run)
    kept.add([], answer("plain"))
    kept.add([round_(price=price)], answer())
    return kept


def test_a_trace_comes_back_and_leaves_out_what_belongs_to_no_answer(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    kept = write_trace(file)
    whole = file.read_text()
    assert read(file) == kept.trace
    lines = whole.splitlines(keepends=True)
    file.write_text(whole + lines[2] + lines[3][:40])
    again = TraceFile.resume(file, OPTIONS)
    assert again.trace == kept.trace
    assert file.read_text() == whole
    again.add([round_(question=2)], answer(question=2))
    assert len(read(file).answers) == 3


def test_a_trace_of_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file)
    with pytest.raises(ValueError, match=r"seed: 0, not 1.*another --out"):
        TraceFile.resume(file, {"seed": 1, "max_draft_tokens": 8})
    file.write_text("{}\n")
    with pytest.raises(ValueError, match="first line has no options"):
        read(file)


def test_the_command_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file)
    assert main([str(file), "--price", "0"]) == 0
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert cells[:8] == ["| x", "1", "3.00", "5.00", "1.00", "2.00", "2.00", "3.00"]
    steep = tmp_path / "steep.json"
    steep.write_text(json.dumps({"step_times": [[1, 0, 0.01], [8, 0, 0.08]]}))
    assert main([str(file), "--step-times", str(steep)]) == 0
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert cells[2:4] == ["3.00", "0.00"]
    assert cells[-1] == "76.9 |"
    steep.write_text("{}")
    assert main([str(file), "--step-times", str(steep)]) == 2
    assert "step_times" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(file)])


def test_rows_are_paired_with_plain_by_question() -> None:
    answers = [
        answer("plain", 1, seconds=0.4, lengths=(1, 1, 1)),
        answer("x", 1, seconds=0.2, lengths=(2, 1)),
        answer("plain", 2, seconds=0.9, lengths=(1, 1, 1), category="d"),
        answer("x", 2, seconds=0.3, lengths=(3,), category="d", text="other"),
        # Plain has not come to it yet.
        answer("x", 3, seconds=0.01),
    ]
    rows = statistics.rows(Trace({}, [round_()], answers))
    by = {(row.category, row.setting): row for row in rows}
    assert list(by) == [("all", s) for s in ("plain", "x")] + [
        (category, s) for category in ("c", "d") for s in ("plain", "x")
    ]
    row = by["all", "x"]
    assert (row.questions, row.equal) == (2, 1)
    assert row.speed_up == statistics.Estimate(pytest.approx(2.5), 2.0, pytest.approx(3.0))
    assert row.tau.median == 2.25
    assert row.tokens_per_s == pytest.approx(16)
    assert (row.drafted, row.draft_ms, row.wait_ms, row.verify_ms) == (3, 2, 1, 10)
    assert by["all", "plain"].speed_up.median == 1
    assert by["d", "x"].speed_up.median == pytest.approx(3.0)


def test_questions_without_a_category_count_once() -> None:
    answers = [answer(setting, n, category="all") for n in (1, 2) for setting in ("plain", "x")]
    rows = statistics.rows(Trace({}, [], answers))
    assert [(row.category, row.setting, row.questions) for row in rows] == [
        ("all", "plain", 2),
        ("all", "x", 2),
    ]


def test_answer_files_are_spec_benchs(tmp_path: Path) -> None:
    two = replace(answer(), turns=(*answer().turns, *answer(text="de", lengths=(1,)).turns))
    spec_bench.write(tmp_path / "s", "tiny", [answer("plain", 2), answer("plain"), two])
    assert {file.name for file in (tmp_path / "s").iterdir()} == {
        "tiny-plain.jsonl",
        "tiny-x.jsonl",
    }
    plain = [json.loads(line) for line in (tmp_path / "s/tiny-plain.jsonl").open()]
    assert [row["question_id"] for row in plain] == [1, 2]
    (row,) = [json.loads(line) for line in (tmp_path / "s/tiny-x.jsonl").open()]
    assert set(row) == {
        "question_id",
        "category",
        "answer_id",
        "model_id",
        "tstamp",
        "choices",
    }
    assert row["model_id"] == "tiny-x"
    assert row["choices"] == [
        {
            "index": 0,
            "turns": ["abc", "de"],
            "decoding_steps": [2, 1],
            "new_tokens": [4, 4],
            "wall_time": [0.5, 0.5],
            "accept_lengths": [2, 1, 1],
        }
    ]


def test_drafters_are_words_options_and_sets() -> None:
    settings, configs = drafters.parse(
        ["lookup", "head+lookup", "{name: head, kind: eagle, model: x, width: 2}", "my.pack:make"]
    )
    assert settings == {
        "plain": Setting(),
        "lookup": Setting(("lookup",)),
        "head+lookup": Setting(("head", "lookup")),
        "head": Setting(("head",)),
        "my.pack:make": Setting(("my.pack:make",)),
    }
    assert set(map(type, configs)) == {LookupConfig, EagleConfig, CustomConfig}
    head = next(config for config in configs if isinstance(config, EagleConfig))
    assert (head.model, head.width, head.window) == ("x", 2, 512)


def test_every_drafter_with_every_rule() -> None:
    settings, _ = drafters.parse(["lookup", "suffix"], ["coupled", "rejection"])
    assert settings == {
        "plain": Setting(),
        "lookup": Setting(("lookup",)),
        "lookup@rejection": Setting(("lookup",), "rejection"),
        "suffix": Setting(("suffix",)),
        "suffix@rejection": Setting(("suffix",), "rejection"),
    }


@pytest.mark.parametrize(
    "text",
    [
        "{name: head, kind: eagle, model: x, width: 2}",
        "{name: small, kind: model, model: x, vocabulary: shared}",
        "{name: own, kind: layer_skip, skip: [1, 3], online: true}",
        "{name: lookup, kind: lookup}",
    ],
)
def test_what_a_config_says_of_a_drafter_is_what_was_said(text: str) -> None:
    assert drafters.said(*drafters.parse([text])[1]) == yaml.safe_load(text)


def test_the_factory_of_a_package_gets_a_name() -> None:
    said = drafters.said(*drafters.parse(["My_pack.drafts:make"])[1])
    assert said == {
        "name": "my_pack-drafts-make",
        "kind": "custom",
        "factory": "My_pack.drafts:make",
    }


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (["lokup"], "'lokup' is neither a kind .lookup.*--drafter"),
        (["eagle"], "eagle needs model, as in {kind: eagle, model: …}"),
        (["{kind: eagle, model: x, widht: 2}"], "unknown widht; eagle has .*width"),
        (["{kind: egle}"], "'egle' is none of"),
        (["{kind: lookup, placement: draft}"], "leave out placement"),
        (["lookup", "lookup"], "'lookup' is there already"),
        (["lookup+lookup"], "there already"),
        (["{name: a, kind: lookup}"] * 2, "two of the name 'a'"),
        (["plain"], "neither a kind"),
        (["prediction"], "neither a kind"),
        (["{kind"], "not YAML"),
        (["7"], "neither a word nor options"),
    ],
)
def test_what_is_wrong_with_a_drafter_is_named(said: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        drafters.parse(said)


def test_defaults_are_those_of_a_servers_config() -> None:
    union, _ = typing.get_args(DrafterArgs)
    for args in typing.get_args(union):
        (kind,) = typing.get_args(args.model_fields["kind"].annotation)
        own = set(args.model_fields) - set(Named.model_fields) - {"kind"}
        said = {
            name: field.get_default(call_default_factory=True)
            for name, field in args.model_fields.items()
            if name in own and field.get_default(call_default_factory=True) is not PydanticUndefined
        }
        if "vocabulary" in said:
            said["shared_vocabulary"] = said.pop("vocabulary") == "shared"
        assert drafters.DEFAULTS[kind] == said, kind


def test_only_the_end_of_a_line_ends_a_prompt(tmp_path: Path) -> None:
    """JSON may hold other separators of lines as they are; empty lines are none of the readers' business."""
    texts = ["one\u2028two\u2029three", "four\x85\x1c five"]
    file = tmp_path / "q.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    file.write_text("\n\n".join(lines) + "\n")
    assert [question.turns[0] for question in questions.read(file)] == texts
    assert data.read_prompts(file) == texts
    assert [prompt.text for prompt in prompts_file.read(file)] == texts


def test_questions_come_in_two_forms(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    lines = [
        {"question_id": 81, "category": "a", "turns": ["x", "y"], "reference": ["z"]},
        {"kind": "b", "prompt": "p"},
        {"kind": "b", "prompt": "q"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert questions.read(file) == [
        questions.Question(81, "a", ("x", "y")),
        questions.Question(2, "b", ("p",)),
        questions.Question(3, "b", ("q",)),
    ]
    assert [question.id for question in questions.read(file, 2)] == [81, 3]
    wrong = [({"text": "x"}, ":1 has neither"), (7, ":1 is no JSON object"), (None, "no questions")]
    for line, complaint in wrong:
        file.write_text("" if line is None else json.dumps(line))
        with pytest.raises(ValueError, match=complaint):
            questions.read(file)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"q\.jsonl:1 is no JSON: "):
        questions.read(file)
    file.write_text(json.dumps({"question_id": 2, "turns": ["x"]}) + "\n" + '{"prompt": "y"}')
    with pytest.raises(ValueError, match="question 2 is there twice"):
        questions.read(file)


def keep_run(folder: Path, temperature: float, settings: dict[str, float], asked: str = "x") -> str:
    """A run as far as `temperatures` reads it; speed-ups by setting."""
    folder.mkdir()
    rows = [
        {
            "category": category,
            "setting": setting,
            "speed_up": {"median": speed, "low": speed - 0.1, "high": speed + 0.1},
            "tau": {"median": 2 * speed, "low": 1.0, "high": 3.0},
        }
        for category in ("all", "qa")
        for setting, speed in settings.items()
    ]
    options = {"target": "t", "questions": asked, "max_tokens": 8, "temperature": temperature}
    (folder / "compare.json").write_text(json.dumps({"options": options, "rows": rows}))
    return str(folder)


def test_runs_at_several_temperatures_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hot = keep_run(tmp_path / "hot", 1.0, {"plain": 1.0, "head": 1.1, "lookup": 1.0})
    cold = keep_run(tmp_path / "cold", 0.0, {"plain": 1.0, "head": 1.4})
    out = tmp_path / "out"
    assert temperatures.main([hot, cold, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| drafters | 0 | 1 |",
        "|---|---|---|",
        "| head | 1.40 (1.30 – 1.50), τ 2.80 | 1.10 (1.00 – 1.20), τ 2.20 |",
        "",
    ]
    assert (out / "temperatures.png").stat().st_size > 1000
    other = keep_run(tmp_path / "other", 0.5, {"plain": 1.0}, asked="y")
    assert temperatures.main([hot, other, "--out", str(out)]) == 2
    assert "'questions': 'y'" in capsys.readouterr().err
    assert temperatures.main([hot, hot, "--out", str(out)]) == 2
    assert "a run at temperature 1.0 already" in capsys.readouterr().err
