"""A drafter that replays recorded answers: set acceptance, set time, no processor."""

import hashlib
import math
import threading
from collections.abc import Sequence
from typing import Final

import torch

from workers.draft.drafters.tree_drafter import TreeDrafter, TreeSession
from workers.draft.growth import Grown
from workers.engine.attention import choose_backend
from workers.engine.kv_cache import KVPool, KVShape
from workers.engine.rows import SequenceRows
from workers.request import SamplingParams

# Of what the first guess leaves: where the right token stands among the next ones.
_LATER: Final = (0.4, 0.2, 0.1, 0.06, 0.04)


class ReplaySession(TreeSession):
    """`tokens` are all committed ones, `unread` those of them that no pass has read."""

    def __init__(self, pool: KVPool, sampling: SamplingParams) -> None:
        super().__init__(pool, sampling)
        self.tokens: list[int] = []
        self.unread: list[int] = []


class ReplayDrafter(TreeDrafter[ReplaySession]):
    """Guesses what a recorded sequence goes on with; its first guess is right with `acceptance`.

    Whether it is depends on the position alone, so all modes meet the same luck. A pass takes `pass_s`
    seconds, in which it sleeps, or until `woken` is set.
    """

    def __init__(
        self,
        recorded: Sequence[Sequence[int]],
        acceptance: float,
        pass_s: float,
        vocab_size: int,
        width: int,
        steps: int,
    ) -> None:
        shape = KVShape(1, 1, 16, torch.float32, torch.device("cpu"))
        pool = KVPool(shape, choose_backend(shape), 65536)
        super().__init__(pool, 1 << 20, None, width, steps, 0.02)
        self._recorded = [list(tokens) for tokens in recorded]
        self._vocab_size = vocab_size
        self.pass_s = pass_s
        self.woken = threading.Event()
        left = 1.0 - acceptance
        self._law = (acceptance, *(share * left for share in _LATER))

    def make_session(self, sampling: SamplingParams) -> ReplaySession:
        """See TreeDrafter."""
        return ReplaySession(self._pool, sampling)

    def take(self, session: ReplaySession) -> Grown:
        """See TreeDrafter."""
        session.tokens += session.pending
        session.tree, rows, known = session.tree.reroot(session.pending)
        session.kv.keep(rows)
        session.unread += session.pending[known:]
        return session.tree

    def unread(self, session: ReplaySession, most: int) -> SequenceRows | None:
        """See TreeDrafter."""
        if not session.unread:
            return None
        tokens, session.unread = session.unread[:most], session.unread[most:]
        return SequenceRows(session.kv, tokens, [] if session.unread else [len(tokens) - 1])

    def run(self, work: Sequence[tuple[ReplaySession, SequenceRows]]) -> torch.Tensor:
        """See TreeDrafter."""
        self.woken.wait(self.pass_s)
        prefixes = []
        for session, rows in work:
            if rows.parents is None:
                prefixes += [session.tokens] * len(rows.wanted)
            else:
                prefixes += [self._path(session, rows.first + row) for row in rows.wanted]
        logits = torch.full((len(prefixes), self._vocab_size), -30.0)
        for row, prefix in enumerate(prefixes):
            for token, probability in zip(self._guesses(prefix), self._law, strict=True):
                logits[row, token] = math.log(probability)
        return logits

    def _path(self, session: ReplaySession, row: int) -> list[int]:
        tree = session.tree
        node, path = tree.rows.index(row), []
        while node >= 0:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        return [*session.tokens, *reversed(path)]

    def _guesses(self, prefix: list[int]) -> list[int]:
        """Distinct guesses, best first."""
        length = len(prefix)
        source = next((t for t in self._recorded if t[:length] == prefix and len(t) > length), None)
        true = 0 if source is None else source[length]
        guesses = [(true + 1 + k) % self._vocab_size for k in range(len(self._law))]
        luck, place = _uniform(length), 0
        while source is not None and place < len(self._law):
            luck -= self._law[place]
            if luck < 0:
                guesses[place] = true
                break
            place += 1
        return guesses


def _uniform(number: int) -> float:
    digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
