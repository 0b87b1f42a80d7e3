"""What rows cost, which nodes are worth them, and when a step should wait."""

import random

import pytest

from workers.pricing import Arrival, Cut, StepTimes, best_cut, best_wait, price_of_a_row

# Six rows take as long as one, the next six as long again; context makes each row dearer.
STAIRS = StepTimes(
    {(r, c): 0.01 + 0.005 * ((r - 1) // 6) + c * 1e-6 * r for r in range(1, 65) for c in (0, 1000)}
)
MEMORY_BOUND = StepTimes({(1, 0): 0.01, (64, 0): 0.0100001})
COMPUTE_BOUND = StepTimes({(1, 0): 0.001, (64, 0): 0.064})


def test_more_rows_never_take_less_time() -> None:
    times = StepTimes({(1, 0): 3.0, (2, 0): 1.0, (8, 0): 2.0, (16, 0): 5.0})
    seconds = [times(rows, 0) for rows in range(1, 64)]
    assert seconds == sorted(seconds)
    assert times(12, 0) == pytest.approx(4.0)
    # Beyond the last two: as steep as between them.
    assert times(24, 0) == pytest.approx(7.0)


def test_context_counts_linearly_and_beyond_what_was_measured() -> None:
    assert STAIRS(1, 500) == pytest.approx(0.0105)
    assert STAIRS(1, 4000) == pytest.approx(0.014)
    assert STAIRS(6, 4000) > STAIRS(1, 4000)


def test_drift_follows_what_steps_take_now_and_forgives_one_outlier() -> None:
    times = StepTimes({(1, 0): 0.01})
    times.observe(1, 0, 5.0)
    assert times(1, 0) < 0.012
    for _ in range(100):
        times.observe(1, 0, 0.02)
    assert times(1, 0) == pytest.approx(0.02, rel=0.01)
    for _ in range(100):
        times.observe(1, 0, 0.005)
    assert times(1, 0) == pytest.approx(0.005, rel=0.01)


def test_an_idle_memory_bound_target_takes_all_and_a_saturated_one_nothing() -> None:
    scores = [0.5, 0.3, 0.1, 0.05]
    assert best_cut(scores, 1, 1, 0, MEMORY_BOUND).nodes == 4
    assert best_cut(scores, 32, 32, 0, COMPUTE_BOUND).nodes == 0
    assert price_of_a_row(1 / MEMORY_BOUND(1, 0), 1, 0, MEMORY_BOUND) < 1e-4
    assert price_of_a_row(32 / COMPUTE_BOUND(32, 0), 32, 0, COMPUTE_BOUND) == pytest.approx(1.0)


def test_a_bucket_of_rows_is_filled_or_left() -> None:
    # One row: five more are free. Six sessions: the next row begins a bucket of six.
    assert best_cut([0.2] * 5, 1, 1, 0, STAIRS).nodes == 5
    assert best_cut([0.2] * 5, 6, 6, 0, STAIRS).nodes == 0
    assert best_cut([0.9] * 6, 6, 6, 0, STAIRS).nodes == 6


def test_no_number_of_nodes_is_better_than_the_one_chosen() -> None:
    rng = random.Random(0)
    for _ in range(300):
        sessions = rng.randint(1, 20)
        scores = sorted((rng.random() for _ in range(rng.randint(0, 30))), reverse=True)
        cut = best_cut(scores, sessions, sessions, 100, STAIRS)
        rates = [
            (sessions + sum(scores[:k])) / STAIRS(sessions + k, 100) for k in range(len(scores) + 1)
        ]
        if cut.nodes:
            assert cut.rate == pytest.approx(max(rates))
        else:
            assert max(rates) <= rates[0] * 1.03 + 1e-9
        assert cut.rate == pytest.approx(rates[cut.nodes])


@pytest.mark.parametrize(
    ("seconds", "tokens", "waits"), [(0.004, 0.5, True), (0.006, 0.5, False), (0.2, 3.0, False)]
)
def test_alone_it_waits_for_what_saves_more_than_the_wait(
    seconds: float, tokens: float, waits: bool
) -> None:
    assert bool(best_wait(Cut(0, 1.0, 0.01), [Arrival(seconds, tokens)])) is waits


def test_of_many_nobody_waits_for_one_but_all_for_all() -> None:
    cut = Cut(0, 8.0, 0.01)
    assert best_wait(cut, [Arrival(0.004, 1.0)]) == 0.0
    assert best_wait(cut, [Arrival(0.004, 1.0)] * 8) == 0.004
    # The last straggler is not waited for.
    assert best_wait(cut, [Arrival(0.004, 1.0)] * 7 + [Arrival(0.03, 1.0)]) == 0.004


def test_no_row_is_ever_worth_less_than_nothing() -> None:
    """Whatever noise the table was measured with, and far beyond its contexts."""
    numbers = random.Random(1)
    for _ in range(50):
        measured = {
            (rows, context): numbers.uniform(0.01, 0.02)
            for rows in (1, 2, 4, 8, 16)
            for context in (64, 1024)
        }
        times = StepTimes(measured)
        for context in (0, 64, 500, 1024, 8000):
            for rows in range(1, 40):
                assert times(rows + 1, context) >= times(rows, context)
                assert price_of_a_row(100.0, rows, context, times) >= 0.0
