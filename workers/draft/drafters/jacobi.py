"""Parallel decoding: the answer ahead as a fixed point (Santilli et al., arXiv 2305.10427).

Greedy decoding of a block solves y_i = f(y_1 … y_(i-1)); a pass over all guesses at once is one Jacobi
iteration. The pass is the target's own, the one that verifies: what it says behind a guess that turned out
wrong is the next guess there. With the noise of the positions sampling is such a system, too: its fixed
point is what the target draws. What has converged is accepted, and its keys and values stay.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from workers.draft.drafter import Ask, Drafter
from workers.request import SamplingParams
from workers.rpc.messages import Features, Verified
from workers.tree import ANCHOR, TokenTree

COPIED, MOVED, SETTLED = range(3)
"""How a guess came: copied to begin with, new in the last pass, or the same again."""

_FIRST_RATES: Final = (0.05, 0.2, 0.4)
_RATE: Final = 0.02


@dataclass(slots=True)
class _Block:
    """One answer: all its tokens, the guesses of those that come next, and how each came."""

    tokens: list[int]
    guesses: list[int] = field(default_factory=list)
    came: list[int] = field(default_factory=list)


class JacobiDrafter(Drafter):
    """Keeps `size` guesses of each answer; a score says how often guesses that came so are right."""

    reads_choices = True

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: dict[int, _Block] = {}
        self._rates = list(_FIRST_RATES)

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        self._blocks[session] = _Block(list(tokens))

    def verified(self, session: int, step: Verified) -> None:
        """See Drafter: one Jacobi iteration."""
        block = self._blocks[session]
        if step.base_len != len(block.tokens):
            return
        node, said, tested = ANCHOR, step.choices[0], True
        for place, guess in enumerate(block.guesses):
            if said is not None:
                if tested:
                    right = said == guess
                    self._rates[block.came[place]] += _RATE * (
                        right - self._rates[block.came[place]]
                    )
                    tested = right
                block.came[place] = SETTLED if said == guess else MOVED
                block.guesses[place] = said
            child = step.tree.child(node, guess)
            if child is None:
                return
            node, said = child, step.choices[child + 1]

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        block = self._blocks[session]
        block.tokens += tokens
        del block.guesses[: len(tokens)], block.came[: len(tokens)]

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """See Drafter."""
        return [self._propose(self._blocks[ask.session], ask) for ask in asks]

    def close(self, session: int) -> None:
        """See Drafter."""
        self._blocks.pop(session, None)

    def _propose(self, block: _Block, ask: Ask) -> TokenTree:
        missing = self._size - len(block.guesses)
        if missing:
            block.guesses += block.tokens[-missing:]
            block.came += [COPIED] * (len(block.guesses) - len(block.came))
        score, scores = 1.0, []
        for came in block.came:
            score *= self._rates[came]
            scores.append(score)
        count = min(ask.sent_nodes, ask.max_depth)
        return TokenTree.chain(block.guesses[:count], scores[:count])
