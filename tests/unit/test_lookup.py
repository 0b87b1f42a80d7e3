import random

from hypothesis import given
from hypothesis import strategies as st

from workers.draft.drafter import Ask
from workers.draft.drafters.lookup import (
    MAX_MATCH,
    MAX_OCCURRENCES,
    MIN_MATCH,
    LookupDrafter,
    LookupIndex,
    repeat_probability,
)
from workers.request import SamplingParams
from workers.tree import ANCHOR

SAMPLING = SamplingParams()


def brute_force(tokens: list[int]) -> list[tuple[int, int]]:
    """Every earlier place where the end of the sequence occurred, from the definition."""
    found = []
    for end in range(MIN_MATCH, len(tokens)):
        match = 0
        while match < min(MAX_MATCH, end) and tokens[end - 1 - match] == tokens[-1 - match]:
            match += 1
        if match >= MIN_MATCH:
            found.append((match, end))
    return sorted(found[-MAX_OCCURRENCES:], reverse=True)


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=20))
def test_matches_are_the_longest_then_the_latest(first: list[int], later: list[int]) -> None:
    index = LookupIndex(first)
    for token in later:
        index.extend([token])
    assert index.matches() == brute_force(first + later)


def propose(tokens: list[int], max_nodes: int = 8, max_depth: int = 8, chain: bool = False):
    drafter = LookupDrafter()
    drafter.open(1, tokens[:2], SAMPLING)
    drafter.observe(1, tokens[2:], ())
    return drafter.propose([Ask(1, max_nodes, max_depth, chain)])[0]


def test_the_most_recent_continuation_comes_first() -> None:
    tree = propose([1, 2, 3, 4, 1, 2, 5, 6, 1, 2])
    assert tree.child(ANCHOR, 5) == 0
    assert tree.child(ANCHOR, 3) is not None
    assert tree.scores[0] > tree.scores[tree.child(ANCHOR, 3)]


def test_a_longer_match_beats_a_later_one() -> None:
    tree = propose([9, 1, 2, 3, 7, 7, 1, 2, 5, 7, 9, 1, 2], chain=True)
    assert tree.tokens[0] == 3


def test_several_continuations_share_what_they_have_in_common() -> None:
    tree = propose([1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2], max_nodes=6)
    node = tree.child(ANCHOR, 3)
    assert tree.parents.count(ANCHOR) == 1
    assert {tree.tokens[i] for i in range(len(tree)) if tree.parents[i] == node} == {4, 5}


def test_limits_are_kept() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(3) for _ in range(300)]
    for nodes in (0, 1, 5, 20):
        for depth in (0, 1, 4):
            for chain in (False, True):
                tree = propose(tokens, nodes, depth, chain)
                # What one step does not verify is for the next ones.
                tree.check(3, 4 * nodes)
                assert tree.depth() <= depth
                assert not chain or tree.parents == tuple(range(-1, len(tree) - 1))


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    assert len(propose([1, 2, 3, 4, 5])) == 0


def test_scores_rise_with_the_match() -> None:
    rates = [repeat_probability(match) for match in range(40)]
    assert rates == sorted(rates)
    assert rates[-1] < 1


def test_a_closed_session_is_forgotten() -> None:
    drafter = LookupDrafter()
    drafter.open(1, [1, 2], SAMPLING)
    drafter.close(1)
    drafter.close(1)
    assert not drafter._indexes
