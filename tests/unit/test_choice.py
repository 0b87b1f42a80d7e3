"""Which drafters are asked: by what they would have reached and what they cost."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from deployments.choice import Choice, Records
from workers.rpc import messages as m
from workers.tree import ANCHOR, TokenTree

STEP = 0.030


class Play:
    """An answer whose every token is foretold by drafters with set luck and delay."""

    def __init__(
        self,
        luck: dict[str, Callable[[random.Random], int]],
        delay: dict[str, float],
        seed: int = 0,
    ) -> None:
        self.pool = Records()
        self.luck, self.delay = luck, delay
        self._rng = random.Random(seed)
        self.price = 0.01
        self.begin()

    def begin(self) -> None:
        self.choice = Choice(self.pool, auto=True, max_nodes=8)
        self.choice.join(self.luck)
        self._tokens = [self._rng.randrange(100) for _ in range(5)]
        self._future = [self._rng.randrange(100) for _ in range(20000)]

    def round(self) -> frozenset[str]:
        """One round; returns who was asked."""
        asked, base = self.choice.asked, len(self._tokens)
        reached = 0
        for name in sorted(asked):
            right = self.luck[name](self._rng)
            reached = max(reached, right)
            tokens = [*self._future[base : base + right], 101]
            tree = TokenTree.chain(tokens, [0.5] * len(tokens))
            self.choice.proposed(name, base, tree, self.delay[name])
        self._tokens += self._future[base : base + reached + 1]
        self.choice.committed(self._tokens, committed(base, reached, self.price))
        return asked

    def shares(self, rounds: int) -> dict[frozenset[str], float]:
        seen = [self.round() for _ in range(rounds)]
        return {asked: seen.count(asked) / rounds for asked in seen}


def committed(
    base_len: int, accepted: int, price: float = 0.01, wait_s: float = 1.0
) -> m.Committed:
    """A round that accepted so many tokens of a target that waits for whoever is asked."""
    timings = m.TargetTimings(wait_ns=int(wait_s * 1e9))
    return m.Committed(
        base_len, (), accepted, 0, 0, "", "", timings=timings, price=price, pace=1.0 / STEP
    )


def joined(*drafters: str) -> Choice:
    choice = Choice(Records(), auto=True, max_nodes=8)
    choice.join(drafters)
    return choice


def sometimes(chance: float, length: int) -> Callable[[random.Random], int]:
    return lambda rng: length if rng.random() < chance else 0


def test_all_are_asked_until_all_are_known() -> None:
    play = Play({"a": sometimes(0.5, 2), "b": sometimes(0.5, 2)}, {"a": 0.001, "b": 0.001})
    assert play.round() == {"a", "b"}


def test_a_slow_drafter_that_finds_little_is_left_out() -> None:
    play = Play(
        {"quick": sometimes(0.5, 3), "slow": sometimes(0.5, 1)}, {"quick": 0.001, "slow": 0.04}
    )
    play.shares(50)
    shares = play.shares(400)
    assert shares[frozenset(["quick"])] > 0.9
    # It is asked again now and then.
    assert shares[frozenset(["quick", "slow"])] > 0


def test_drafters_that_complement_each_other_are_asked_together() -> None:
    play = Play({"a": sometimes(0.4, 3), "b": sometimes(0.4, 3)}, {"a": 0.002, "b": 0.003})
    play.shares(50)
    assert play.shares(300)[frozenset(["a", "b"])] > 0.9


def test_a_drafter_that_comes_into_its_own_is_found_again() -> None:
    luck = {"a": sometimes(0.5, 2), "b": sometimes(0.0, 1)}
    play = Play(luck, {"a": 0.001, "b": 0.010})
    play.shares(200)
    assert play.shares(100).get(frozenset(["a"]), 0) > 0.7
    luck["b"], luck["a"] = sometimes(0.9, 6), sometimes(0.0, 1)
    play.shares(400)
    assert "b" in play.choice._best


def test_useless_drafters_are_not_waited_for() -> None:
    play = Play({"a": sometimes(0.02, 1)}, {"a": 0.02})
    play.shares(30)
    assert play.shares(300)[frozenset()] > 0.9


def test_the_pool_knows_for_the_next_answer() -> None:
    play = Play(
        {"quick": sometimes(0.5, 3), "slow": sometimes(0.5, 1)}, {"quick": 0.001, "slow": 0.04}
    )
    play.shares(200)
    play.begin()
    play.round()
    assert play.shares(6)[frozenset(["quick"])] == 1.0


@pytest.mark.parametrize("chosen", ["a", "b"])
def test_all_are_judged_whoever_was_verified(chosen: str) -> None:
    """A tree is followed beyond the commit of its own round, until the answer leaves it."""
    choice = joined("a", "b")
    trees = {"a": TokenTree.chain([7, 8, 9, 3], [0.5] * 4), "b": TokenTree.chain([1], [0.5])}
    for name, tree in trees.items():
        choice.proposed(name, 2, tree, 0.001)
    # Nobody's tokens were verified: the target went on alone, one token a round.
    for tokens in ([5, 5, 7], [5, 5, 7, 8], [5, 5, 7, 8, 9]):
        choice.committed(tokens, committed(len(tokens) - 1, 0))
        assert choice._own.reach == {}
    choice.committed([5, 5, 7, 8, 9, 4], committed(5, 0))
    reach = {tuple(sorted(s)): averages[0].value for s, averages in choice._own.reach.items()}
    assert reach == {("a",): 3.0, ("b",): 0.0, ("a", "b"): 3.0}


def test_a_drafter_that_is_lost_is_not_asked() -> None:
    choice = joined("a", "b")
    choice.lose(["a"])
    assert choice.asked == {"b"}


def test_a_tree_with_branches_is_followed_along_the_answer() -> None:
    choice = joined("a")
    tree = TokenTree((1, 2, 3, 4), (ANCHOR, ANCHOR, 1, 2), (0.5, 0.4, 0.3, 0.2))
    choice.proposed("a", 0, tree, 0.001)
    choice.committed([2, 3, 9], committed(0, 2))
    assert choice._own.reach[frozenset("a")][0].value == 2.0


def test_of_many_drafters_not_every_set_is_weighed() -> None:
    choice = joined(*map(str, range(8)))
    for n in range(8):
        choice.proposed(str(n), 0, TokenTree.chain([n], [0.5]), 0.001)
    choice.committed([3, 3], committed(0, 1))
    assert len(choice._own.reach) == 9


def test_a_high_price_ends_drafting_and_a_low_one_brings_it_back() -> None:
    play = Play({"a": sometimes(0.6, 3)}, {"a": 0.001})
    assert play.shares(50) == {frozenset(["a"]): 1.0}
    play.price = 0.9
    play.shares(5)
    # The price says it: nobody is asked just to see.
    assert play.shares(200) == {frozenset(): 1.0}
    play.price = 0.01
    play.shares(5)
    assert play.shares(50) == {frozenset(["a"]): 1.0}


def test_an_answer_that_begins_under_a_high_price_does_not_draft() -> None:
    play = Play({"a": sometimes(0.6, 3)}, {"a": 0.001})
    play.price = 0.9
    play.shares(50)
    play.choice = Choice(play.pool, auto=True, max_nodes=8)
    play.choice.join(["a"])
    assert play.choice.asked == frozenset()


def test_what_comes_too_late_to_be_used_is_not_asked_for() -> None:
    choice = joined("a")
    for base in range(1, 80):
        choice.proposed("a", base, TokenTree.chain([base, 101], [0.5] * 2), 0.0)
        # The tree was right, but nothing of it was accepted: it came when the step had begun.
        choice.committed([*range(base + 1)], committed(base, 0))
    assert choice._best == frozenset()


def test_without_auto_all_are_asked_whatever_they_find() -> None:
    choice = Choice(Records(), auto=False, max_nodes=8)
    choice.join(["a", "b"])
    for base in range(1, 40):
        choice.proposed("a", base, TokenTree.chain([101], [0.5]), 1.0)
        choice.proposed("b", base, TokenTree.chain([101], [0.5]), 1.0)
        choice.committed([*range(base + 1)], committed(base, 0, price=2.0))
    assert choice.asked == {"a", "b"}


def test_a_tree_that_has_grown_since_is_not_judged_in_place_of_the_first() -> None:
    choice = joined("a")
    choice.proposed("a", 1, TokenTree.chain([7], [0.5]), 0.001)
    choice.proposed("a", 1, TokenTree.chain([7, 8], [0.5, 0.4]), 0.010)
    choice.committed([0, 7, 8], committed(1, 1))
    assert choice._own.reach[frozenset("a")][0].value == 1.0
    assert choice._own.delay["a"].value == 0.001


def test_while_the_target_rests_nobody_is_asked_but_those_who_were_named() -> None:
    resting = replace(committed(1, 0), resting=True)
    choice = joined("a")
    choice.committed([0, 1], resting)
    assert choice.asked == frozenset()
    choice.committed([0, 1, 2], committed(2, 0))
    assert choice.asked == {"a"}
    named = Choice(Records(), auto=False, max_nodes=8)
    named.join(["a"])
    named.committed([0, 1], resting)
    assert named.asked == {"a"}
