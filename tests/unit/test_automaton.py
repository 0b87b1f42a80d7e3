"""Suffix automata, against the definition."""

from hypothesis import given
from hypothesis import strategies as st

from workers.draft.automaton import SEPARATOR, SuffixAutomaton
from workers.draft.counting import MIN_MATCH, Match, Place

TEXT = st.lists(st.integers(0, 2), max_size=40)


def followed_by(text: list[int], sequence: list[int]) -> dict[int, int]:
    """What follows a sequence in a text, with its count."""
    counts: dict[int, int] = {}
    for start in range(len(text) - len(sequence)):
        if text[start : start + len(sequence)] == sequence:
            follower = text[start + len(sequence)]
            counts[follower] = counts.get(follower, 0) + 1
    return counts


def check_place(place: Place, text: list[int], sequence: list[int], depth: int) -> None:
    """A place knows what follows its sequence, and so do those behind it."""
    expected = followed_by(text, sequence)
    total, followers = place.followers()
    assert total == sum(expected.values())
    assert {token: count for token, count, _ in followers} == {
        token: count for token, count in expected.items() if token != SEPARATOR
    }
    assert [-count for _, count, _ in followers] == sorted(-count for _, count, _ in followers)
    for token, _, behind in followers if depth else ():
        check_place(behind, text, [*sequence, token], depth - 1)


def check_matches(found: list[Match], text: list[int], tail: list[int], whole: bool) -> None:
    """The longest end of `tail` in `text` comes first, and shorter ones wherever more follows."""
    occurring = [
        length
        for length in range(MIN_MATCH, len(tail) + 1)
        if any(
            text[i : i + length] == tail[-length:]
            for i in range(len(text) - length + (1 if whole else 0))
        )
    ]
    assert [match.length for match in found[:1]] == occurring[-1:]
    assert [match.length for match in found] == sorted(
        {match.length for match in found}, reverse=True
    )
    for match in found:
        check_place(match.place, text, tail[-match.length :], 2)


@given(TEXT, TEXT)
def test_a_growing_text_finds_its_own_end(first: list[int], later: list[int]) -> None:
    automaton = SuffixAutomaton(first)
    for token in later:
        automaton.extend([token])
    text = first + later
    assert automaton.num_tokens == len(text)
    check_matches(list(automaton.matches()), text, text, whole=False)


@given(st.lists(TEXT, max_size=3), TEXT)
def test_the_end_of_another_text_is_found_in_several(
    texts: list[list[int]], tail: list[int]
) -> None:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.extend([*text, SEPARATOR])
    joined = [token for text in texts for token in (*text, SEPARATOR)]
    check_matches(list(automaton.find(tail)), joined, tail, whole=True)


def test_a_text_of_one_token_takes_linear_time() -> None:
    automaton = SuffixAutomaton([5] * 5000)
    match = next(iter(automaton.matches()))
    assert match.length == 4999
    # Its states are counted as far as the limit goes: never more follows than there is.
    total, followers = match.place.followers()
    assert [(token, count) for token, count, _ in followers] == [(5, total)]


@given(st.lists(st.integers(0, 3), max_size=300))
def test_memory_is_proportional_to_the_text(tokens: list[int]) -> None:
    assert len(SuffixAutomaton(tokens)._link) <= 2 * len(tokens) + 1
