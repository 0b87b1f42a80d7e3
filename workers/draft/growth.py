"""Trees that grow best first: the likeliest nodes of all are expanded next, some at a time.

A node is *expanded* when its row has run and its children are known; the rest are leaves that can be
proposed but were not looked behind. On a commit the tree is re-rooted: what hangs under the committed
path stays (DySpec, arXiv 2410.11744; SwiftSpec, arXiv 2506.11309).
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from workers.tree import ANCHOR, Law, TokenTree

UNEXPANDED = -1


@dataclass(slots=True)
class Grown:
    """A growing tree under the last committed token.

    Lists are parallel, one entry a node. `rows[i]` is the scratch row of node i in the draft's cache, or
    UNEXPANDED. `root_known` says that the children of the last committed token were added.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)
    root_known: bool = False
    # Parent row of every scratch row, -1 for those under the last committed token; dead rows stay.
    row_parents: list[int] = field(default_factory=list)

    def add_children(
        self,
        node: int,
        tokens: Iterable[int],
        probabilities: Iterable[float],
        law: Law | None = None,
    ) -> None:
        """Add the guessed children of a node, or of ANCHOR; `law` is what they were drawn from."""
        above = 1.0 if node == ANCHOR else self.scores[node]
        for token, probability in zip(tokens, probabilities, strict=True):
            self.tokens.append(token)
            self.parents.append(node)
            self.scores.append(above * min(1.0, probability))
            self.rows.append(UNEXPANDED)
            if law is not None:
                self.laws.append(law)

    def frontier(self, width: int, floor: float, max_depth: int) -> list[int]:
        """The likeliest leaves, at most `width`, none less likely than `floor` or at `max_depth`."""
        depths = self.depths() if max_depth < len(self.tokens) else None
        leaves = [
            node
            for node, row in enumerate(self.rows)
            if row == UNEXPANDED
            and self.scores[node] >= floor
            and (depths is None or depths[node] < max_depth)
        ]
        leaves.sort(key=lambda node: (-self.scores[node], node))
        return leaves[:width]

    def likeliest_leaf(self, floor: float, max_depth: int) -> list[int]:
        """The end of the path that takes the likeliest child everywhere; none if it is below the limits."""
        node, depth = ANCHOR, 0
        while True:
            children = [i for i, parent in enumerate(self.parents) if parent == node]
            if not children:
                return []
            node, depth = max(children, key=lambda i: (self.scores[i], -i)), depth + 1
            if depth >= max_depth or self.scores[node] < floor:
                return []
            if self.rows[node] == UNEXPANDED:
                return [node]

    @property
    def looked_behind(self) -> float:
        """How likely it is, summed over nodes, that a node is reached behind which something is known."""
        return sum(
            score for score, row in zip(self.scores, self.rows, strict=True) if row != UNEXPANDED
        )

    def bar(self, count: int) -> float:
        """The score of the `count`-th best node, 0 if there are fewer: what hangs under worse is not sent."""
        if len(self.scores) < count:
            return 0.0
        return heapq.nlargest(count, self.scores)[-1] if count else 1.0

    def place(self, node: int) -> int:
        """Give a node the next scratch row: it is about to be expanded."""
        parent = self.parents[node]
        self.row_parents.append(ANCHOR if parent == ANCHOR else self.rows[parent])
        self.rows[node] = len(self.row_parents) - 1
        return self.rows[node]

    def depth_of(self, node: int) -> int:
        """Depth of one node."""
        depth = 1
        while self.parents[node] != ANCHOR:
            node, depth = self.parents[node], depth + 1
        return depth

    def depths(self) -> list[int]:
        """Depth of each node; the children of the last committed token have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ANCHOR else depths[parent] + 1)
        return depths

    def best(self, max_nodes: int, max_depth: int) -> TokenTree:
        """The best part of the tree as a proposal."""
        tree = TokenTree(
            tuple(self.tokens), tuple(self.parents), tuple(self.scores), tuple(self.laws)
        )
        return tree.cut(max_nodes, max_depth)

    def guessed_along(self, tokens: Sequence[int]) -> list[list[int]]:
        """What was guessed at each depth, as far as these tokens stay in the tree."""
        node: int | None = ANCHOR
        levels = []
        for token in tokens:
            children = [i for i, parent in enumerate(self.parents) if parent == node]
            levels.append([self.tokens[child] for child in children])
            node = next((child for child in children if self.tokens[child] == token), None)
            if node is None:
                break
        return levels

    def reroot(self, tokens: Sequence[int]) -> tuple["Grown", list[int], int]:
        """What is left after `tokens` were committed.

        Returns the tree under the last of them, the scratch rows that became committed, ascending, and
        the number of tokens that those rows stand for. Tokens beyond are not in the cache: if there are
        any, the tree is empty.
        """
        node = ANCHOR
        kept: list[int] = []
        for token in tokens:
            child = next(
                (
                    i
                    for i in range(node + 1, len(self.tokens))
                    if self.parents[i] == node and self.tokens[i] == token
                ),
                None,
            )
            if child is None or self.rows[child] == UNEXPANDED:
                return Grown(), kept, len(kept)
            kept.append(self.rows[child])
            node = child
        if node == ANCHOR:
            return self, [], 0
        return self._under(node, len(kept)), kept, len(kept)

    def _under(self, root: int, rows_gone: int) -> "Grown":
        """The subtree under a node, whose rows move down by as many as became committed."""
        tree = Grown(root_known=True)
        index = {root: ANCHOR}
        scale = self.scores[root] or 1.0
        for node in range(root + 1, len(self.tokens)):
            if self.parents[node] not in index:
                continue
            index[node] = len(tree.tokens)
            tree.tokens.append(self.tokens[node])
            tree.parents.append(index[self.parents[node]])
            tree.scores.append(min(1.0, self.scores[node] / scale))
            if self.laws:
                tree.laws.append(self.laws[node])
            row = self.rows[node]
            tree.rows.append(row if row == UNEXPANDED else row - rows_gone)
        # Rows below the subtree's stay as holes: nothing sees them.
        last = max((row for row in tree.rows), default=UNEXPANDED)
        tree.row_parents = [ANCHOR] * (last + 1)
        for node, row in enumerate(tree.rows):
            if row != UNEXPANDED:
                parent = tree.parents[node]
                tree.row_parents[row] = ANCHOR if parent == ANCHOR else tree.rows[parent]
        return tree
