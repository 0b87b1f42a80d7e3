"""Verification: a walk down the token tree along the target's own tokens.

At each node the target's token is computed; if a drafted child holds it, the walk steps down, else the
token is committed and the walk ends. Greedy or sampled, chain or tree, whatever drafted it: the
committed tokens are those of decoding without drafts. *Accepted* tokens were drafted; the *bonus*
token, the last one, was not.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.tree import ANCHOR, TokenTree


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
