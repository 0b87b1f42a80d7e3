"""What a load test asks, when, and what it counts: the parts that need no server."""

import itertools
import json
import math
import random
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from loadtest import goodput, slo, traffic
from loadtest.goodput import Limits, Tally, Timeline
from loadtest.prompts_file import Prompt, read

ROOT = Path(__file__).parents[2]


def spec_bench(path: Path) -> list[Prompt]:
    categories = ["writing", "writing", "math", "translation", "rag"]
    rows = [{"category": c, "turns": [f"{c} {n}", "no"]} for n, c in enumerate(categories)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return read(path)


def test_a_mix_draws_by_category_and_by_kind(tmp_path: Path) -> None:
    prompts = spec_bench(tmp_path / "questions.jsonl")
    groups = traffic.grouped(prompts, traffic.parse_mix("writing:3, rag:1"))
    asked = itertools.islice(traffic.asks(groups, 0.25, random.Random(1)), 4000)
    drawn = list(asked)
    counts = Counter(ask.prompt.category for ask in drawn)
    assert set(counts) == {"writing", "rag"}
    assert counts["writing"] / counts["rag"] == pytest.approx(3, rel=0.15)
    assert len({ask.prompt.text for ask in drawn}) == 3
    left = [ask.give_up_after for ask in drawn if ask.give_up_after is not None]
    assert len(left) / len(drawn) == pytest.approx(0.25, abs=0.03)
    assert min(left) >= 1
    kinds = traffic.grouped(prompts, traffic.parse_mix("conversation:1"))
    assert {p.category for p in kinds[0][1]} == {"writing", "math"}
    assert traffic.grouped(prompts, {}) == [(1.0, prompts)]


def test_the_same_seed_asks_the_same(tmp_path: Path) -> None:
    groups = traffic.grouped(spec_bench(tmp_path / "questions.jsonl"), {})
    twice = [list(itertools.islice(traffic.asks(groups, 0.5, random.Random(3)), 50)) for _ in "ab"]
    assert twice[0] == twice[1]


@pytest.mark.parametrize("text", ["writing", "writing:0", "writing:x", ":1", "a:1,,b:1", "a:nan"])
def test_a_mix_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write category:weight"):
        traffic.parse_mix(text)


def test_a_category_that_no_prompt_has_is_refused(tmp_path: Path) -> None:
    prompts = spec_bench(tmp_path / "questions.jsonl")
    with pytest.raises(ValueError, match=r"no prompt is of 'poems'; there are .*rag.*writing"):
        traffic.grouped(prompts, {"poems": 1.0})


def test_drafting_by_name() -> None:
    assert traffic.drafting("on") == traffic.Drafting(True, ())
    assert traffic.drafting("off") == traffic.Drafting(False, ())
    assert traffic.drafting("eagle+lookup") == traffic.Drafting(True, ("eagle", "lookup"))


def arrivals(rate: float, shape: str, run_s: float) -> list[float]:
    level = partial(traffic.level, shape, run_s)
    times = traffic.arrivals(rate, level, random.Random(5))
    return list(itertools.takewhile(lambda at: at < run_s, times))


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(20.0, "none", 500.0)
    assert len(times) == pytest.approx(10_000, rel=0.03)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    # The gaps of a Poisson process are as wide as they are long; those of a metronome are not.
    assert deviation / mean == pytest.approx(1.0, abs=0.05)
    counts = Counter(int(at) for at in times)
    per_s = [counts[second] for second in range(500)]
    variance = sum((count - 20) ** 2 for count in per_s) / len(per_s)
    assert variance == pytest.approx(20, rel=0.2)


def test_another_rate_stretches_the_same_arrivals() -> None:
    slow, fast = arrivals(2.0, "none", 100.0), arrivals(4.0, "none", 50.0)
    assert [at / 2 for at in slow] == pytest.approx(fast)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("none", [1.0] * 5),
        ("ramp", [0.1, 0.3, 0.5, 0.7, 0.9]),
        ("spike", [0.2, 0.2, 1.0, 0.2, 0.2]),
        ("soak", [0.875, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_arrivals_follow_their_shape(shape: str, expected: list[float]) -> None:
    times = arrivals(50.0, shape, 1000.0)
    for fifth, share in enumerate(expected):
        count = sum(fifth * 200 <= at < (fifth + 1) * 200 for at in times)
        assert count / (50.0 * 200) == pytest.approx(share, rel=0.05)


def timeline(*chunks: tuple[float, int], began: float = 10.0) -> Timeline:
    made = Timeline(began)
    for at, tokens in chunks:
        made.chunk(at, tokens)
    return made


def test_chunks_of_rounds_are_spread_over_their_tokens() -> None:
    """The opening chunk and the usage have no tokens: neither first nor last."""
    answer = timeline((10.1, 0), (10.5, 1), (10.8, 3), (10.9, 1), (11.9, 0))
    assert answer.ttft_ms == pytest.approx(500)
    assert answer.tokens == 5
    assert answer.chunks == 3
    assert answer.chunk_gaps_ms == pytest.approx([300, 100])
    assert answer.token_gaps_ms == pytest.approx([100, 100, 100, 100])
    assert answer.tpot_ms == pytest.approx((answer.total_ms - answer.ttft_ms) / 4)
    assert answer.total_ms == pytest.approx(900)


def test_one_token_has_no_pace() -> None:
    answer = timeline((10.5, 1))
    assert answer.tpot_ms is None
    assert Limits(600, 1).hold(answer.ttft_ms, answer.tpot_ms)
    assert not Limits(400, 1).hold(answer.ttft_ms, answer.tpot_ms)


def counted(limits: Limits) -> goodput.Row:
    """Three answers, one slow to begin and one slow to go on; a failure; one given up."""
    tally = Tally()
    answers = [
        timeline((10.1, 1), (10.2, 2)),
        timeline((10.9, 1), (11.0, 2)),
        timeline((10.1, 1), (12.1, 2)),
    ]
    for lag in (0.0, 1.0, 2.0, 3.0, 4.0):
        tally.start(10.0, lag)
    for answer in answers:
        tally.answer(answer, limits)
    tally.failed, tally.given_up = 1, 1
    for _ in range(5):
        tally.end(20.0)
    return goodput.row("all", tally, limits)


def test_goodput_is_of_all_that_were_not_given_up() -> None:
    row = counted(Limits(500, 100))
    assert row.goodput_share == pytest.approx(1 / 4)
    assert row.goodput_per_s == pytest.approx(1 / 10)
    assert (row.answered, row.failed, row.given_up, row.most_in_flight) == (3, 1, 1, 5)
    assert row.tokens_per_s == pytest.approx(9 / 10)
    assert row.ttft_p99 == pytest.approx(900)
    assert row.tpot_p99 == pytest.approx(1000)
    assert row.lag_p99 == 4.0
    assert counted(Limits(500)).goodput_share == pytest.approx(2 / 4)
    assert counted(Limits()).goodput_share is None


def test_too_little_within_the_limits_fails_the_test() -> None:
    row = counted(Limits(500, 100))
    assert goodput.shortfall(row, 0.25) is None
    assert "less than --slo-share 0.3" in str(goodput.shortfall(row, 0.3))
    assert goodput.shortfall(counted(Limits()), 1.0) is None
    nothing = goodput.row("all", Tally(), Limits())
    assert "no request was answered" in str(goodput.shortfall(nothing, 0.0))
    table = goodput.markdown([row, nothing])
    assert [line.count("|") for line in table.splitlines()] == [15] * 4


@pytest.mark.parametrize("start", [0.5, 1.0, 40.0])
@pytest.mark.parametrize("capacity", [0.7, 3.3, 18.0])
def test_the_search_finds_what_a_server_bears(start: float, capacity: float) -> None:
    tried: list[float] = []

    def holds(setting: str, rate: float) -> bool:
        tried.append(rate)
        return rate <= {"off": capacity, "on": 1.4 * capacity}[setting]

    found = slo.search_in_turn(("off", "on"), start, 1.05, holds)
    for setting, bears in (("off", capacity), ("on", 1.4 * capacity)):
        held, broken = found[setting].held, found[setting].broken
        assert held is not None
        assert broken is not None
        assert held <= bears < broken <= 1.05 * held
    assert len(tried) < 30


def test_the_search_gives_up_far_from_where_it_began() -> None:
    never = slo.search_in_turn(("on",), 1.0, 1.1, lambda _, rate: False)
    assert never["on"] == slo.Bracket(None, 1 / slo.FARTHEST)
    always = slo.search_in_turn(("on",), 1.0, 1.1, lambda _, rate: True)
    assert always["on"] == slo.Bracket(slo.FARTHEST, None)


def test_what_was_found_is_drawn(tmp_path: Path) -> None:
    limits = Limits(500, 40)
    runs = [
        slo.Run("off", 1.0, 60, 0, 300.0, 20.0, 0.5, 100.0),
        slo.Run("off", 2.0, 110, 0, 900.0, 35.0, 0.5, 190.0),
        slo.Run("on", 1.0, 60, 0, 200.0, 15.0, 0.5, 100.0),
        slo.Run("on", 2.0, 0, 7, None, None, 0.5, 0.0),
    ]
    assert [run.holds(limits) for run in runs] == [True, False, True, False]
    rows = slo.rows_of({s: slo.Bracket(1.0, 2.0) for s in ("off", "on")}, runs)
    assert [(row.held, row.ttft_p99) for row in rows] == [(1.0, 300.0), (1.0, 200.0)]
    assert "| on | 2 | 0 | 7 | – | – |" in slo.markdown(rows, runs, limits)
    slo.plot(rows, runs, limits, tmp_path / "slo.png")
    assert (tmp_path / "slo.png").stat().st_size > 0


def test_options_that_contradict_each_other_are_refused() -> None:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "HttpStreamUser"]
    command += ["--headless", "--host", "http://127.0.0.1:1", "--rate", "2", "--users", "3"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "--users 3 with --rate 2.0" in result.stderr
