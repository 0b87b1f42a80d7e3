"""Lookahead decoding: a window and its n-grams, in the pass that verifies; and no token changed."""

from tests import tiny
from workers.draft.config import LookaheadConfig
from workers.draft.drafter import Ask
from workers.draft.drafters.lookahead import LookaheadDrafter
from workers.request import SamplingParams
from workers.rpc.messages import Verified
from workers.tree import ANCHOR, TokenTree

tokenizer = tiny.byte_level_tokenizer()
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello", "0123456789 " * 8)]
SAMPLING = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]
DTYPES = ["float32", "bfloat16"]
BESIDE = [LookaheadConfig("lookahead", window=4, ngram=3, guesses=4)]
ASK = Ask(1, 64, 64, chain=False)


def edges(tree: TokenTree) -> set[tuple[int, ...]]:
    """The paths of a tree."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(() if parent == ANCHOR else paths[parent]), token))
    return set(paths)


def say(tree: TokenTree, **behind: int) -> Verified:
    """A step after three tokens whose rows say 99, but for those behind tokens by name."""
    choices = [behind.get("anchor", 99), *(behind.get(f"t{token}", 99) for token in tree.tokens)]
    return Verified(3, tree, tuple(choices))


def test_the_window_is_a_tree_as_the_papers_mask_has_it() -> None:
    """By hand, three columns and three levels: level 0 grows columns, they make n-grams, the window moves."""
    drafter = LookaheadDrafter(3, 4, 2)
    drafter.open(1, [10, 11, 12], SamplingParams())
    (tree,) = drafter.propose([ASK])
    # Level 0 is copied from the text; its column 0 is the last token itself.
    assert edges(tree) == {(11,), (11, 12)}
    drafter.verified(1, say(tree, anchor=20, t11=21, t12=22))
    (tree,) = drafter.propose([ASK])
    # Level 1 hangs under level 0, each token in its column.
    assert edges(tree) == {(20,), (11,), (11, 21), (11, 12), (11, 12, 22)}
    drafter.verified(1, say(tree, t20=30, t21=31, t22=32))
    (tree,) = drafter.propose([ASK])
    assert {(20, 30), (11, 21, 31), (11, 12, 22, 32)} <= edges(tree)
    drafter.verified(1, say(tree, t30=40, t31=41, t32=42))
    # Level 0 is gone: what was level 1 is the chain now, and the n-grams are known by their first tokens.
    drafter.observe(1, [11], [])
    (tree,) = drafter.propose([ASK])
    assert edges(tree) == {
        (21,), (21, 31), (21, 31, 41),  # the n-gram behind 11, and column 1
        (21, 22), (21, 22, 32), (21, 22, 32, 42),
        (30,), (30, 40),
    }  # fmt: skip
    drafter.close(1)


def test_rows_that_were_not_verified_make_no_ngrams() -> None:
    drafter = LookaheadDrafter(3, 2, 2)
    drafter.open(1, [10, 11, 12], SamplingParams())
    (tree,) = drafter.propose([ASK])
    drafter.verified(1, Verified(3, tree.cut(1, 64), (11, 21)))
    # Of column 2 nothing was said: its token stays.
    assert drafter._windows[1].levels == [[11, 21, 12]]
    assert drafter._windows[1].pool == {12: {(11,): None}, 11: {(21,): None}}
    drafter.observe(1, [11], [])
    assert edges(drafter.propose([ASK])[0]) == {(21,), (21, 12)}


def test_of_one_token_the_latest_ngrams_are_kept() -> None:
    drafter = LookaheadDrafter(1, 2, 2)
    drafter.open(1, [5], SamplingParams())
    for follows in (1, 2, 3, 2):
        drafter.propose([ASK])
        length = len(drafter._windows[1].tokens)
        drafter.verified(1, Verified(length, TokenTree(), (follows,)))
        drafter.observe(1, [follows, 5], [])
    assert drafter._windows[1].known() == [(2,), (3,)]
