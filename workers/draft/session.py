"""One session with one drafter: what is committed, and what it may be asked."""

import time
from collections.abc import Callable
from typing import Any

from workers.draft.drafter import Ask
from workers.rpc import messages as m


class DraftSession:
    """The drafting side of one answer, for one drafter.

    Commits arrive on the event loop and wait in one slot, joined, until the drafting thread takes
    them; so a slow drafter skips what it is late for. `send` tells the coordinator, on the event loop.
    `unanswered` is a session that was asked before its drafter could say anything.
    """

    def __init__(self, number: int, request: m.OpenDraft, send: Callable[[Any], None]) -> None:
        self.number = number
        self.request = request
        self.send = send
        self.waiting: m.Commit | None = None
        self.arrived = time.monotonic()
        self.drafted_to = len(request.tokens)
        self.unanswered = False
        self._price = self._pace = 0.0

    @property
    def grows(self) -> bool:
        """Whether its tree grows while the target verifies."""
        return self.request.mode != "sequential"

    def committed(self, commit: m.Commit) -> None:
        """The drafting thread takes a commit."""
        self.drafted_to += len(commit.tokens)
        if commit.tokens:
            self._price, self._pace = commit.price, commit.pace

    def ask(self) -> Ask:
        """What a drafter may propose now: never past the length that the answer can reach."""
        return Ask(
            session=self.number,
            max_nodes=self.request.max_nodes,
            max_depth=max(0, self.request.max_len - self.drafted_to - 1),
            chain=self.request.chain,
            drawn=self.request.drawn,
            mode=self.request.mode,
            price=self._price,
            pace=self._pace,
        )
