"""Drafting on and off in turn: what pays stays, what loses goes, and comes back when it pays again."""

from workers.target.trial import Trial


def share_on(trial: Trial, steps: int, tokens_on: float, time_on: float) -> float:
    on = 0
    for _ in range(steps):
        on += trial.on
        trial.stepped(tokens_on if trial.on else 1.0, time_on if trial.on else 1.2)
    return on / steps


def test_what_pays_is_on_but_for_a_few_steps() -> None:
    trial = Trial(4)
    assert not trial.on
    assert share_on(trial, 4000, tokens_on=1.8, time_on=1.6) > 0.95


def test_what_loses_costs_about_a_hundredth() -> None:
    """Its rows were worth their price, but steps beside a drafter take longer."""
    trial = Trial(4)
    share_on(trial, 1000, tokens_on=1.3, time_on=1.7)
    lost_while_on = 1 - 1.3 / 1.7 * 1.2
    assert share_on(trial, 4000, tokens_on=1.3, time_on=1.7) * lost_while_on < 0.015


def test_what_loses_clearly_is_off_soon_and_for_long() -> None:
    trial = Trial(1)
    share_on(trial, 2000, tokens_on=1.0, time_on=2.4)
    assert share_on(trial, 8000, tokens_on=1.0, time_on=2.4) < 0.03


def test_one_turn_that_lost_does_not_rule_for_long() -> None:
    """Drafters that have just begun are slow; what they do later counts."""
    trial = Trial(1)
    while not trial.on:
        trial.stepped(1.0, 1.0)
    while trial.on:
        trial.stepped(1.0, 2.0)
    pause = 0
    while not trial.on:
        trial.stepped(1.0, 1.0)
        pause += 1
    assert pause <= 256


def test_where_a_lower_load_loses_a_higher_one_begins_with_a_pause() -> None:
    steps = [0, 0]
    for below in (False, True):
        trial = Trial(16, loses_below=below)
        while not trial.on:
            trial.stepped(1.0, 1.0)
            steps[below] += 1
    assert steps[True] > 100 > steps[False]


def test_steps_that_tell_nothing_pass_and_decide_nothing() -> None:
    trial = Trial(4)
    on = 0
    for _ in range(2000):
        on += trial.on
        # Others are drafted meanwhile, whatever the trial says: all steps look alike, and bad.
        trial.stepped(1.0, 2.0, tells=False)
    assert on > 1800
    assert not trial.loses


def test_what_pays_again_is_found_again() -> None:
    trial = Trial(4)
    share_on(trial, 2000, tokens_on=1.0, time_on=1.7)
    share_on(trial, 4000, tokens_on=2.0, time_on=1.5)
    assert share_on(trial, 2000, tokens_on=2.0, time_on=1.5) > 0.95


def test_what_was_under_way_when_the_turn_changed_does_not_count() -> None:
    trial = Trial(4)
    for _ in range(3000):
        # The first steps of a turn are those of the turn before.
        settled = trial._unsettled == 0
        fast = trial.on == settled
        trial.stepped(2.0 if fast else 1.0, 1.5 if fast else 1.2)
    assert trial._has_won
