"""Following a prediction: where an answer stands in it, what is said to come, and how sure that is."""

import random
from collections.abc import Sequence

from tests import tiny
from workers import limits
from workers.draft.drafter import Ask
from workers.draft.drafters.prediction import PredictionDrafter
from workers.prediction import Alignment
from workers.request import SamplingParams
from workers.tree import TokenTree

TEXT = list(range(100, 140))


def after(answer: Sequence[int], prediction: Sequence[int] = TEXT, most: int = 4) -> list[int]:
    """What is said to come after an answer."""
    alignment = Alignment(prediction)
    alignment.observe(answer)
    return list(alignment.upcoming(most)[0])


def test_it_begins_at_the_beginning_and_follows() -> None:
    assert after([]) == TEXT[:4]
    assert after(TEXT[:7]) == TEXT[7:11]
    assert after(TEXT[:38]) == TEXT[38:]
    assert after(TEXT) == []
    assert after([], []) == []


def test_a_changed_an_added_and_a_missing_stretch_are_passed() -> None:
    changed = [*TEXT[:10], 1, 2, 3, *TEXT[13:15]]
    added = [*TEXT[:10], 1, 2, 3, *TEXT[10:12]]
    missing = [*TEXT[:10], *TEXT[20:22]]
    assert after(changed[:-1]) == []
    assert after(changed) == TEXT[15:19]
    assert after(added) == TEXT[12:16]
    assert after(missing) == TEXT[22:26]


def test_the_longest_match_wins_and_then_the_next_one_ahead() -> None:
    line = [1, 2, 3]
    text = [*line, 10, *line, 11, 50, *line, 12, 9, *line, 13]
    # Left behind the second line: of the two that are ahead the nearer, unless more of the other is said.
    assert after([*line, 10, *line, 99, *line], text, 1) == [12]
    assert after([*line, 10, *line, 99, 9, *line], text, 1) == [13]
    # Nothing ahead: what is behind.
    assert after([*text, 7, 3, 10], text, 1) == [1]


def test_how_sure_it_is_follows_how_often_it_was_right() -> None:
    def first(answer: Sequence[int]) -> float:
        alignment = Alignment(TEXT)
        alignment.observe(answer)
        return alignment.upcoming(1)[1][0]

    assert first([]) < first(TEXT[:10]) < first(TEXT[:30]) < 1
    assert first([1, *TEXT[:10]]) < first(TEXT[:10])
    scores = Alignment(TEXT).upcoming(8)[1]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)


def test_what_appeared_is_counted_once() -> None:
    alignment = Alignment(TEXT)
    alignment.observe([*TEXT[:10], 1, 2, *TEXT[12:20]])
    assert alignment.accepted == 18
    alignment.observe(TEXT[12:20])
    assert alignment.accepted == 18
    alignment.observe([3, 3, *TEXT])
    assert alignment.accepted == len(TEXT)


def test_texts_of_few_tokens_cost_no_more() -> None:
    """Every pair occurs everywhere: the places that are looked at are limited."""
    rng = random.Random(0)
    text = [rng.randrange(2) for _ in range(20000)]
    alignment = Alignment(text)
    alignment.observe([rng.randrange(2) for _ in range(2000)])
    assert 0 < alignment.accepted <= len(text)


def drafted(prediction: Sequence[int], answer: Sequence[int], max_depth: int) -> TokenTree:
    drafter = PredictionDrafter()
    drafter.predicted(1, prediction)
    drafter.open(1, [7, 8], SamplingParams())
    drafter.observe(1, answer, ())
    (tree,) = drafter.propose([Ask(1, 5, max_depth, False)])
    drafter.close(1)
    assert tree is not None
    return tree


def test_it_drafts_far_whatever_others_may() -> None:
    text = list(range(200))
    tree = drafted(text, text[:3], 1000)
    assert list(tree.tokens) == text[3 : 3 + limits.MAX_PREDICTED_NODES]
    tree.check(200, limits.MAX_TREE_NODES)
    assert drafted(text, text[:3], 5).tokens == (3, 4, 5, 6, 7)
    assert not drafted(text, text[:3], 0)
    assert not drafted(text, [500, 501], 1000)


def test_sessions_do_not_mix() -> None:
    drafter = PredictionDrafter()
    for session in (1, 2):
        drafter.predicted(session, TEXT[session:])
        drafter.open(session, [7], SamplingParams())
    first, second = drafter.propose([Ask(1, 5, 3, False), Ask(2, 5, 3, False)])
    assert first is not None
    assert second is not None
    assert first.tokens[1:] == second.tokens[:-1]
    drafter.close(1)
    drafter.observe(2, TEXT[2:4], ())
    assert drafter.propose([Ask(2, 5, 1, False)])[0] == TokenTree.chain([104], [6 / 7])


def test_a_text_is_followed_through_its_own_tokens() -> None:
    tokenizer = tiny.byte_level_tokenizer()
    before = "def area(w, h):\n    return w * h\n\ndef name():\n    return 'box'\n"
    edited = before.replace("area(w, h)", "area(width, height)").replace("w * h", "width * height")
    alignment = Alignment(tokenizer(before).input_ids)
    alignment.observe(tokenizer(edited).input_ids)
    kept = len("def area(w, h):\n    return ") + len("\n\ndef name():\n    return 'box'\n")
    assert alignment.accepted >= 0.9 * kept
