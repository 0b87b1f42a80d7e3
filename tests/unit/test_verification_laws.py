"""Rules for drawn tokens, proved by enumeration: all outcomes together have the target's law.

Nothing is sampled: a rule's luck is scripted, one script after the other. Broken rules, each with a mistake
that implementations have made, do not add up.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from workers import verification
from workers.tree import ANCHOR, Law, TokenTree

VOCAB = 3
EXACT = 1e-12
BROKEN = 1e-6

Context = tuple[int, ...]
Outcome = dict[Context, float]
Rule = Callable[..., verification.Verdict]


def law_of(name: str, context: Context) -> torch.Tensor:
    """A law of the target ("p") or the drafter ("q") that depends on all that came before."""
    seed = sum((token + 1) * 7**place for place, token in enumerate(context)) + 1000 * ord(name)
    raw = torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (raw + 0.05) / (raw + 0.05).sum()


@dataclass
class Script:
    """Luck that follows a script as far as it goes, and takes the first choice behind it."""

    script: list[int]
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    options: list[int] = field(default_factory=list)

    def _choose(self, probabilities: list[float]) -> int:
        possible = [i for i, p in enumerate(probabilities) if p > 0.0]
        place = len(self.taken)
        choice = self.script[place] if place < len(self.script) else 0
        self.taken.append(choice)
        self.options.append(len(possible))
        self.probability *= probabilities[possible[choice]]
        return possible[choice]

    def accept(self, node: int, probability: float) -> bool:
        return self._choose([probability, 1.0 - probability]) == 0

    def draw(self, depth: int, law: torch.Tensor) -> int:
        return self._choose(law.tolist())


def every_outcome(run: Callable[[Script], Context]) -> Iterator[tuple[float, Context]]:
    """What a run gives under every script."""
    waiting: list[list[int]] = [[]]
    while waiting:
        luck = Script(waiting.pop())
        result = run(luck)
        yield luck.probability, result
        for place in range(len(luck.script), len(luck.taken)):
            for other in range(1, luck.options[place]):
                waiting.append([*luck.taken[:place], other])


def drawn_trees(
    width: int, depth: int, drafter: str = "q", context: Context = ()
) -> Iterator[tuple[float, list[tuple[int, list]]]]:
    """Every tree of `width` children a node, drawn without replacement, and how likely it is."""
    if depth == 0:
        yield 1.0, []
        return
    q = law_of(drafter, context)
    for tokens in itertools.permutations(range(VOCAB), width):
        probability, left = 1.0, 1.0
        for token in tokens:
            probability *= float(q[token]) / left
            left -= float(q[token])
        below = [
            list(drawn_trees(width, depth - 1, drafter, (*context, token))) for token in tokens
        ]
        for subtrees in itertools.product(*below):
            weight = probability
            for share, _ in subtrees:
                weight *= share
            yield weight, [(t, sub) for t, (_, sub) in zip(tokens, subtrees, strict=True)]


def token_tree(nested: list[tuple[int, list]], drafter: str = "q") -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    laws: list[Law] = []
    level = [(ANCHOR, (), nested)]
    while level:
        following = []
        for parent, context, children in level:
            law = Law(tuple(range(VOCAB)), tuple(law_of(drafter, context).tolist()))
            for token, below in children:
                tokens.append(token)
                parents.append(parent)
                laws.append(law)
                following.append((len(tokens) - 1, (*context, token), below))
        level = following
    return TokenTree(tuple(tokens), tuple(parents), (1.0,) * len(tokens), tuple(laws))


Drawings = Iterator[tuple[float, TokenTree]]


def drawings(width: int, depth: int, drafter: str = "q") -> Drawings:
    for weight, nested in drawn_trees(width, depth, drafter):
        yield weight, token_tree(nested, drafter)


def error(rule: Rule, width: int, depth: int) -> tuple[float, float]:
    """(largest error of the law of the first depth + 1 tokens, expected accepted tokens)."""
    return error_over(drawings(width, depth), rule, depth)


def targets_law(context: Context) -> torch.Tensor:
    return law_of("p", context)


def error_over(
    trees: Drawings,
    rule: Rule,
    depth: int,
    law: Callable[[Context], torch.Tensor] = targets_law,
) -> tuple[float, float]:
    """The same over these trees, of which each is as likely as it says, where the target has this law."""
    length = depth + 1
    found: Outcome = {}
    accepted = 0.0

    def add(tokens: Context, probability: float) -> None:
        """Tokens beyond a round's are the target's."""
        if len(tokens) >= length:
            found[tokens[:length]] = found.get(tokens[:length], 0.0) + probability
            return
        for token, share in enumerate(law(tokens).tolist()):
            add((*tokens, token), probability * share)

    for weight, tree in trees:

        def run(luck: Script, tree: TokenTree = tree) -> Context:
            def law_after(path: Context) -> torch.Tensor:
                return law(tuple(tree.tokens[node] for node in path))

            verdict = rule(tree, law_after, luck, lambda token: True)
            assert len(verdict.tokens) == len(verdict.accepted) + 1
            return verdict.tokens

        for probability, tokens in every_outcome(run):
            add(tokens, weight * probability)
            accepted += weight * probability * (len(tokens) - 1)
    worst = 0.0
    for context in itertools.product(range(VOCAB), repeat=length):
        right = 1.0
        for place, token in enumerate(context):
            right *= float(law(context[:place])[token])
        worst = max(worst, abs(found.get(context, 0.0) - right))
    return worst, accepted


@pytest.mark.parametrize(
    ("rule", "width", "depth"),
    [
        (verification.rejection, 1, 1),
        (verification.rejection, 1, 3),
        (verification.rejection, 2, 1),
        (verification.rejection, 3, 1),
        (verification.rejection, 2, 2),
        (verification.block, 1, 1),
        (verification.block, 1, 2),
        (verification.block, 1, 3),
        (verification.block, 2, 2),
    ],
)
def test_every_outcome_adds_up_to_the_targets_law(rule: Rule, width: int, depth: int) -> None:
    worst, accepted = error(rule, width, depth)
    assert worst < EXACT
    assert accepted > 0.0


def side_by_side(
    first: tuple[int, int, str], second: tuple[int, int, str]
) -> Iterator[tuple[float, TokenTree]]:
    """All that two drafters draw, each for itself."""
    for (one, tree), (two, other) in itertools.product(drawings(*first), drawings(*second)):
        yield one * two, tree.beside(other)


PAIRS = [
    ((1, 1, "q"), (1, 1, "r")),
    ((1, 1, "q"), (1, 1, "q")),
    ((2, 1, "q"), (2, 1, "r")),
    ((1, 2, "q"), (1, 2, "r")),
    ((2, 2, "q"), (1, 2, "r")),
    ((1, 2, "q"), (1, 1, "q")),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_draws_of_several_drafters_add_up_to_the_targets_law(
    first: tuple[int, int, str], second: tuple[int, int, str]
) -> None:
    """With replacement between them: both may draw the same token, and do."""
    depth = max(first[1], second[1])
    for rule in (verification.rejection, verification.block):
        worst, accepted = error_over(side_by_side(first, second), rule, depth)
        assert worst < EXACT
        alone = error_over(drawings(*first), verification.rejection, depth)[1]
        assert accepted > alone + BROKEN


def test_what_one_picked_stands_beside_what_another_drew() -> None:
    picked = TokenTree((1, 0, 2), (ANCHOR, ANCHOR, 0), (0.5, 0.4, 0.3))
    trees = ((weight, tree.beside(picked)) for weight, tree in drawings(2, 2))
    assert error_over(trees, verification.rejection, 2)[0] < EXACT


def test_a_path_that_both_drew_is_one_row() -> None:
    chain = [(1, [(2, [])])]
    tree = token_tree(chain).beside(token_tree(chain, "r")).beside(token_tree([(1, [(0, [])])]))
    folded, became = tree.folded()
    assert folded.tokens == (1, 2, 0)
    assert folded.parents == (ANCHOR, 0, 0)
    assert became == [0, 1, 0, 1, 0, 2]
    assert not folded.laws


def test_a_block_is_never_shorter_than_one_by_one() -> None:
    for depth in (1, 2, 3):
        one_by_one = error(verification.rejection, 1, depth)[1]
        together = error(verification.block, 1, depth)[1]
        assert together >= one_by_one - EXACT
    assert together > one_by_one + BROKEN


def test_the_block_papers_own_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 are accepted one by one, 11/9 together."""
    laws = {"p": torch.tensor([1, 2]) / 3.0, "q": torch.tensor([2, 1]) / 3.0}
    monkeypatch.setattr(f"{__name__}.VOCAB", 2)
    monkeypatch.setattr(f"{__name__}.law_of", lambda name, _: laws[name].double())
    assert error(verification.rejection, 1, 2)[1] == pytest.approx(10 / 9, abs=1e-6)
    assert error(verification.block, 1, 2)[1] == pytest.approx(11 / 9, abs=1e-6)


def test_typical_acceptance_is_lossy() -> None:
    assert error(verification.typical, 2, 2)[0] > BROKEN


class Patched:
    """`rejection` with a `Drawn` that makes a mistake."""

    def __init__(self, drawn: type) -> None:
        self.drawn = drawn

    def __call__(self, *arguments: object) -> verification.Verdict:
        right = verification.Drawn
        verification.Drawn = self.drawn  # type: ignore[misc]
        try:
            return verification.rejection(*arguments)  # type: ignore[arg-type]
        finally:
            verification.Drawn = right  # type: ignore[misc]


class NeverDropped(verification.Drawn):
    def drop(self, token: int) -> None:
        """Draws without replacement, judged as draws with it."""


class NothingTaken(verification.Drawn):
    def taken_off(self, law: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """The bonus token is drawn from the target's whole law."""
        return law


class Softer(verification.Drawn):
    def __init__(self, law: Law) -> None:
        """The drafter's law as it was before the filters that the token was drawn through."""
        soft = torch.tensor(law.probabilities, dtype=torch.float64) ** 0.5
        super().__init__(Law(law.ids, tuple((soft / soft.sum()).tolist())))


def pruned(tree: TokenTree, law_after, chance, commit) -> verification.Verdict:
    """Of the children that were drawn only the likeliest is kept."""
    kept = []
    for node in (ANCHOR, *range(len(tree))):
        children = tree.children(node)
        if children and (node == ANCHOR or node in kept):
            law = tree.laws[children[0]]
            kept.append(
                max(children, key=lambda c: law.probabilities[law.ids.index(tree.tokens[c])])
            )
    return verification.rejection(
        tree._select(sorted(kept)), _under(tree, kept, law_after), chance, commit
    )


def unsure_dropped(tree: TokenTree, law_after, chance, commit) -> verification.Verdict:
    """A token that turned out unlikely is thrown away instead of tested."""
    sure = [
        node
        for node in range(len(tree))
        if tree.laws[node].probabilities[tree.laws[node].ids.index(tree.tokens[node])] > 0.3
    ]
    kept: list[int] = []
    for node in sure:
        if tree.parents[node] in (ANCHOR, *kept):
            kept.append(node)
    return verification.rejection(tree._select(kept), _under(tree, kept, law_after), chance, commit)


def _under(tree: TokenTree, kept: list[int], law_after):
    order = sorted(kept)
    return lambda path: law_after(tuple(order[node] for node in path))


def a_draw_a_row(tree: TokenTree, law_after, chance, commit) -> verification.Verdict:
    """Each child has a draw of the target's of its own: several chances where there is one."""
    children = tree.children(ANCHOR)
    for child in children:
        token = chance.draw(0, law_after(()))
        if token == tree.tokens[child]:
            last = chance.draw(1, law_after((child,)))
            return verification.Verdict((token, last), (child,), 1)
    return verification.Verdict((chance.draw(0, law_after(())),), (), 1)


def shared_luck(tree: TokenTree, law_after, chance, commit) -> verification.Verdict:
    """One number decides for all tokens of a chain."""
    weakest = 1.0
    for node in range(len(tree)):
        law = law_after(tuple(range(node)))
        drawn = verification.Drawn(tree.laws[node])
        weakest = min(weakest, float(law[tree.tokens[node]]) / drawn.probability(tree.tokens[node]))
    if chance.accept(0, min(1.0, weakest)):
        last = chance.draw(len(tree), law_after(tuple(range(len(tree)))))
        return verification.Verdict((*tree.tokens, last), tuple(range(len(tree))), 1)
    law = verification.Drawn(tree.laws[0]).taken_off(law_after(()))
    return verification.Verdict((chance.draw(0, law),), (), 1)


def block_without_weights(tree: TokenTree, law_after, chance, commit) -> verification.Verdict:
    """The last token that was accepted one by one counts, whatever came before it."""
    kept = 0
    for node in range(len(tree)):
        law = law_after(tuple(range(node)))
        drawn = verification.Drawn(tree.laws[node])
        token = tree.tokens[node]
        if chance.accept(node, min(1.0, float(law[token]) / drawn.probability(token))):
            kept = node + 1
    law = law_after(tuple(range(kept)))
    if kept < len(tree):
        law = verification.Drawn(tree.laws[kept]).taken_off(law)
    tokens = (*tree.tokens[:kept], chance.draw(kept, law))
    return verification.Verdict(tokens, tuple(range(kept)), kept)


def one_draw_of_each_token(tree: TokenTree, law_after, chance, commit) -> verification.Verdict:
    """What two drafters drew alike is tested once, by the law of the first."""
    kept = []
    for node in range(len(tree)):
        if tree.tokens[node] not in [tree.tokens[other] for other in kept]:
            kept.append(node)
    return verification.rejection(tree._select(kept), _under(tree, kept, law_after), chance, commit)


@pytest.mark.parametrize(("first", "second"), PAIRS[:2])
def test_a_draw_that_is_left_out_shows(
    first: tuple[int, int, str], second: tuple[int, int, str]
) -> None:
    assert error_over(side_by_side(first, second), one_draw_of_each_token, 1)[0] > BROKEN


@pytest.mark.parametrize(
    ("rule", "width", "depth"),
    [
        (Patched(NeverDropped), 3, 1),
        (Patched(NothingTaken), 1, 1),
        (Patched(Softer), 1, 1),
        (pruned, 2, 1),
        (unsure_dropped, 1, 2),
        (a_draw_a_row, 2, 1),
        (shared_luck, 1, 2),
        (block_without_weights, 1, 2),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "drawn", value),
)
def test_a_mistake_shows(rule: Rule, width: int, depth: int) -> None:
    assert error(rule, width, depth)[0] > BROKEN


def test_the_whole_law_is_left_where_rounding_leaves_nothing() -> None:
    law = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    drawn = verification.Drawn(Law((0, 1), (0.5, 0.5)))
    assert drawn.taken_off(law).tolist() == law.tolist()
