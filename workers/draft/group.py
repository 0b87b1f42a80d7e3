"""The drafters of one process, and the sessions that several of them share."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from workers.draft import drafters
from workers.draft.config import DrafterConfig, WeightedConfig
from workers.draft.drafter import Drafter, Learning
from workers.draft.loop import DraftCounters, DraftLoop
from workers.draft.session import DraftSession
from workers.rpc import messages as m
from workers.rpc.errors import InvalidRequest, ProtocolError

if TYPE_CHECKING:
    # A worker whose drafters have no model needs no torch.
    from workers.engine.model import Model

logger = logging.getLogger(__name__)


class DrafterGroup:
    """Drafters by name. `deliver` runs a function that sends messages, where they may be sent from.

    Once started, each has a thread of its own; else they work whenever somebody lets them take their `turn`.
    """

    def __init__(
        self,
        configs: Sequence[DrafterConfig],
        target: str,
        deliver: Callable[[Callable[[], None]], None],
        made: Mapping[str, Drafter] | None = None,
        host: "Model | None" = None,
    ) -> None:
        """Make the drafters for the target of this reference, or take those of them that are given by name.

        `host` is the target itself where it is in this process, for drafters that use its layers.
        """
        self._host = host
        self._deliver_by = deliver
        self._target = target
        self._configs = {c.name: c for c in configs}
        given = made or {}
        self._loops = {
            c.name: self._loop(c, given.get(c.name) or drafters.make(c, target, host))
            for c in configs
        }
        self._retired: list[DraftLoop] = []
        self._started = False
        self._numbers = itertools.count(1)

    @property
    def infos(self) -> tuple[m.DrafterInfo, ...]:
        """The drafters, as the worker introduces them."""
        made = []
        for name, loop in self._loops.items():
            drafter = loop.drafter
            made.append(
                m.DrafterInfo(
                    name,
                    self._configs[name].kind,
                    feature_width=drafter.feature_width,
                    vocabulary_fingerprint=drafter.vocabulary_fingerprint,
                    feature_window=drafter.feature_window,
                )
            )
        return tuple(made)

    @property
    def num_sessions(self) -> int:
        """Sessions that are open, once for each of their drafters."""
        return sum(loop.num_sessions for loop in (*self._loops.values(), *self._retired))

    @property
    def counters(self) -> dict[str, int]:
        """What all drafters have done, by the names of DraftCounters and Learning."""
        every = [
            {**asdict(loop.counters), **asdict(loop.drafter.learning)}
            for loop in self._loops.values()
        ]
        names = [field.name for field in (*fields(DraftCounters), *fields(Learning))]
        return {name: sum(counters[name] for counters in every) for name in names}

    def start(self) -> None:
        """Start the threads."""
        self._started = True
        for loop in self._loops.values():
            loop.start()

    def stop(self) -> None:
        """End all sessions and threads."""
        for loop in (*self._loops.values(), *self._retired):
            loop.stop()

    def turn(self) -> None:
        """Let each drafter take what is new, and propose."""
        for loop in (*self._loops.values(), *self._retired):
            loop.turn()

    def check_health(self) -> None:
        """Raise RuntimeError if a thread died."""
        for loop in self._loops.values():
            if not loop.alive:
                raise RuntimeError(f"the thread of drafter {loop.name} is dead")

    async def reload(self, weights: Mapping[str, str]) -> None:
        """Give drafters, by name, the weights of other references.

        Answers that are in the making keep the weights that they began with, so no round mixes two
        versions; those that begin later draft with the new ones. Raises ValueError, and changes nothing
        of a drafter, if its new weights cannot take the place of the old ones.
        """
        for name, reference in weights.items():
            config = self._configs.get(name)
            if not isinstance(config, WeightedConfig):
                named = ", ".join(self._configs) or "none"
                raise ValueError(f"weights: {name!r} is no drafter with weights here ({named})")
            if config.model == reference:
                continue
            changed = replace(config, model=reference)
            made = await asyncio.to_thread(drafters.make, changed, self._target, self._host)
            old = self._loops[name]
            if made.feature_kind != old.drafter.feature_kind:
                raise ValueError(
                    f"weights of {name!r}: {reference} reads other features of the target than "
                    f"{config.model}; that needs a restart"
                )
            self._loops[name] = self._loop(changed, made)
            if self._started:
                self._loops[name].start()
            self._configs[name] = changed
            self._retired = [loop for loop in (*self._retired, old) if not loop.stop_when_idle()]
            logger.info("drafter %s: weights of %s from now on", name, reference)

    def check(self, names: Sequence[str]) -> None:
        """Raise InvalidRequest unless there are names, all of drafters that are here."""
        unknown = [name for name in names if name not in self._loops]
        if unknown or not names:
            raise InvalidRequest(
                f"drafters {list(names)}: this worker has {', '.join(self._loops) or 'none'}"
            )

    def open(self, request: m.OpenDraft, send: Callable[[Any], None]) -> "GroupSession":
        """Start drafting for an answer; `send` gets proposals and failures, by way of `deliver`."""
        sessions = {}
        for name in request.drafters:
            sessions[name] = DraftSession(next(self._numbers), request, send)
            self._loops[name].open(sessions[name])
        # Weights may be reloaded later: this answer stays with the loops that it began in.
        return GroupSession(dict(self._loops), sessions, request)

    def feature_window(self, names: Sequence[str]) -> int:
        """How many positions back the widest of these drafters reads features; 0 if none does."""
        return max((self._loops[name].drafter.feature_window for name in names), default=0)

    def reads_choices(self, names: Sequence[str]) -> bool:
        """Whether one of these drafters wants to know what the rows of each step say."""
        return any(self._loops[name].drafter.reads_choices for name in names)

    def _loop(self, config: DrafterConfig, drafter: Drafter) -> DraftLoop:
        return DraftLoop(config.name, drafter, self._deliver, config.num_threads)

    def _deliver(self, results: Sequence[tuple[DraftSession, Any]]) -> None:
        def send() -> None:
            for session, message in results:
                session.send(message)

        self._deliver_by(send)


class GroupSession:
    """One answer, for all its drafters."""

    def __init__(
        self,
        loops: Mapping[str, DraftLoop],
        sessions: Mapping[str, DraftSession],
        request: m.OpenDraft,
    ) -> None:
        self._loops = loops
        self._sessions = sessions
        self._received = len(request.tokens)
        self._max_len = request.max_len
        self._widths = {loops[name].drafter.feature_width for name in sessions} - {0}

    def commit(self, message: m.Commit) -> None:
        """Tokens were committed; what came before is not taken twice. Raises ProtocolError for a gap."""
        commit_together([(self, message)])

    def news(self, message: m.Commit) -> m.Commit:
        """What of a commit is new here.

        Raises ProtocolError for a gap, tokens behind the end, and features of other positions or widths.
        """
        if message.base_len > self._received:
            raise ProtocolError(
                f"commit at {message.base_len}, but only {self._received} tokens are known here"
            )
        tokens = message.tokens[self._received - message.base_len :]
        if tokens and self._received + len(tokens) > self._max_len:
            raise ProtocolError(
                f"{self._received + len(tokens)} tokens; this answer ends after {self._max_len}"
            )
        for features in message.features:
            unread = self._widths and features.width not in self._widths
            if unread or features.end > self._received + len(tokens):
                raise ProtocolError(
                    f"features of positions up to {features.end} with {features.width} values, where "
                    f"{self._received + len(tokens)} tokens are known and drafters read "
                    f"{sorted(self._widths)}"
                )
        news = replace(message, base_len=self._received, tokens=tokens)
        self._received += len(tokens)
        return news

    def loops(self) -> Iterator[tuple[DraftLoop, DraftSession]]:
        """Each drafter's loop, and the session there."""
        for name, session in self._sessions.items():
            yield self._loops[name], session

    def feature(self, features: m.Features) -> None:
        """Features of positions that were committed before."""
        self.commit(m.Commit(self._received, (), (features,)))

    def close(self) -> None:
        """The answer is over."""
        for loop, session in self.loops():
            loop.close(session)


def commit_together(commits: Iterable[tuple[GroupSession, m.Commit]]) -> None:
    """Commits of one step: each drafter hears of all at once, and drafts for all in one pass."""
    told: dict[DraftLoop, list[tuple[DraftSession, m.Commit]]] = {}
    for group_session, message in commits:
        news = group_session.news(message)
        for loop, session in group_session.loops():
            told.setdefault(loop, []).append((session, news))
    for loop, news_of_all in told.items():
        loop.commit(news_of_all)
