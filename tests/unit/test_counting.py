"""Drafting from counts: probabilities, limits, and whose answers are drafted from."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.draft.automaton import SuffixAutomaton
from workers.draft.calibration import OTHER_TEXTS, SAME_TEXT, Doubt
from workers.draft.drafter import Ask
from workers.draft.drafters.suffix import SuffixDrafter
from workers.draft.history import History
from workers.request import SamplingParams
from workers.tree import ANCHOR, TokenTree

SAMPLING = SamplingParams()


def propose(
    tokens: list[int],
    max_nodes: int = 8,
    max_depth: int = 8,
    chain: bool = False,
    drafter: SuffixDrafter | None = None,
    key: str = "",
) -> TokenTree:
    """What is proposed behind tokens; the session stays open."""
    drafter = drafter or SuffixDrafter(None)
    drafter.belongs_to(1, key)
    drafter.open(1, tokens, SAMPLING)
    tree = drafter.propose([Ask(1, max_nodes, max_depth, chain)])[0]
    assert tree is not None
    return tree


def answer(drafter: SuffixDrafter, key: str, tokens: list[int]) -> None:
    """An answer of a key, from its first token on."""
    drafter.belongs_to(9, key)
    drafter.open(9, [], SAMPLING)
    for token in tokens:
        drafter.observe(9, [token], ())
        drafter.propose([Ask(9, 8, 8, False)])
    drafter.close(9)


def test_what_followed_more_often_is_likelier() -> None:
    text = [9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2, 3, 6, 1, 2, 3, 5, 1, 2]
    tree = propose(text)
    assert tree.tokens[0] == 3
    likelier, other = tree.child(ANCHOR, 3), tree.child(ANCHOR, 4)
    assert likelier is not None
    assert other is not None
    assert tree.scores[likelier] > 2 * tree.scores[other]
    assert tree.scores[likelier] + tree.scores[other] < 1


def test_a_longer_match_is_likelier_and_looks_further() -> None:
    rng = random.Random(1)
    passage = rng.sample(range(100, 200), 40)
    trees = [propose([*passage, 7, *passage[:length]], 64, 64) for length in (2, 5, 12)]
    assert [tree.tokens[0] for tree in trees] == [passage[2], passage[5], passage[12]]
    assert [tree.depth() for tree in trees] == sorted({tree.depth() for tree in trees})
    assert trees[0].scores[0] < trees[1].scores[0] < trees[2].scores[0]


def test_a_shorter_match_adds_what_the_longer_one_leaves_open() -> None:
    # 1 2 3 was followed by 4 once, 2 3 by 5 more often.
    tree = propose([1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3, 5, 7, 1, 2, 3])
    first, second = tree.child(ANCHOR, 4), tree.child(ANCHOR, 5)
    assert first is not None
    assert second is not None
    assert tree.scores[first] > tree.scores[second]


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 20), st.integers(0, 4))
def test_trees_are_well_formed_and_keep_their_limits(
    tokens: list[int], nodes: int, depth: int
) -> None:
    history = History(1024)
    history.learn("", [2, 1, 0, *tokens, 1, 2])
    for chain in (False, True):
        tree = propose(tokens, nodes, depth, chain, SuffixDrafter(history))
        # What one step does not verify is for the next ones.
        tree.check(3, 4 * nodes)
        assert tree.depth() <= depth
        assert not chain or tree.parents == tuple(range(-1, len(tree) - 1))
        for node, parent in enumerate(tree.parents):
            assert parent == ANCHOR or tree.scores[node] <= tree.scores[parent]


def test_nothing_is_proposed_where_nothing_repeats() -> None:
    assert len(propose([1, 2, 3, 4, 5])) == 0
    assert len(propose([])) == 0


def test_doubt_follows_what_happens() -> None:
    for rate in (0.3, 0.9):
        doubt, rng = Doubt(SAME_TEXT), random.Random(0)
        for _ in range(4000):
            doubt.observe(4, 2, rng.random() < rate)
        assert 2 / (2 + doubt.at(4)) == pytest.approx(rate, abs=0.1)
    for at_first in (SAME_TEXT, OTHER_TEXTS):
        doubts = [Doubt(at_first).at(length) for length in range(1, 40)]
        assert doubts == sorted(doubts, reverse=True)


def test_a_drafter_becomes_less_sure_when_it_is_wrong() -> None:
    drafter = SuffixDrafter(None)
    before = propose([1, 2, 3, 1, 2], drafter=drafter).scores[0]
    rng = random.Random(0)
    for _ in range(300):
        drafter.open(2, [1, 2, 3, 1, 2], SAMPLING)
        drafter.propose([Ask(2, 8, 8, False)])
        drafter.observe(2, [rng.randrange(4, 100)], ())
        drafter.close(2)
    assert propose([1, 2, 3, 1, 2], drafter=drafter).scores[0] < 0.7 * before


def test_answers_are_drafted_from_if_learning_is_on() -> None:
    said = list(range(5, 20))
    learning, forgetful = SuffixDrafter(History(1024)), SuffixDrafter(None)
    for drafter in (learning, forgetful):
        answer(drafter, "", said)
    begun = [1, *said[:8]]
    assert propose(begun, drafter=learning).tokens[:2] == (13, 14)
    assert len(propose(begun, drafter=forgetful)) == 0


def test_what_was_asked_is_not_learned() -> None:
    """But its last tokens, so that the beginning of an answer is found."""
    drafter = SuffixDrafter(History(1024))
    asked = list(range(100, 150))
    drafter.open(2, asked, SAMPLING)
    drafter.close(2)
    assert drafter._history.num_tokens == 0
    drafter.open(2, asked, SAMPLING)
    drafter.observe(2, [1, 2, 3], ())
    drafter.close(2)
    assert propose(asked, drafter=drafter).tokens[:3] == (1, 2, 3)
    assert len(propose(asked[:20], drafter=drafter)) == 0


KEYS = st.sampled_from(["a", "b", ""])


@given(st.lists(st.tuples(KEYS, st.lists(st.integers(0, 3), max_size=12)), max_size=8), KEYS)
def test_a_key_is_never_proposed_what_another_was_told(
    answers: list[tuple[str, list[int]]], key: str
) -> None:
    """Every key's tokens are of its own hundred: what is proposed says whose it is."""
    hundred = {"": 0, "a": 100, "b": 200}
    drafter = SuffixDrafter(History(1024))
    shared = [901, 902]
    for owner, tokens in answers:
        answer(drafter, owner, [*shared, *(hundred[owner] + token for token in tokens)])
    tree = propose(shared, drafter=drafter, key=key)
    assert all(token // 100 * 100 == hundred[key] for token in tree.tokens)
    # And its own it is proposed.
    assert bool(len(tree)) == any(owner == key and tokens for owner, tokens in answers)


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    history = History(1024)
    rng = random.Random(0)
    for number in range(300):
        history.learn(f"key{number % 7}", [rng.randrange(10**6) for _ in range(rng.randrange(90))])
        assert history.num_tokens <= 1024
    history.learn("long", list(range(5000)))
    assert history.num_tokens <= 1024
    assert any(True for text in history.of("long") for _ in text.find([4998, 4999]))
    assert not any(True for text in history.of("long") for _ in text.find([0, 1]))
    for _ in range(20):
        history.learn("other", list(range(10000, 10200)))
    assert not history.of("long")
    assert 512 < history.num_tokens <= 1024


def test_the_newest_of_a_key_comes_first() -> None:
    history = History(64)
    for start in (0, 100, 200):
        history.learn("k", list(range(start, start + 15)))
    texts = history.of("k")
    assert all(isinstance(text, SuffixAutomaton) for text in texts)
    firsts = [next(s for s in (0, 100, 200) if list(t.find([s, s + 1]))) for t in texts]
    assert all(later > earlier for later, earlier in pairwise(firsts))


def test_closed_sessions_are_forgotten() -> None:
    drafter = SuffixDrafter(None)
    drafter.belongs_to(1, "a")
    drafter.open(1, [1, 2], SAMPLING)
    drafter.close(1)
    drafter.close(1)
    assert not drafter._sessions
    assert not drafter._keys
