"""What drafting may cost: a share of the time, and what it has saved."""

from workers.target.budget import SHARE, Budget

STEP = 0.01


def test_drafting_may_cost_its_share_and_what_it_has_saved() -> None:
    budget = Budget(STEP)
    assert budget.covers(cost_s=STEP)
    assert not budget.covers(cost_s=2 * STEP)
    assert budget.covers(cost_s=3 * STEP, saved_s=2 * STEP)
    budget.paid(elapsed_s=1.0, cost_s=STEP + SHARE + 0.001, saved_s=0.0, plain_s=STEP)
    assert not budget.covers()
    assert not budget.covers(cost_s=STEP, saved_s=5 * STEP)
    budget.paid(elapsed_s=1.0, cost_s=0.0, saved_s=0.0, plain_s=STEP)
    assert budget.covers()


def test_what_an_hour_has_saved_is_not_lost_in_a_minute() -> None:
    budget = Budget(STEP)
    for _ in range(10_000):
        budget.paid(elapsed_s=STEP, cost_s=0.0, saved_s=STEP, plain_s=STEP)
    for _ in range(40):
        budget.paid(elapsed_s=STEP, cost_s=STEP, saved_s=0.0, plain_s=STEP)
    assert not budget.covers()


def test_a_drafter_that_never_helps_costs_its_share() -> None:
    budget, lost = Budget(STEP), 0.0
    for _ in range(5000):
        cost = STEP / 2 if budget.covers(cost_s=STEP / 2) else 0.0
        budget.paid(elapsed_s=STEP + cost, cost_s=cost, saved_s=0.0, plain_s=STEP)
        lost += cost
    assert SHARE / 2 < lost / (5000 * STEP) < 1.1 * SHARE
