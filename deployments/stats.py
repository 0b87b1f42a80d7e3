"""What speculation did for one request, and how long it took."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from workers.rpc import messages as m

Fault = Literal["target_lost", "draft_lost", "drafter_failed", "gap", "duplicate"]
"""What can go wrong on the way of an answer that its reader does not notice."""


@dataclass(slots=True)
class RequestStats:
    """Counts over the rounds of an answer: every pass of the target after the prefill.

    completion tokens = 1 + rounds + accepted_tokens - tokens cut behind a stop: a round commits what it
    accepted and one token of the target's own, unless an accepted token ended the answer.
    """

    drafter: str = ""
    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    committed_tokens: int = 0
    proposals: int = 0
    hits: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)
    finish_reason: str = "abort"
    _began: float = field(default_factory=time.monotonic)
    _placed: float | None = None
    _first: float | None = None
    _last: float = 0.0
    _tokens: int = 0
    _tested: list[int] = field(default_factory=list)
    _accepted: list[int] = field(default_factory=list)

    def placed(self) -> None:
        """The answer has a place on a target."""
        self._placed = self._placed or time.monotonic()

    def came(self, tokens: int) -> None:
        """So many tokens have come."""
        self._last = time.monotonic()
        self._first = self._first or self._last
        self._tokens += tokens

    def committed(self, committed: m.Committed) -> None:
        """Count a round."""
        self.rounds += 1
        self.drafts += committed.drafted > 0
        self.draft_tokens += committed.drafted
        self.accepted_tokens += committed.accepted
        self.committed_tokens += len(committed.tokens)
        while len(self._tested) < committed.tested:
            self._tested.append(0)
            self._accepted.append(0)
        for depth in range(committed.tested):
            self._tested[depth] += 1
            self._accepted[depth] += depth < committed.accepted

    def proposed(self, proposal: m.Proposal) -> None:
        """Count a proposal."""
        if proposal.tree:
            self.proposals += 1
            self.hits += proposal.hit

    @property
    def mean_accepted_length(self) -> float:
        """Tokens committed per round, bonus included; 0 before the first round."""
        return self.committed_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """At index d: how often a token at depth d + 1 was accepted when that depth was tested."""
        return [a / t for a, t in zip(self._accepted, self._tested, strict=True)]

    @property
    def tokens(self) -> int:
        """Tokens that have come."""
        return self._tokens

    @property
    def accepted_by_depth(self) -> list[int]:
        """At index d: how many tokens at depth d + 1 were accepted."""
        return self._accepted

    @property
    def queue_s(self) -> float | None:
        """Seconds until the answer had a place on a target; None if it never had one."""
        return None if self._placed is None else self._placed - self._began

    @property
    def first_token_s(self) -> float | None:
        """Seconds until the first token; None if there was none."""
        return None if self._first is None else self._first - self._began

    @property
    def token_s(self) -> float | None:
        """Seconds a token after the first; None if there was none."""
        if self._first is None or self._tokens < 2:
            return None
        return (self._last - self._first) / (self._tokens - 1)

    @property
    def request_s(self) -> float:
        """Seconds since the request."""
        return time.monotonic() - self._began

    @property
    def hit_rate(self) -> float:
        """Proposals that were ready before the commit that they follow, per proposal."""
        return self.hits / self.proposals if self.proposals else 0.0

    def add(self, other: "RequestStats") -> None:
        """Add the counts of another answer of the same request."""
        self.drafter = self.drafter or other.drafter
        self.rounds += other.rounds
        self.drafts += other.drafts
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.committed_tokens += other.committed_tokens
        self.proposals += other.proposals
        self.hits += other.hits
        for mine, theirs in ((self._tested, other._tested), (self._accepted, other._accepted)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for depth, count in enumerate(theirs):
                mine[depth] += count
