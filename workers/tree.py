"""The token tree: the one format of a proposal, from every drafter to every verifier.

A tree hangs under the last committed token (the *anchor*). Parents come before their children, a
chain has the parents -1, 0, 1, …. The score of a node is the estimated probability that the whole
path down to it is accepted, so it never rises along a path.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

ANCHOR: Final = -1
LAW_ERROR: Final = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """The part of a drafter's distribution that has mass: token ids, and probabilities that sum to 1.

    Siblings of one law, the very object, were drawn without replacement; those of another one, equal or
    not, were drawn apart from them.
    """

    ids: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Drafted tokens under the anchor; the tuples are parallel, one entry a node.

    Where tokens were drawn rather than picked, `laws` says from which law each was, siblings of a proposal
    from the same one, without replacement and in their order. Their scores then must not depend on what was
    drawn among them: whoever cuts a tree by its scores would otherwise choose among draws, and change the
    answer's law. A path that two drafters drew is there twice, until it is `folded`.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    laws: tuple[Law, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: Iterable[int], scores: Iterable[float]) -> "TokenTree":
        """A tree without branches."""
        tokens = tuple(tokens)
        return cls(tokens, tuple(range(-1, len(tokens) - 1)), tuple(scores))

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, or None."""
        for index in range(node + 1, len(self.tokens)):
            if self.parents[index] == node and self.tokens[index] == token:
                return index
        return None

    def has_children(self, node: int) -> bool:
        """Whether anything hangs under `node`."""
        return node in self.parents[node + 1 :]

    def depths(self) -> list[int]:
        """Depth of each node; the children of the anchor have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ANCHOR else depths[parent] + 1)
        return depths

    def depth(self) -> int:
        """Depth of the deepest node; 0 for an empty tree."""
        return max(self.depths(), default=0)

    def cut(self, max_nodes: int, max_depth: int) -> "TokenTree":
        """The best part of the tree: at most `max_nodes` nodes by score, none below `max_depth`.

        Of equal scores the earlier node stays, so a parent never goes before its child.
        """
        depths = self.depths()
        allowed = [node for node in range(len(self)) if depths[node] <= max_depth]
        if len(allowed) == len(self) <= max_nodes:
            return self
        allowed.sort(key=lambda node: (-self.scores[node], node))
        return self._select(sorted(allowed[: max(0, max_nodes)]))

    def rebase(self, tokens: Sequence[int]) -> "TokenTree | None":
        """The part that still fits after `tokens` were committed, or None if they left the tree.

        Scores are divided by the score of the new root: it is known to be accepted.
        """
        root = ANCHOR
        for token in tokens:
            child = self.child(root, token)
            if child is None:
                return None
            root = child
        if root == ANCHOR:
            return self
        inside = {root}
        kept = []
        for node in range(root + 1, len(self)):
            if self.parents[node] in inside:
                inside.add(node)
                kept.append(node)
        return self._select(kept, root)

    def judge(self, tokens: Sequence[int]) -> tuple[int, float]:
        """(levels that foretold their token, levels that should have) on the way of committed `tokens`.

        A level should foretell as often as its children together say.
        """
        node, right, expected = ANCHOR, 0, 0.0
        for token in tokens:
            children = [i for i in range(node + 1, len(self)) if self.parents[i] == node]
            above = 1.0 if node == ANCHOR else self.scores[node]
            if not children or above <= 0.0:
                break
            expected += min(1.0, sum(self.scores[child] for child in children) / above)
            found = next((child for child in children if self.tokens[child] == token), None)
            if found is None:
                break
            node, right = found, right + 1
        return right, expected

    def nodes_in(self, other: "TokenTree") -> tuple[int, ...]:
        """The nodes whose whole path is in the other tree as well."""
        found = {ANCHOR: ANCHOR}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            there = other.child(found[parent], token) if parent in found else None
            if there is not None:
                found[node] = there
        return tuple(node for node in found if node != ANCHOR)

    def merge(self, other: "TokenTree") -> "TokenTree":
        """Both trees in one; a path that both contain appears once, with the better score.

        Only of trees whose tokens were picked.
        """
        tokens, parents, scores = list(self.tokens), list(self.parents), list(self.scores)
        node_of = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))
        }
        moved: list[int] = []
        for token, parent, score in zip(other.tokens, other.parents, other.scores, strict=True):
            key = (ANCHOR if parent == ANCHOR else moved[parent], token)
            node = node_of.get(key)
            if node is None:
                node = node_of[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                scores.append(score)
            else:
                scores[node] = max(scores[node], score)
            moved.append(node)
        return TokenTree(tuple(tokens), tuple(parents), tuple(scores))

    def beside(self, other: "TokenTree") -> "TokenTree":
        """Both trees side by side, each draw with the law that it came from, for trees that were drawn.

        What was picked, rather than drawn, is a draw from a law that has nothing else.
        """
        first = len(self)
        parents = (p if p == ANCHOR else p + first for p in other.parents)
        return TokenTree(
            (*self.tokens, *other.tokens),
            (*self.parents, *parents),
            (*self.scores, *other.scores),
            (*self._drawn(), *other._drawn()),
        )

    def folded(self) -> tuple["TokenTree", list[int]]:
        """(the tree with each path once, without laws; for each node the node that it became)."""
        if not self.laws:
            return self, list(range(len(self)))
        node_of: dict[tuple[int, int], int] = {}
        became: list[int] = []
        scores: list[float] = []
        for token, parent, score in zip(self.tokens, self.parents, self.scores, strict=True):
            key = (ANCHOR if parent == ANCHOR else became[parent], token)
            node = node_of.setdefault(key, len(node_of))
            if node == len(scores):
                scores.append(score)
            scores[node] = max(scores[node], score)
            became.append(node)
        tokens = tuple(token for _, token in node_of)
        return TokenTree(tokens, tuple(parent for parent, _ in node_of), tuple(scores)), became

    def check(self, vocab_size: int, max_nodes: int) -> None:
        """Raise ValueError unless the tree is well-formed and within the limits.

        Every tree from another process passes here before anything is done with it.
        """
        if not len(self.tokens) == len(self.parents) == len(self.scores):
            raise ValueError(
                f"tree has {len(self.tokens)} tokens, {len(self.parents)} parents and "
                f"{len(self.scores)} scores; they must be equally many"
            )
        if len(self.laws) not in (0, len(self)):
            raise ValueError(f"tree has {len(self)} nodes and {len(self.laws)} laws of draws")
        self._check_laws(vocab_size)
        if len(self) > max_nodes:
            raise ValueError(f"tree has {len(self)} nodes; at most {max_nodes} are allowed")
        seen: set[tuple[int, int]] = set()
        for node, (token, parent, score) in enumerate(
            zip(self.tokens, self.parents, self.scores, strict=True)
        ):
            if not 0 <= token < vocab_size:
                raise ValueError(f"node {node} has token {token}; ids are below {vocab_size}")
            if not ANCHOR <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; parents come before children")
            if not 0.0 <= score <= 1.0:
                raise ValueError(f"node {node} has score {score}; scores are probabilities")
            if (parent, token) in seen:
                raise ValueError(f"node {node} repeats token {token} under parent {parent}")
            seen.add((parent, token))

    def path(self, node: int) -> list[int]:
        """The tokens from the anchor down to `node`; none for the anchor itself."""
        tokens: list[int] = []
        while node != ANCHOR:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def part(self, nodes: Sequence[int]) -> "TokenTree":
        """The given nodes: ascending, and each with its parent."""
        return self if len(nodes) == len(self) else self._select(nodes)

    def children(self, node: int) -> list[int]:
        """The children of `node`, in order."""
        return [i for i in range(node + 1, len(self)) if self.parents[i] == node]

    def _drawn(self) -> tuple[Law, ...]:
        return self.laws or tuple(Law((token,), (1.0,)) for token in self.tokens)

    def _check_laws(self, vocab_size: int) -> None:
        drawn_by: dict[int, Law] = {}
        checked: set[int] = set()
        for token, parent, law in zip(self.tokens, self.parents, self.laws, strict=False):
            if drawn_by.setdefault(parent, law) is not law:
                raise ValueError(f"siblings under node {parent} were drawn from different laws")
            if token not in law.ids:
                raise ValueError(f"token {token} was drawn from a law without it")
            if id(law) in checked:
                continue
            checked.add(id(law))
            if len(law.ids) != len(law.probabilities) or len(set(law.ids)) != len(law.ids):
                raise ValueError("a law needs different ids, and a probability for each")
            if not all(0 <= i < vocab_size for i in law.ids):
                raise ValueError(f"a law has ids that are not below {vocab_size}")
            if not all(0.0 < p <= 1.0 for p in law.probabilities):
                raise ValueError("a law's probabilities must be above 0 and at most 1")
            if abs(sum(law.probabilities) - 1.0) > LAW_ERROR:
                raise ValueError(f"a law sums to {sum(law.probabilities)}, not 1")

    def _select(self, nodes: Sequence[int], root: int = ANCHOR) -> "TokenTree":
        """The given nodes, ascending and closed upwards, under `root` as the new anchor."""
        scale = 1.0 if root == ANCHOR else self.scores[root]
        index = {root: ANCHOR} | {node: i for i, node in enumerate(nodes)}
        return TokenTree(
            tuple(self.tokens[node] for node in nodes),
            tuple(index[self.parents[node]] for node in nodes),
            tuple(min(1.0, self.scores[node] / scale) if scale > 0 else 0.0 for node in nodes),
            tuple(self.laws[node] for node in nodes) if self.laws else (),
        )
