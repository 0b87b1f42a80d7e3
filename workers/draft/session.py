"""One session on a draft worker: what is committed, and what it may be asked."""

import time

from workers.draft.drafter import Ask
from workers.rpc import messages as m
from workers.rpc.connection import Channel


class DraftSession:
    """The drafting side of one answer.

    Commits come in on the event loop and wait in one slot, joined, until the drafting thread takes
    them; so a slow drafter skips what it is late for.
    """

    def __init__(self, number: int, request: m.OpenDraft, channel: Channel) -> None:
        self.number = number
        self.request = request
        self.channel = channel
        self.length = len(request.tokens)
        self.waiting: m.Commit | None = None
        self.arrived = time.monotonic()

    def ask(self) -> Ask:
        """What a drafter may propose now: never past the length that the answer can reach."""
        return Ask(
            session=self.number,
            max_nodes=self.request.max_nodes,
            max_depth=max(0, self.request.max_len - self.length - 1),
            chain=self.request.chain,
        )
