"""The drafters of one process, each with a thread of its own, and the sessions that several of them share."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workers.draft import drafters
from workers.draft.config import DrafterConfig
from workers.draft.drafter import Drafter
from workers.draft.loop import DraftLoop
from workers.draft.session import DraftSession
from workers.rpc import messages as m
from workers.rpc.errors import InvalidRequest, ProtocolError


class DrafterGroup:
    """Drafters by name. `on_event_loop` runs a function on the event loop that sends messages."""

    def __init__(
        self,
        configs: Sequence[DrafterConfig],
        target: str,
        on_event_loop: Callable[[Callable[[], None]], None],
        made: Mapping[str, Drafter] | None = None,
    ) -> None:
        """Make the drafters for the target of this reference, or take those given by name."""
        self._on_event_loop = on_event_loop
        self._drafters = made or {c.name: drafters.make(c, target) for c in configs}
        self._loops = {
            c.name: DraftLoop(c.name, self._drafters[c.name], self._deliver, c.num_threads)
            for c in configs
        }
        self._numbers = itertools.count(1)
        self.infos = tuple(
            m.DrafterInfo(
                c.name,
                c.kind,
                needs_features=self._drafters[c.name].feature_window > 0,
                vocabulary_fingerprint=self._drafters[c.name].vocabulary_fingerprint,
                feature_window=self._drafters[c.name].feature_window,
            )
            for c in configs
        )

    @property
    def num_sessions(self) -> int:
        """Sessions that are open, once for each of their drafters."""
        return sum(loop.num_sessions for loop in self._loops.values())

    def start(self) -> None:
        """Start the threads."""
        for loop in self._loops.values():
            loop.start()

    def stop(self) -> None:
        """End all sessions and threads."""
        for loop in self._loops.values():
            loop.stop()

    def check_health(self) -> None:
        """Raise RuntimeError if a thread died."""
        for loop in self._loops.values():
            if not loop.alive:
                raise RuntimeError(f"the thread of drafter {loop.name} is dead")

    def check(self, names: Sequence[str]) -> None:
        """Raise InvalidRequest unless there are names, all of drafters that are here."""
        unknown = [name for name in names if name not in self._loops]
        if unknown or not names:
            raise InvalidRequest(
                f"drafters {list(names)}: this worker has {', '.join(self._loops) or 'none'}"
            )

    def open(self, request: m.OpenDraft, send: Callable[[Any], None]) -> "GroupSession":
        """Start drafting for an answer; `send` gets proposals and failures, on the event loop."""
        sessions = {}
        for name in request.drafters:
            sessions[name] = DraftSession(next(self._numbers), request, send)
            self._loops[name].open(sessions[name])
        return GroupSession(self._loops, sessions, len(request.tokens))

    def feature_window(self, names: Sequence[str]) -> int:
        """How many positions back the widest of these drafters reads features; 0 if none does."""
        return max((self._drafters[name].feature_window for name in names), default=0)

    def _deliver(self, results: Sequence[tuple[DraftSession, Any]]) -> None:
        def send() -> None:
            for session, message in results:
                session.send(message)

        self._on_event_loop(send)


class GroupSession:
    """One answer, for all its drafters."""

    def __init__(
        self, loops: Mapping[str, DraftLoop], sessions: Mapping[str, DraftSession], received: int
    ) -> None:
        self._loops = loops
        self._sessions = sessions
        self._received = received

    def commit(self, message: m.Commit) -> None:
        """Tokens were committed; what came before is not taken twice. Raises ProtocolError for a gap."""
        if message.base_len > self._received:
            raise ProtocolError(
                f"commit at {message.base_len}, but only {self._received} tokens are known here"
            )
        tokens = message.tokens[self._received - message.base_len :]
        news = replace(message, base_len=self._received, tokens=tokens)
        self._received += len(tokens)
        for name, session in self._sessions.items():
            self._loops[name].commit(session, news)

    def feature(self, features: m.Features) -> None:
        """Features of positions that were committed before."""
        self.commit(m.Commit(self._received, (), (features,)))

    def close(self) -> None:
        """The answer is over."""
        for name, session in self._sessions.items():
            self._loops[name].close(session)
