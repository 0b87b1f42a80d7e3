"""What drafters with a model have in common: caches that follow the answers, and trees that grow in them.

A proposal that must be drafted while the target waits gets pass after pass as long as a pass is expected to
add more than the target could commit in its time. While the target verifies, the trees grow on; what a commit
then finds in its tree is proposed at once (SwiftSpec, arXiv 2506.11309), and trees that have grown are sent
again, so that a verdict finds its successor at the target already.
"""

import heapq
import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final, Generic, TypeVar

import torch

from workers import sampling
from workers.draft.calibration import Softness
from workers.draft.drafter import Ask, Drafter
from workers.draft.growth import Grown
from workers.draft.levels import Accuracies
from workers.engine.kv_cache import KVPool
from workers.engine.rows import SequenceRows
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.tree import ANCHOR, TokenTree

CHILDREN: Final = 8
"""Guesses that a row adds to the tree."""

MAX_ROWS: Final = 256
"""Rows of one session in a step while it catches up."""

GROWN_ROWS: Final = 64
"""Nodes of a session behind which one looks at most before the next commit."""

SEND_AGAIN: Final = 0.3
"""How much more often than with what was sent a grown tree must be of use to be sent again."""

_DRAWN_AT_FIRST: Final = [[0.5 * 0.4**rank for rank in range(CHILDREN)]] * 8
_DRAWN_RATE: Final = 0.02
_RATE: Final = 0.1
_NOBODY: Final = -1
_WARM_UP: Final = 8


class TreeSession:
    """What is known of one answer.

    `pending` are tokens that were committed since the last proposal, `length` counts all committed ones,
    `tree` hangs under the last of them. `sent` says how much of what was looked behind the target knows.
    Where tokens are `drawn`, `draws` counts how often. An exhausted session drafts no more.
    """

    def __init__(self, pool: KVPool, sampling: SamplingParams) -> None:
        self.kv = pool.sequence()
        self.sampling = sampling
        self.pending: list[int] = []
        self.length = 0
        self.children = CHILDREN
        self.drawn = False
        self.draws = 0
        self.tree = Grown()
        self.sent = 0.0
        self.exhausted = False


SessionT = TypeVar("SessionT", bound=TreeSession)


class TreeDrafter(Drafter, Generic[SessionT]):
    """Grows trees best first; sessions share its steps.

    `width` rows a session are expanded at once, at most `steps` times while the target waits; guesses less
    likely than `floor` are not looked behind. `ids` int32 are the target's ids of what is guessed, None where
    they are equal.
    """

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
        self._drawn_accuracies = Accuracies(_DRAWN_AT_FIRST, _DRAWN_RATE)
        self._pass_s = 0.0
        self._yield = 0.5
        self._usual_s = self._usual_worth = 0.0
        self._sessions: dict[int, SessionT] = {}

    @abstractmethod
    def make_session(self, sampling: SamplingParams) -> SessionT:
        """The state of a new session."""

    @abstractmethod
    def take(self, session: SessionT) -> Grown:
        """Make the pending tokens committed.

        Returns the tree that was known under the last of them. What of it can grow on is the session's tree.
        """

    @abstractmethod
    def unread(self, session: SessionT, most: int) -> SequenceRows | None:
        """The next rows that bring a cache up to what is committed; None if there are none, or not yet.

        They want the logits of the last committed token, if it is among them.
        """

    @abstractmethod
    def run(self, work: Sequence[tuple[SessionT, SequenceRows]]) -> torch.Tensor:
        """Run rows: the logits of the wanted ones, float32 [wanted, V]."""

    def warm_up(self) -> None:
        """See Drafter; how long it took is forgotten."""
        self.open(_NOBODY, [0] * _WARM_UP, SamplingParams())
        self.observe(_NOBODY, [], self.blank_features(_WARM_UP))
        self.propose([Ask(_NOBODY, _WARM_UP, _WARM_UP, chain=False)])
        self.close(_NOBODY)
        self._pass_s = self._usual_s = self._usual_worth = 0.0

    def blank_features(self, count: int) -> list[Features]:
        """Features of the first positions, for warming up."""
        return []

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

    def recall(self, ask: Ask) -> TokenTree | None:
        """See Drafter."""
        session = self._sessions[ask.session]
        known = self._settle(session, ask)
        if known is None or not known.root_known or session.exhausted:
            return None
        # A small tree now, or a usual one when it is drafted: the target's pace decides.
        if _worth(known, ask) < self._usual_worth - ask.pace * self._usual_s:
            return None
        session.sent = known.looked_behind
        return known.best(ask.sent_nodes, ask.max_depth)

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """See Drafter."""
        working = [(self._sessions[ask.session], ask) for ask in asks]
        for session, ask in working:
            self._settle(session, ask)
        started = time.perf_counter()
        self._catch_up([session for session, _ in working])
        for _ in range(self._steps):
            if not self._pays(working) or not self._expand(working):
                break
        self._usual_s += _RATE * (time.perf_counter() - started - self._usual_s)
        for session, ask in working:
            if session.tree.root_known:
                self._usual_worth += _RATE * (_worth(session.tree, ask) - self._usual_worth)
        return [self._send(session, ask) for session, ask in working]

    def grow(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """See Drafter."""
        working = [(self._sessions[ask.session], ask) for ask in asks]
        behind = [s for s, _ in working if not s.tree.root_known and not s.exhausted]
        if not (self._catch_up(behind) if behind else False) and not self._look_ahead(working):
            # What grew since is still worth sending; the next call finds nothing and ends it.
            last = [self._send_again(session, ask, 0.1) for session, ask in working]
            return last if any(last) else []
        return [self._send_again(session, ask, SEND_AGAIN) for session, ask in working]

    def _settle(self, session: SessionT, ask: Ask) -> Grown | None:
        """Take what was committed; the tree that was known behind it, None if there is nothing new."""
        session.children = 1 if ask.chain else CHILDREN
        session.drawn = ask.drawn and not session.sampling.greedy
        session.sent = 0.0
        if not session.pending:
            return None
        if session.tree.root_known:
            if session.drawn:
                levels = session.tree.guessed_along(session.pending)
                self._drawn_accuracies.observe(levels, session.pending)
            else:
                self._softness.observe(session.tree, session.pending)
        known = self.take(session)
        session.length += len(session.pending)
        session.pending = []
        return known

    def _send(self, session: SessionT, ask: Ask) -> TokenTree | None:
        if session.exhausted:
            return TokenTree()
        if not session.tree.root_known:
            return None
        session.sent = session.tree.looked_behind
        return session.tree.best(ask.sent_nodes, ask.max_depth)

    def _send_again(self, session: SessionT, ask: Ask, least: float) -> TokenTree | None:
        """The tree, if enough was added to it since it was sent."""
        if session.exhausted or session.tree.looked_behind - session.sent < least:
            return None
        return self._send(session, ask)

    def _pays(self, working: Sequence[tuple[SessionT, Ask]]) -> bool:
        """Whether one more pass is expected to add more than the target would commit meanwhile."""
        gain = sum(
            session.tree.scores[node]
            for session, ask in working
            if not session.exhausted
            for node in session.tree.frontier(self._width, self._bar(session, ask), ask.max_depth)
        )
        return gain * self._yield >= self._pass_s * sum(ask.pace for _, ask in working)

    def _bar(self, session: SessionT, ask: Ask) -> float:
        """Below this score there is nothing to find: a child is never likelier than its parent."""
        unsent = math.nextafter(session.tree.bar(ask.max_nodes), math.inf)
        return max(self._floor, ask.price, unsent)

    def _catch_up(self, sessions: Sequence[SessionT]) -> bool:
        """Bring the caches to what is committed, and know the guesses that follow; whether any was behind."""
        ran = False
        while True:
            work = []
            for session in sessions:
                rows = None if session.exhausted else self.unread(session, MAX_ROWS)
                if rows is not None and self._reserve(session, len(rows.tokens)):
                    work.append((session, rows))
            if not work:
                return ran
            ran = True
            logits = self.run(work)
            index = 0
            for session, rows in work:
                session.kv.keep(range(len(rows.tokens)))
                if rows.wanted:
                    self._guess(session, ANCHOR, logits[index])
                    session.tree.root_known = True
                    index += 1

    def _expand(self, working: Sequence[tuple[SessionT, Ask]]) -> bool:
        """Look behind the likeliest leaves of every session in one pass; whether there were any."""
        before = sum(_worth(session.tree, ask) for session, ask in working)
        started = time.perf_counter()
        chosen = [
            (session, session.tree.frontier(self._width, self._bar(session, ask), ask.max_depth))
            for session, ask in working
            if not session.exhausted
        ]
        promised = sum(session.tree.scores[node] for session, nodes in chosen for node in nodes)
        if not self._run_nodes(chosen):
            return False
        seconds = time.perf_counter() - started
        self._pass_s += (_RATE if self._pass_s else 1.0) * (seconds - self._pass_s)
        gained = sum(_worth(session.tree, ask) for session, ask in working) - before
        if promised > 0.0:
            self._yield += _RATE * (gained / promised - self._yield)
        return True

    def _look_ahead(self, working: Sequence[tuple[SessionT, Ask]]) -> bool:
        """Look behind what may be committed next, in one pass; whether there was anything."""
        chosen = []
        for session, ask in working:
            tree = session.tree
            if session.exhausted or not tree.root_known or len(tree.row_parents) >= GROWN_ROWS:
                continue
            if ask.mode == "pipelined":
                chosen.append((session, tree.likeliest_leaf(self._floor, ask.max_depth)))
            else:
                chosen.append((session, tree.frontier(self._width, self._floor, ask.max_depth)))
        return self._run_nodes(chosen)

    def _run_nodes(self, chosen: Iterable[tuple[SessionT, Sequence[int]]]) -> bool:
        """Run the rows of leaves and add what they guess; whether there were any."""
        work, expanded = [], []
        for session, nodes in chosen:
            tree = session.tree
            first = len(tree.row_parents)
            if not nodes or not self._reserve(session, first + len(nodes)):
                continue
            nodes = sorted(nodes)
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
        """Add the likeliest children of a node, by the target's rule and noise, or draw some."""
        depth = 1 + (0 if node == ANCHOR else session.tree.depth_of(node))
        if session.drawn:
            session.draws += 1
            drawn, law = sampling.draw_children(
                logits, self._ids, session.sampling, self.number, session.draws, session.children
            )
            # A score must not depend on what is drawn: whoever cuts by it chooses among nodes, not tokens.
            rates = self._drawn_accuracies.at(depth - 1)[: len(drawn)]
            session.tree.add_children(node, drawn, rates, law)
            return
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


def _worth(tree: Grown, ask: Ask) -> float:
    """Tokens that a step is expected to accept of the tree."""
    return sum(heapq.nlargest(ask.max_nodes, tree.scores))
