"""When a step begins and which drafted nodes it verifies: pricing, applied to the sessions of a target."""

from collections.abc import Iterable, Sequence
from typing import Final

from workers.pricing import Arrival, Cut, StepTimes, best_cut, best_wait, price_of_a_row
from workers.target.budget import Budget
from workers.target.counters import Counters
from workers.target.proposals import Outlook
from workers.target.session import TargetSession
from workers.target.trial import Trial
from workers.tree import TokenTree

_IDLE_RATE: Final = 0.1
_LOAD_FALLS: Final = 0.05


class Policy:
    """Decides by predicted step times. `outlooks` of drafters are shared by all answers."""

    def __init__(self, times: StepTimes, counters: Counters) -> None:
        self.times = times
        self.outlooks: dict[str, Outlook] = {}
        self._counters = counters
        self._cut = Cut(0, 1.0, times(1, 0))
        self._plain_s = self._cut.seconds
        self._budget = Budget(self._plain_s)
        self._trials: dict[int, Trial] = {}
        self._load = 1.0
        self._follow = self._insist = False
        self._idle_s = 0.0
        self._rows = 1
        self._context = 0.0

    def lets_draft(self, sessions: Sequence[TargetSession]) -> bool:
        """Whether the drafters beside the target may take their turn for what decodes in its next step."""
        expected = [
            session.proposals.expected(session.beside.asked)
            for session in sessions
            if session.beside is not None and session.beside.asked
        ]
        if not expected:
            return False
        # All wait for a turn, whomever it serves.
        seconds = max(turn.seconds for turn in expected)
        tokens = sum(turn.tokens for turn in expected) / len(sessions)
        return self._budget.covers(seconds, tokens * self.times(len(sessions), _context(sessions)))

    def start(self, sessions: Sequence[TargetSession], now: float) -> float:
        """When a step of these decoding sessions should begin; `now` or later."""
        step_s = self.times(len(sessions), _context(sessions))
        arrivals: list[Arrival] = []
        for session in sessions:
            session.open_mailbox()
            arrivals += session.proposals.arrivals(now, step_s)
        if not arrivals or not self._budget.covers():
            return now
        scores = _scores(session.candidates() for session in sessions)
        cut = best_cut(scores, len(sessions), len(sessions), _context(sessions), self.times)
        return now + best_wait(cut, arrivals)

    def select(
        self, sessions: Sequence[TargetSession], other_rows: int, most: int
    ) -> dict[TargetSession, TokenTree]:
        """The part of each decoding session's tree that the next step verifies.

        `other_rows` are the step's rows of prompts, `most` the drafted rows that there is room for.
        """
        for session in sessions:
            session.open_mailbox()
        affordable = self._budget.covers()
        trees = {session: session.candidates() for session in sessions if affordable}
        self._rows, self._context = len(sessions) + other_rows, _context(sessions)
        drafted = [session.request for session in sessions if session.request.max_nodes]
        self._insist = any(request.insists or request.prediction for request in drafted)
        self._follow = not all(request.insists for request in drafted)
        scores = _scores(trees.values())
        self._cut = best_cut(
            scores[:most],
            len(sessions),
            self._rows,
            self._context,
            self.times,
            self._idle_s,
        )
        self._plain_s = self.times(self._rows, self._context)
        if not scores:
            return trees
        # Sessions in turn give their best nodes until the number is reached; equal scores count for all.
        bar = scores[self._cut.nodes - 1] if self._cut.nodes else 2.0
        selected, left = {}, self._cut.nodes
        for session, tree in trees.items():
            count = min(left, sum(score >= bar for score in tree.scores))
            selected[session] = tree.cut(count, len(tree))
            left -= count
            self._counters.nodes_priced_out += len(tree) - count
        return selected

    def stepped(
        self,
        rows: int,
        idle_s: float,
        waited: bool,
        seconds: float,
        since_s: float,
        sessions: int,
        tokens: int,
    ) -> None:
        """A step is over that began `idle_s` after its `sessions` were ready; they committed `tokens`.

        It has `waited` if that was for drafts. `since_s` have gone by since the step before, or since any of
        them was ready.
        """
        waited_s = idle_s if waited else 0.0
        saved_s = (tokens / sessions - 1) * self._plain_s
        cost_s = waited_s + self._cut.seconds - self._plain_s
        self._budget.paid(waited_s + seconds, cost_s, saved_s, self._plain_s)
        # Between one answer and the next the load is what it was.
        self._load = max(float(sessions), self._load - _LOAD_FALLS)
        if self._rows == sessions and self._follow:
            # Steps that read prompts, or whose answers do without drafts, say nothing of drafting; nor do
            # those in which somebody is drafted whatever the trial says.
            plain = self.times(round(self._load), self._context) / self.times.drift
            self._trial().stepped(tokens, since_s / plain, tells=not self._insist)
        self.times.observe(rows, self._context, seconds)
        self._idle_s += _IDLE_RATE * (min(idle_s, seconds) - self._idle_s)

    @property
    def resting(self) -> bool:
        """Whether nobody should draft now who can be left out."""
        return not self._trial().on

    def _trial(self) -> Trial:
        """The turns at about the load of now."""
        load = round(self._load)
        size = load.bit_length()
        if size not in self._trials:
            below = self._trials.get(max((s for s in self._trials if s < size), default=0))
            self._trials[size] = Trial(load, below is not None and below.loses)
        return self._trials[size]

    def price(self, sessions: int) -> tuple[float, float]:
        """(price of a row in tokens, pace in tokens per second and session) for those that decode."""
        sessions = max(1, sessions)
        rate = max(self._cut.rate, sessions / self.times(sessions, self._context))
        return price_of_a_row(rate, sessions, self._context, self.times), rate / sessions


def _context(sessions: Sequence[TargetSession]) -> float:
    return sum(len(session.tokens) for session in sessions) / max(1, len(sessions))


def _scores(trees: Iterable[TokenTree]) -> list[float]:
    return sorted((score for tree in trees for score in tree.scores), reverse=True)
