"""Which drafters are asked: by what they would have reached and what they cost."""

import random
from collections.abc import Callable

import pytest

from deployments.choice import Choice, Records
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
        self.begin()

    def begin(self) -> None:
        self.choice = Choice(self.pool, auto=True)
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
        self.choice.committed(self._tokens, STEP, bool(asked))
        return asked

    def shares(self, rounds: int) -> dict[frozenset[str], float]:
        seen = [self.round() for _ in range(rounds)]
        return {asked: seen.count(asked) / rounds for asked in seen}


def joined(*drafters: str) -> Choice:
    choice = Choice(Records(), auto=True)
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
    assert play.shares(100).get(frozenset(["a"]), 0) > 0.8
    luck["b"], luck["a"] = sometimes(0.9, 6), sometimes(0.0, 1)
    play.shares(400)
    assert play.choice._best == {"b"}


def test_useless_drafters_are_not_waited_for_once_plain_is_known() -> None:
    play = Play({"a": sometimes(0.02, 1)}, {"a": 0.02})
    play.pool.plain_step.observe(STEP, 1.0)
    play.begin()
    play.shares(30)
    assert play.shares(300)[frozenset()] > 0.9


def test_the_pool_knows_for_the_next_answer() -> None:
    play = Play(
        {"quick": sometimes(0.5, 3), "slow": sometimes(0.5, 1)}, {"quick": 0.001, "slow": 0.04}
    )
    play.shares(200)
    play.begin()
    play.round()
    assert play.shares(8)[frozenset(["quick"])] == 1.0


@pytest.mark.parametrize("chosen", ["a", "b"])
def test_all_are_judged_whoever_was_verified(chosen: str) -> None:
    """A tree is followed beyond the commit of its own round, until the answer leaves it."""
    choice = joined("a", "b")
    trees = {"a": TokenTree.chain([7, 8, 9, 3], [0.5] * 4), "b": TokenTree.chain([1], [0.5])}
    for name, tree in trees.items():
        choice.proposed(name, 2, tree, 0.001)
    # Nobody's tokens were verified: the target went on alone, one token a round.
    for tokens in ([5, 5, 7], [5, 5, 7, 8], [5, 5, 7, 8, 9]):
        choice.committed(tokens, STEP, False)
        assert choice._own.reach == {}
    choice.committed([5, 5, 7, 8, 9, 4], STEP, False)
    reach = {tuple(sorted(s)): average.value for s, average in choice._own.reach.items()}
    assert reach == {("a",): 3.0, ("b",): 0.0, ("a", "b"): 3.0}


def test_a_drafter_that_is_lost_is_not_asked() -> None:
    choice = joined("a", "b")
    choice.lose(["a"])
    assert choice.asked == {"b"}


def test_a_tree_with_branches_is_followed_along_the_answer() -> None:
    choice = joined("a")
    tree = TokenTree((1, 2, 3, 4), (ANCHOR, ANCHOR, 1, 2), (0.5, 0.4, 0.3, 0.2))
    choice.proposed("a", 0, tree, 0.001)
    choice.committed([2, 3, 9], STEP, True)
    assert choice._own.reach[frozenset("a")].value == 2.0


def test_of_many_drafters_not_every_set_is_weighed() -> None:
    choice = joined(*map(str, range(8)))
    for n in range(8):
        choice.proposed(str(n), 0, TokenTree.chain([n], [0.5]), 0.001)
    choice.committed([3, 3], STEP, True)
    assert len(choice._own.reach) == 9


def test_waiting_is_worth_the_steps_that_it_saves() -> None:
    choice = Choice(Records(), auto=False)
    choice.join(["a", "b"])
    assert choice.worth_s() is None
    assert choice.delay_s() == 0.0
    choice.committed([1], 0.010, False)
    for base in range(1, 60):
        for name, delay in (("a", 0.002), ("b", 0.007)):
            choice.proposed(name, base, TokenTree.chain([base, 101], [0.5] * 2), delay)
        choice.committed([*range(base + 1)], 0.012, True)
    # Each round one token is reached: it saves a plain step, and costs what its rows add.
    assert choice.worth_s() == pytest.approx(0.010 - 0.002, rel=0.1)
    assert choice.delay_s() == pytest.approx(0.007, rel=0.1)
