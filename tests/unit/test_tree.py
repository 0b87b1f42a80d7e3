import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.tree import ANCHOR, TokenTree


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> TokenTree:
    """Well-formed trees over few tokens, so that paths meet often."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    taken: set[tuple[int, int]] = set()
    for node in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(ANCHOR, node - 1))
        token = draw(st.integers(0, 4))
        if parent >= len(tokens) or (parent, token) in taken:
            continue
        taken.add((parent, token))
        above = 1.0 if parent == ANCHOR else scores[parent]
        tokens.append(token)
        parents.append(parent)
        scores.append(above * draw(st.floats(0.1, 1.0)))
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores))


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Every path of a tree with its score."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(() if parent == ANCHOR else found[parent]), token))
    return dict(zip(found, tree.scores, strict=True))


def test_chain_has_one_path() -> None:
    tree = TokenTree.chain([5, 6, 7], [0.9, 0.5, 0.1])
    assert tree.parents == (-1, 0, 1)
    assert tree.depths() == [1, 2, 3]
    assert tree.child(ANCHOR, 5) == 0
    assert tree.child(0, 7) is None
    assert tree.child(1, 7) == 2


@given(trees(), st.integers(0, 12), st.integers(0, 6))
def test_cut_keeps_the_best_nodes_and_stays_a_tree(tree: TokenTree, nodes: int, depth: int) -> None:
    cut = tree.cut(nodes, depth)
    cut.check(vocab_size=5, max_nodes=nodes)
    kept, all_paths = paths(cut), paths(tree)
    assert all(all_paths[path] == score for path, score in kept.items())
    assert all(len(path) <= depth for path in kept)
    left_out = [s for path, s in all_paths.items() if path not in kept and len(path) <= depth]
    assert len(kept) == min(nodes, len(kept) + len(left_out))
    assert not left_out or not kept or min(kept.values()) >= max(left_out)


@given(trees(), trees())
def test_nodes_in_another_tree_are_those_whose_path_it_has(
    one: TokenTree, other: TokenTree
) -> None:
    there = set(paths(other))
    assert one.nodes_in(other) == tuple(
        node for node, path in enumerate(paths(one)) if path in there
    )


@given(trees(), st.lists(st.integers(0, 4), max_size=4))
def test_rebase_is_what_hangs_under_the_committed_path(tree: TokenTree, tokens: list[int]) -> None:
    rebased = tree.rebase(tokens)
    all_paths, prefix = paths(tree), tuple(tokens)
    if prefix and prefix not in all_paths:
        assert rebased is None
        return
    assert rebased is not None
    rebased.check(vocab_size=5, max_nodes=len(tree))
    root = all_paths[prefix] if prefix else 1.0
    below = {p[len(prefix) :]: s for p, s in all_paths.items() if p[: len(prefix)] == prefix}
    below.pop((), None)
    assert paths(rebased) == pytest.approx({path: score / root for path, score in below.items()})


@given(trees(), trees())
def test_merge_holds_every_path_once(a: TokenTree, b: TokenTree) -> None:
    merged = a.merge(b)
    merged.check(vocab_size=5, max_nodes=len(a) + len(b))
    expected = paths(a)
    for path, score in paths(b).items():
        expected[path] = max(score, expected.get(path, 0.0))
    assert paths(merged) == expected


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        (TokenTree((1,), (), ()), "equally many"),
        (TokenTree((1, 2, 3), (-1, 0, 1), (1, 1, 1)), "at most 2"),
        (TokenTree((9,), (-1,), (1.0,)), "below 5"),
        (TokenTree((1,), (0,), (1.0,)), "parents come before"),
        (TokenTree((1,), (-2,), (1.0,)), "parents come before"),
        (TokenTree((1,), (-1,), (float("nan"),)), "probabilities"),
        (TokenTree((1,), (-1,), (1.5,)), "probabilities"),
        (TokenTree((1, 1), (-1, -1), (1.0, 1.0)), "repeats token 1"),
    ],
)
def test_check_names_what_is_wrong(tree: TokenTree, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tree.check(vocab_size=5, max_nodes=2)
