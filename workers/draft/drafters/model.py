"""An independent draft language model: it runs ahead of the target in a tree (Leviathan et al., arXiv
2211.17192; the tree grows as in EAGLE-2, arXiv 2406.16858, and DySpec, arXiv 2410.11744).
"""

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from workers import sampling
from workers.draft.calibration import Softness
from workers.draft.drafter import Ask
from workers.draft.growth import Grown
from workers.draft.models import DraftModel
from workers.engine.kv_cache import KVPool
from workers.engine.rows import RowBatch, SequenceRows
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.tree import ANCHOR, TokenTree

CHILDREN: Final = 8
"""Guesses that a row adds to the tree."""

MAX_ROWS: Final = 256
"""Rows of one step while catching up."""


class ModelDrafter:
    """Drafts with a model that has a cache of its own; sessions share its steps.

    `width` rows a session are expanded at once, `steps` times a proposal; guesses less likely than `floor`
    are not looked behind.
    """

    feature_window = 0

    def __init__(
        self, draft: DraftModel, num_slots: int, width: int, steps: int, floor: float
    ) -> None:
        self.vocabulary_fingerprint = draft.vocabulary_fingerprint
        self._draft = draft
        self._pool = draft.model.pool(num_slots)
        self._width = width
        self._steps = steps
        self._floor = floor
        self._softness = Softness()
        self._sessions: dict[int, _Session] = {}

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        made = _Session(self._pool, sampling)
        made.pending = list(tokens)
        self._sessions[session] = made

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        self._sessions[session].pending += tokens

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        """See Drafter."""
        working = [(self._sessions[ask.session], ask) for ask in asks]
        for session, ask in working:
            session.children = 1 if ask.chain else CHILDREN
        self._catch_up([session for session, _ in working])
        for _ in range(self._steps):
            if not self._expand(working):
                break
        return [
            TokenTree() if session.exhausted else session.tree.best(ask.max_nodes, ask.max_depth)
            for session, ask in working
        ]

    def close(self, session: int) -> None:
        """See Drafter."""
        self._sessions.pop(session).kv.free()

    def _catch_up(self, sessions: Sequence["_Session"]) -> None:
        """Bring the caches to what is committed, and know the guesses that follow it."""
        for session in sessions:
            session.commit(self._softness, self._draft)
        while True:
            rows, behind = [], []
            for session in sessions:
                chunk = session.unread[:MAX_ROWS]
                if chunk and self._reserve(session, len(chunk)):
                    wanted = [len(chunk) - 1] if len(chunk) == len(session.unread) else []
                    rows.append(SequenceRows(session.kv, chunk, wanted))
                    behind.append(session)
            if not rows:
                return
            logits = self._draft.guesses(self._draft.model.forward(RowBatch(rows)))
            index = 0
            for session, run in zip(behind, rows, strict=True):
                session.kv.keep(range(len(run.tokens)))
                del session.unread[: len(run.tokens)]
                if run.wanted:
                    self._guess(session, ANCHOR, logits[index])
                    session.tree.root_known = True
                    index += 1

    def _expand(self, working: Iterable[tuple["_Session", Ask]]) -> bool:
        """Expand the likeliest leaves of every session in one step; whether there were any."""
        rows, expanded = [], []
        for session, ask in working:
            if session.exhausted:
                continue
            tree = session.tree
            nodes = sorted(tree.frontier(self._width, self._floor, ask.max_depth))
            first = len(tree.row_parents)
            if not nodes or not self._reserve(session, first + len(nodes)):
                continue
            for node in nodes:
                tree.place(node)
            tokens = self._draft.encode([tree.tokens[node] for node in nodes])
            rows.append(
                SequenceRows(
                    session.kv, tokens, range(len(nodes)), list(tree.row_parents), first=first
                )
            )
            expanded.append((session, nodes))
        if not rows:
            return False
        logits = self._draft.guesses(self._draft.model.forward(RowBatch(rows)))
        index = 0
        for session, nodes in expanded:
            for node in nodes:
                self._guess(session, node, logits[index])
                index += 1
        return True

    def _guess(self, session: "_Session", node: int, logits: torch.Tensor) -> None:
        """Add the likeliest children of a node, by the target's rule and noise."""
        depth = 1 + (0 if node == ANCHOR else session.tree.depth_of(node))
        places, probabilities = sampling.rank_children(
            logits,
            self._draft.ids,
            session.sampling,
            session.length + depth - 1,
            self._softness.at(depth),
            session.children,
        )
        tokens = [self._draft.name_of(place) for place in places]
        session.tree.add_children(node, tokens, probabilities)

    def _reserve(self, session: "_Session", rows: int) -> bool:
        """Room for rows beyond what is committed; a session that finds none drafts no more."""
        slots = session.kv.length + rows
        if slots > self._draft.model.info.max_model_len or not session.kv.reserve(slots):
            session.exhausted = True
            session.unread.clear()
        return not session.exhausted


class _Session:
    """What is known of one answer.

    `pending` are the target's tokens that were committed since the last proposal, `unread` tokens in the
    draft's vocabulary that are not in its cache yet, `length` counts the target's committed tokens.
    """

    def __init__(self, pool: KVPool, sampling: SamplingParams) -> None:
        self.kv = pool.sequence()
        self.sampling = sampling
        self.pending: list[int] = []
        self.unread: list[int] = []
        self.length = 0
        self.children = CHILDREN
        self.tree = Grown()
        self.exhausted = False

    def commit(self, softness: Softness, draft: DraftModel) -> None:
        """Take the pending tokens: keep what the tree had right, and read the rest."""
        if self.tree.root_known:
            softness.observe(self.tree, self.pending)
        self.tree, rows, known = self.tree.reroot(self.pending)
        self.kv.keep(rows)
        self.unread += draft.encode(self.pending[known:])
        self.length += len(self.pending)
        self.pending = []
