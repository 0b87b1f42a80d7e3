"""What is proposed for one answer: mailboxes, what still fits, calibration, expectations."""

import time

import pytest

from workers.target.counters import Counters
from workers.target.proposals import Outlook, Proposals, calibrated
from workers.tree import ANCHOR, TokenTree

NOBODY: frozenset[str] = frozenset()
TREE = TokenTree((5, 6, 7, 8), (ANCHOR, ANCHOR, 0, 2), (0.6, 0.3, 0.5, 0.4))


def proposals(*names: str, pool: dict[str, Outlook] | None = None) -> Proposals:
    made = Proposals({} if pool is None else pool, 4, 1.0, Counters())
    made.elsewhere = frozenset(names)
    made.committed(0, [0, 0, 0])
    return made


def test_of_one_drafter_the_newest_wins_and_drafters_are_merged() -> None:
    made = proposals("a", "b")
    made.put("a", 3, TokenTree.chain([1], [0.5]))
    made.put("a", 3, TokenTree.chain([2], [0.5]))
    made.put("b", 3, TokenTree.chain([2, 3], [0.7, 0.6]))
    made.open_mailbox([0] * 3, 1, NOBODY)
    assert made.tree().tokens == (2, 3)
    assert not made.missing


def test_what_is_left_of_a_tree_serves_the_next_step() -> None:
    made = proposals("a")
    made.put("a", 3, TREE)
    made.open_mailbox([0] * 3, 1, NOBODY)
    made.committed(3, [5, 7])
    assert made.tree().tokens == (8,)
    assert made.missing == {"a"}
    made.committed(5, [9])
    assert not made.tree()


def test_a_proposal_for_an_earlier_base_is_rebased_or_dropped() -> None:
    made = proposals("a")
    made.committed(3, [5])
    made.put("a", 3, TREE)
    made.open_mailbox([0, 0, 0, 5], 1, NOBODY)
    assert made.tree().tokens == (7, 8)
    assert made.tree().scores == pytest.approx((0.5 / 0.6, 0.4 / 0.6))
    assert made.missing == {"a"}
    made.put("a", 3, TokenTree.chain([6, 7], [0.5, 0.5]))
    made.open_mailbox([0, 0, 0, 5], 1, NOBODY)
    assert made.tree().tokens == (7, 8)
    assert made._counters.proposals_rebased == made._counters.proposals_dropped == 1


def test_nobody_is_heard_who_was_not_asked() -> None:
    made = proposals("a")
    made.put("stranger", 3, TREE)
    made.open_mailbox([0] * 3, 1, NOBODY)
    assert not made.tree()
    assert "stranger" not in made._pool


def test_scores_are_taken_as_they_turn_out() -> None:
    pool: dict[str, Outlook] = {}
    made = proposals("boaster", "modest", pool=pool)
    for base in range(3, 200):
        made.put("boaster", base, TokenTree.chain([1, 1], [0.9, 0.8]))
        made.put("modest", base, TokenTree.chain([2], [0.5]))
        made.open_mailbox([0] * base, 1, NOBODY)
        made.committed(base, [2 if base % 2 else 3])
    assert made._outlook("boaster").correction < 0.4
    assert 0.8 < made._outlook("modest").correction < 1.2
    # The next answer begins with what this one has shown.
    assert proposals("boaster", pool=pool)._outlook("boaster").correction < 0.4


def test_calibrated_scores_never_rise_along_a_path() -> None:
    for correction in (0.2, 0.7, 1.25):
        scores = calibrated(TREE, correction).scores
        assert all(0 <= score <= 1 for score in scores)
        assert scores[2] <= scores[0]
        assert scores[3] <= scores[2]
    assert calibrated(TREE, 0.5).scores == pytest.approx((0.3, 0.15, 0.125, 0.05))


def test_a_proposal_is_expected_when_it_usually_comes_and_not_long_after() -> None:
    made = proposals("a")
    outlook = made._outlook("a")
    for _ in range(50):
        outlook.arrived(0.010, 0.2)
    outlook.added(2.0, 1.0)
    now = next(reversed(made._reached.values()))
    (arrival,) = made.arrivals(now + 0.002, 0.01)
    assert arrival.seconds == pytest.approx(0.008, abs=1e-4)
    assert arrival.tokens == 2.0
    assert not made.arrivals(now + 0.5, 0.01)
    made.put("a", 3, TREE)
    made.open_mailbox([0] * 3, 1, NOBODY)
    assert not made.arrivals(now + 0.002, 0.01)


def test_patience_is_the_limit_whatever_is_expected() -> None:
    made = Proposals({}, 4, 0.005, Counters())
    made.elsewhere = frozenset("a")
    made.committed(0, [0])
    for _ in range(50):
        made._outlook("a").arrived(0.010, 0.2)
    assert not made.arrivals(time.monotonic(), 0.01)


def test_one_who_did_not_come_is_not_waited_for_until_he_is_heard() -> None:
    made = proposals("a")
    for _ in range(50):
        made._outlook("a").arrived(0.010, 0.2)
    assert made.arrivals(time.monotonic(), 0.01)
    made.committed(3, [0])
    assert not made.arrivals(time.monotonic(), 0.01)
    made.put("a", 3, TREE)
    made.open_mailbox([0] * 4, 1, NOBODY)
    assert made.arrivals(time.monotonic(), 0.01)
