"""What drafters with a model have in common: caches that follow the answers, and trees that grow in them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final, Generic, TypeVar

import torch

from workers import sampling
from workers.checkpoint import FeatureKind
from workers.draft.calibration import Softness
from workers.draft.drafter import Ask
from workers.draft.growth import Grown
from workers.engine.kv_cache import KVPool
from workers.engine.rows import SequenceRows
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.tree import ANCHOR, TokenTree

CHILDREN: Final = 8
"""Guesses that a row adds to the tree."""

MAX_ROWS: Final = 256
"""Rows of one session in a step while it catches up."""


class TreeSession:
    """What is known of one answer.

    `pending` are tokens that were committed since the last proposal, `length` counts all committed ones,
    `tree` hangs under the last of them. An exhausted session drafts no more.
    """

    def __init__(self, pool: KVPool, sampling: SamplingParams) -> None:
        self.kv = pool.sequence()
        self.sampling = sampling
        self.pending: list[int] = []
        self.length = 0
        self.children = CHILDREN
        self.tree = Grown()
        self.exhausted = False


SessionT = TypeVar("SessionT", bound=TreeSession)


class TreeDrafter(ABC, Generic[SessionT]):
    """Grows trees best first; sessions share its steps.

    `width` rows a session are expanded at once, `steps` times a proposal; guesses less likely than `floor`
    are not looked behind. `ids` int32 are the target's ids of what is guessed, None where they are equal.
    """

    vocabulary_fingerprint: str
    feature_window: int = 0
    feature_kind: FeatureKind | None = None

    def __init__(
        self,
        pool: KVPool,
        max_length: int,
        ids: torch.Tensor | None,
        width: int,
        steps: int,
        floor: float,
    ) -> None:
        self._pool = pool
        self._max_length = max_length
        self._ids = ids
        self._width = width
        self._steps = steps
        self._floor = floor
        self._softness = Softness()
        self._sessions: dict[int, SessionT] = {}

    @abstractmethod
    def make_session(self, sampling: SamplingParams) -> SessionT:
        """The state of a new session."""

    @abstractmethod
    def take(self, session: SessionT) -> None:
        """Make the pending tokens committed: what of the tree still holds is kept."""

    @abstractmethod
    def unread(self, session: SessionT, most: int) -> SequenceRows | None:
        """The next rows that bring a cache up to what is committed; None if there are none, or not yet.

        They want the logits of the last committed token, if it is among them.
        """

    @abstractmethod
    def run(self, work: Sequence[tuple[SessionT, SequenceRows]]) -> torch.Tensor:
        """Run rows: the logits of the wanted ones, float32 [wanted, V]."""

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        made = self.make_session(sampling)
        made.pending = list(tokens)
        self._sessions[session] = made

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        self._sessions[session].pending += tokens

    def close(self, session: int) -> None:
        """See Drafter."""
        self._sessions.pop(session).kv.free()

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree]:
        """See Drafter."""
        working = [(self._sessions[ask.session], ask) for ask in asks]
        for session, ask in working:
            session.children = 1 if ask.chain else CHILDREN
            if session.tree.root_known:
                self._softness.observe(session.tree, session.pending)
            self.take(session)
            session.length += len(session.pending)
            session.pending = []
        self._catch_up([session for session, _ in working])
        for _ in range(self._steps):
            if not self._expand(working):
                break
        return [
            TokenTree() if session.exhausted else session.tree.best(ask.max_nodes, ask.max_depth)
            for session, ask in working
        ]

    def _catch_up(self, sessions: Sequence[SessionT]) -> None:
        """Bring the caches to what is committed, and know the guesses that follow it."""
        while True:
            work = []
            for session in sessions:
                rows = None if session.exhausted else self.unread(session, MAX_ROWS)
                if rows is not None and self._reserve(session, len(rows.tokens)):
                    work.append((session, rows))
            if not work:
                return
            logits = self.run(work)
            index = 0
            for session, rows in work:
                session.kv.keep(range(len(rows.tokens)))
                if rows.wanted:
                    self._guess(session, ANCHOR, logits[index])
                    session.tree.root_known = True
                    index += 1

    def _expand(self, working: Iterable[tuple[SessionT, Ask]]) -> bool:
        """Expand the likeliest leaves of every session in one step; whether there were any."""
        work, expanded = [], []
        for session, ask in working:
            if session.exhausted:
                continue
            tree = session.tree
            # A child is never likelier than its parent: behind nodes below the bar there is nothing to find.
            bar = max(self._floor, math.nextafter(tree.bar(ask.max_nodes), math.inf))
            nodes = sorted(tree.frontier(self._width, bar, ask.max_depth))
            first = len(tree.row_parents)
            if not nodes or not self._reserve(session, first + len(nodes)):
                continue
            for node in nodes:
                tree.place(node)
            tokens = self.encode([tree.tokens[node] for node in nodes])
            parents = list(tree.row_parents)
            rows = SequenceRows(session.kv, tokens, range(len(nodes)), parents, first=first)
            work.append((session, rows))
            expanded.append((session, nodes))
        if not work:
            return False
        logits = self.run(work)
        index = 0
        for session, nodes in expanded:
            for node in nodes:
                self._guess(session, node, logits[index])
                index += 1
        return True

    def encode(self, tokens: Sequence[int]) -> list[int]:
        """The target's tokens as the draft reads them."""
        return list(tokens)

    def _guess(self, session: SessionT, node: int, logits: torch.Tensor) -> None:
        """Add the likeliest children of a node, by the target's rule and noise."""
        depth = 1 + (0 if node == ANCHOR else session.tree.depth_of(node))
        places, probabilities = sampling.rank_children(
            logits,
            self._ids,
            session.sampling,
            session.length + depth - 1,
            self._softness.at(depth),
            session.children,
        )
        tokens = places if self._ids is None else self._ids[places].tolist()
        session.tree.add_children(node, tokens, probabilities)

    def _reserve(self, session: SessionT, rows: int) -> bool:
        """Room for rows beyond what is committed; a session that finds none drafts no more."""
        slots = session.kv.length + rows
        session.exhausted = slots > self._max_length or not session.kv.reserve(slots)
        return not session.exhausted
