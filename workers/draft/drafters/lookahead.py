"""Lookahead decoding: the target's passes make n-grams beside the answer, and verify them (arXiv 2402.02057).

The window has W columns and N - 1 levels of guesses. Level 0 is a chain under the last committed token,
which is its own column 0; a token of a higher level hangs under the one below it in its column. So it sees
what the paper's mask shows it: the text, level 0 up to its column, and its column. The row of a column's top
token says what follows: the column and that token are an n-gram of the pool; then the window moves on by one.

All of this is a token tree, and so are the n-grams that begin behind the last committed token: both run in
the one pass that verifies. Window tokens are no candidates in the paper; here one that is right is accepted,
too, which loses nothing. Equal paths share a row.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from workers.draft.drafter import Ask, Drafter
from workers.request import SamplingParams
from workers.rpc.messages import Features, Verified
from workers.tree import ANCHOR, TokenTree

_RATE: Final = 0.02
_FIRST_RATE: Final = 0.3
_REST_RATE: Final = 0.5
_WORTH_LIMITS: Final = (0.01, 0.9)


@dataclass(slots=True)
class _Window:
    """One answer: all its tokens, the window's levels of W tokens each, and its n-grams by their first token.

    Of level 0, column 0 is the last committed token, whatever stands there. With `chain` there is no room for
    columns: level 0 stands alone, and n-grams have two tokens.
    """

    tokens: list[int]
    levels: list[list[int]] = field(default_factory=list)
    pool: dict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=dict)
    chain: bool = False

    def path(self, column: int) -> list[int]:
        """The tokens from the last committed one to the top of a column."""
        return [*self.levels[0][1 : column + 1], *(level[column] for level in self.levels[1:])]

    def known(self) -> list[tuple[int, ...]]:
        """What followed the last committed token in n-grams, the latest first."""
        return list(reversed(self.pool.get(self.tokens[-1], {})))


class LookaheadDrafter(Drafter):
    """Keeps a window and a pool for each answer.

    An n-gram's score is how often those of its rank were right, a window token's what the window's n-grams
    have brought for each of its rows: that is what the row is worth, however rarely its own token is right.
    """

    reads_choices = True

    def __init__(self, window: int, ngram: int, guesses: int) -> None:
        self._columns = window
        self._ngram = ngram
        self._guesses = guesses
        self._windows: dict[int, _Window] = {}
        self._first = [_FIRST_RATE / (rank + 1) for rank in range(guesses)]
        self._rest = _REST_RATE
        self._gained = _FIRST_RATE
        self._rows = float(window * (ngram - 1))

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        self._windows[session] = _Window(list(tokens))

    def verified(self, session: int, step: Verified) -> None:
        """See Drafter: n-grams are judged, new ones made, and the window moves."""
        window = self._windows[session]
        if step.base_len != len(window.tokens) or not window.levels:
            return
        paths = [window.path(column) for column in range(self._columns)]
        self._judge(window.known(), paths, step)
        said = []
        for path in paths:
            nodes = _nodes(step.tree, path)
            ran = len(nodes) == len(path)
            said.append(step.choices[nodes[-1] + 1 if nodes else 0] if ran else None)
        if all(token is None for token in said):
            return
        most = 1 if window.chain else self._ngram - 1
        if len(window.levels) == most:
            for column, token in enumerate(said):
                if token is not None:
                    first = window.levels[0][column] if column else window.tokens[-1]
                    tail = (*(level[column] for level in window.levels[1:]), token)
                    self._remember(window, first, tail)
        old = window.levels[-1]
        window.levels.append(
            [kept if token is None else token for kept, token in zip(old, said, strict=True)]
        )
        del window.levels[:-most]

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        self._windows[session].tokens += tokens

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """See Drafter."""
        return [self._propose(self._windows[ask.session], ask) for ask in asks]

    def close(self, session: int) -> None:
        """See Drafter."""
        self._windows.pop(session, None)

    def _propose(self, window: _Window, ask: Ask) -> TokenTree:
        window.chain = ask.chain
        if not window.levels:
            copied = window.tokens[-self._columns :]
            window.levels = [[copied[i % len(copied)] for i in range(self._columns)]]
        tree = TokenTree()
        for rank, tail in enumerate(window.known()[: 1 if ask.chain else None]):
            scores = [self._first[rank] * self._rest**depth for depth in range(len(tail))]
            tree = tree.merge(TokenTree.chain(tail, scores))
        if not (ask.chain and tree):
            low, high = _WORTH_LIMITS
            worth = min(high, max(low, self._gained / max(1.0, self._rows)))
            columns = [self._columns - 1] if ask.chain else range(self._columns)
            for path in map(window.path, columns):
                tree = tree.merge(TokenTree.chain(path, [worth] * len(path)))
        return tree.cut(ask.sent_nodes, ask.max_depth)

    def _remember(self, window: _Window, first: int, tail: tuple[int, ...]) -> None:
        tails = window.pool.setdefault(first, OrderedDict())
        tails[tail] = None
        tails.move_to_end(tail)
        if len(tails) > self._guesses:
            tails.popitem(last=False)

    def _judge(
        self, tails: Sequence[tuple[int, ...]], paths: Sequence[Sequence[int]], step: Verified
    ) -> None:
        """Learn from a step how often n-grams are right, and what the rows of the window bring."""
        verified: set[int] = set()
        gained = 0
        for rank, tail in enumerate(tails):
            nodes = _nodes(step.tree, tail)
            verified.update(nodes)
            right = 0
            for depth, above in enumerate([ANCHOR, *nodes][: len(nodes)]):
                is_right = step.choices[above + 1] == tail[depth]
                if depth:
                    self._rest += _RATE * (is_right - self._rest)
                else:
                    self._first[rank] += _RATE * (is_right - self._first[rank])
                if not is_right:
                    break
                right += 1
            gained = max(gained, right)
        rows = {node for path in paths for node in _nodes(step.tree, path)} - verified
        if rows or verified:
            self._gained += _RATE * (gained - self._gained)
            self._rows += _RATE * (len(rows) - self._rows)


def _nodes(tree: TokenTree, path: Sequence[int]) -> list[int]:
    """The nodes of a path, as far as the tree holds it."""
    nodes: list[int] = []
    node = ANCHOR
    for token in path:
        child = tree.child(node, token)
        if child is None:
            break
        nodes.append(child)
        node = child
    return nodes
