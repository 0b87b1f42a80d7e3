"""Verification: which drafted tokens become part of the answer, and which token follows them.

`walk` goes down the tree along the target's own tokens: at each node the target's token is computed; if a
drafted child holds it, the walk steps down, else the token is committed and the walk ends. Greedy or sampled,
chain or tree, whatever drafted it: the committed tokens are those of decoding without drafts.

`rejection` and `block` are for tokens that a drafter drew from a law of its own. The answer has the target's
law, but is another text than without drafts. `typical` changes the law: it takes what is likely enough.

*Accepted* tokens were drafted; the *bonus* token, the last one, was not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from workers.tree import ANCHOR, Law, TokenTree

TYPICAL_FLOOR: Final = 0.09
TYPICAL_SHARE: Final = 0.3
"""Medusa's epsilon and delta (Cai et al., arXiv 2401.10774)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a walk found.

    `accepted` are the nodes on the committed path, `tested` the number of nodes on the walk that had
    drafted children, `tokens` what was committed.
    """

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    tested: int


def walk(
    tree: TokenTree, target_token: Callable[[int], int], commit: Callable[[int], bool]
) -> Verdict:
    """Walk the tree, committing one token after the other.

    `target_token(node)` is the target's token after the path to `node` (ANCHOR first); it may depend on
    what was committed before. `commit(token)` makes it part of the answer and says whether the answer
    goes on. No bonus token follows a token that ends the answer.
    """
    node, tested = ANCHOR, 0
    tokens: list[int] = []
    accepted: list[int] = []
    while True:
        token = target_token(node)
        tested += tree.has_children(node)
        child = tree.child(node, token)
        tokens.append(token)
        if child is not None:
            accepted.append(child)
        goes_on = commit(token)
        if child is None or not goes_on:
            return Verdict(tuple(tokens), tuple(accepted), tested)
        node = child


class Chance(Protocol):
    """Where the rules get their luck from."""

    def accept(self, node: int, probability: float) -> bool:
        """True with this probability, independently for each node."""

    def draw(self, depth: int, law: torch.Tensor) -> int:
        """A token, float64 [V] being how likely each is, for the place `depth` tokens on."""


LawAfter = Callable[[tuple[int, ...]], torch.Tensor]
"""The target's law float64 [V] after a path of nodes, () being the anchor alone."""


def rejection(
    tree: TokenTree, law_after: LawAfter, chance: Chance, commit: Callable[[int], bool]
) -> Verdict:
    """Test the children of a node in the order they were drawn; walk down where one is accepted.

    What a rejected child has had of the target's law is taken off it, and the child off the law that it was
    drawn from: siblings of one law are without replacement, those of another law are draws with it (recursive
    rejection, SpecInfer's multi-step sampling; chains: Leviathan et al., arXiv 2211.17192). Nodes that
    several drafters drew alike are one place, with the children of all.
    """
    path: tuple[int, ...] = ()
    place: list[int] = [ANCHOR]
    tested = 0
    tokens: list[int] = []
    while True:
        law = law_after(path)
        children = [child for node in place for child in tree.children(node)]
        tested += bool(children)
        accepted = None
        left: dict[Law, Drawn] = {}
        for child in children:
            token, drawn_by = tree.tokens[child], tree.laws[child]
            drawn = left.get(drawn_by) or left.setdefault(drawn_by, Drawn(drawn_by))
            if chance.accept(child, min(1.0, float(law[token]) / drawn.probability(token))):
                accepted = child
                break
            law = drawn.taken_off(law)
            drawn.drop(token)
        if accepted is None:
            tokens.append(chance.draw(len(path), law))
            commit(tokens[-1])
            return Verdict(tuple(tokens), path, tested)
        path = (*path, accepted)
        tokens.append(tree.tokens[accepted])
        place = [child for child in children if tree.tokens[child] == tokens[-1]]
        if not commit(tokens[-1]):
            return Verdict(tuple(tokens), path, tested)


class Drawn:
    """The law that siblings were drawn from, without those that came before."""

    def __init__(self, law: Law) -> None:
        self._ids = torch.tensor(law.ids)
        probabilities = torch.tensor(law.probabilities, dtype=torch.float64)
        self._probabilities = probabilities / probabilities.sum()

    def probability(self, token: int) -> float:
        """Of a token that it has."""
        return float(self._probabilities[self._ids == token])

    def left(self, law: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """What is left of `weight` times the target's law once this one is taken off."""
        left = weight * law
        left[self._ids] -= self._probabilities
        return left.clamp_(min=0.0)

    def taken_off(self, law: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """What is left, as a law; the target's where rounding left nothing."""
        left = self.left(law, weight)
        total = float(left.sum())
        return left / total if total > 0.0 else law

    def drop(self, token: int) -> None:
        """A token that was drawn is not drawn again."""
        self._probabilities[self._ids == token] = 0.0
        total = self._probabilities.sum()
        if float(total) > 0.0:
            self._probabilities /= total


def block(
    tree: TokenTree, law_after: LawAfter, chance: Chance, commit: Callable[[int], bool]
) -> Verdict:
    """Test a chain as a whole: never fewer tokens than one by one (Sun et al., arXiv 2403.10444).

    A tree that branches, which nobody asked for, is tested by `rejection`.
    """
    if any(parent != node - 1 for node, parent in enumerate(tree.parents)):
        return rejection(tree, law_after, chance, commit)
    laws = [law_after(tuple(range(node))) for node in range(len(tree) + 1)]
    drawn = [Drawn(law) for law in tree.laws]
    weights = [1.0]
    for node, token in enumerate(tree.tokens):
        ratio = float(laws[node][token]) / drawn[node].probability(token)
        weights.append(min(1.0, weights[-1] * ratio))
    kept = 0
    for node in range(len(tree)):
        weight = weights[node + 1]
        if node + 1 < len(tree):
            excess = float(drawn[node + 1].left(laws[node + 1], weight).sum())
            weight = excess / (excess + 1.0 - weight) if excess + 1.0 - weight > 0.0 else 1.0
        if chance.accept(node, weight):
            kept = node + 1
    tokens: list[int] = []
    path = tuple(range(kept))
    for node in path:
        tokens.append(tree.tokens[node])
        if not commit(tokens[-1]):
            return Verdict(tuple(tokens), path[: len(tokens)], kept)
    law = laws[kept]
    if kept < len(tree):
        law = drawn[kept].taken_off(law, weights[kept])
    tokens.append(chance.draw(kept, law))
    commit(tokens[-1])
    return Verdict(tuple(tokens), path, min(len(tree), kept + 1))


def typical(
    tree: TokenTree, law_after: LawAfter, chance: Chance, commit: Callable[[int], bool]
) -> Verdict:
    """Take, at each node, the likeliest child that is likely enough where much or little else is (Medusa).

    That changes the answer's law: less is left to chance.
    """
    path: tuple[int, ...] = ()
    tested = 0
    tokens: list[int] = []
    while True:
        law = law_after(path)
        children = tree.children(path[-1] if path else ANCHOR)
        tested += bool(children)
        entropy = float(torch.special.entr(law).sum())
        bar = min(TYPICAL_FLOOR, TYPICAL_SHARE * float(torch.tensor(-entropy).exp()))
        likely = max(children, key=lambda child: float(law[tree.tokens[child]]), default=None)
        if likely is None or float(law[tree.tokens[likely]]) <= bar:
            tokens.append(chance.draw(len(path), law))
            commit(tokens[-1])
            return Verdict(tuple(tokens), path, tested)
        path = (*path, likely)
        tokens.append(tree.tokens[likely])
        if not commit(tokens[-1]):
            return Verdict(tuple(tokens), path, tested)


RULES: Final = {"rejection": rejection, "block": block, "typical": typical}
