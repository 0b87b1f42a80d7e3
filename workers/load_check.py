"""Answers with drafts and without, so many at once, in this process: part of the check of a device.

A recorded drafter stands in for a trained one: it knows the target's own answers and is right about the next
token as often as it is told to be. What drafting costs the target's steps, and what the price makes of it, is
real.
"""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import tokenizers
from tokenizers.models import WordLevel

from workers.draft.config import LookupConfig
from workers.draft.drafter import Ask, Drafter
from workers.draft.group import DrafterGroup
from workers.engine.model import Model
from workers.pricing import StepTimes
from workers.request import SamplingParams, StopRules
from workers.rpc import messages as m
from workers.target.beside import BesideSession
from workers.target.counters import Counters
from workers.target.loop import TargetLoop
from workers.target.policy import Policy
from workers.target.scheduler import Scheduler
from workers.target.session import TargetSession
from workers.tree import TokenTree

NAME: Final = "recorded"
PROMPT: Final = 64
ANSWER: Final = 96
DEPTH: Final = 7


class RecordedDrafter(Drafter):
    """Proposes the next tokens of answers that it has heard, each right with probability `acceptance`."""

    def __init__(self, acceptance: float, vocab_size: int) -> None:
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._rng = random.Random(0)
        self._known: dict[int, list[int]] = {}

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        self._known[session] = list(tokens)

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[m.Features]) -> None:
        """See Drafter."""
        self._known[session] += tokens

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        """See Drafter."""
        return [self._chain(ask) for ask in asks]

    def close(self, session: int) -> None:
        """See Drafter."""
        del self._known[session]

    def _chain(self, ask: Ask) -> TokenTree:
        known = self._known[ask.session]
        answer = self.answers.get(tuple(known[:PROMPT]), ())
        tokens = list(answer[len(known) - PROMPT :][: min(DEPTH, ask.max_nodes, ask.max_depth)])
        for place, token in enumerate(tokens):
            if self._rng.random() > self._acceptance:
                tokens[place] = (token + 1) % self._vocab_size
                break
        scores = [self._acceptance ** (depth + 1) for depth in range(len(tokens))]
        return TokenTree.chain(tokens, scores)


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens per second of so many answers at once."""

    at_once: int
    plain: float
    drafted: float


def measure(
    model: Model, times: StepTimes, loads: Sequence[int], acceptance: float, max_nodes: int
) -> list[Load]:
    """Each load without drafts, which are recorded, and with them."""
    drafter = RecordedDrafter(acceptance, model.info.vocab_size)
    rng = random.Random(1)
    made = []
    for at_once in loads:
        prompts = [
            tuple(rng.randrange(5, model.info.vocab_size) for _ in range(PROMPT))
            for _ in range(at_once)
        ]
        speeds = []
        for nodes in (0, max_nodes):
            run = _Run(model, times, drafter, prompts, nodes)
            speeds.append(at_once * ANSWER / run.seconds)
            if not nodes:
                drafter.answers |= run.answers
        made.append(Load(at_once, *speeds))
    return made


class _Run:
    """All prompts answered at once: `seconds`, and the `answers` by prompt."""

    def __init__(
        self,
        model: Model,
        times: StepTimes,
        drafter: Drafter,
        prompts: Sequence[tuple[int, ...]],
        max_nodes: int,
    ) -> None:
        self._left = len(prompts)
        self._over = threading.Event()
        self._failed = ""
        counters = Counters()
        pool = model.pool(len(prompts) * (PROMPT + ANSWER + 64))
        policy = Policy(times, counters)
        scheduler = Scheduler(pool, None, len(prompts), 2048, "fcfs", policy, counters)
        group = DrafterGroup((LookupConfig(NAME),), "", lambda send: send(), {NAME: drafter})
        loop = TargetLoop(model, scheduler, self._deliver, counters, 0, group.turn)
        # No text is made: the vocabulary is of no interest.
        tokenizer: Any = tokenizers.Tokenizer(WordLevel({"": 0}, unk_token=""))
        sessions = []
        for prompt in prompts:
            request = m.OpenTarget(
                "",
                prompt,
                PROMPT,
                SamplingParams(temperature=0),
                StopRules(ANSWER, ignore_eos=True),
                drafters=(NAME,) if max_nodes else (),
                max_nodes=max_nodes,
            )
            session = TargetSession(
                request,
                pool.sequence(),
                tokenizer,
                frozenset(),
                PROMPT + ANSWER + 1,
                max_nodes,
                counters,
                policy.outlooks,
            )
            if max_nodes:
                session.beside = self._beside(group, session, loop)
            sessions.append(session)
        loop.start()
        started = time.perf_counter()
        for session in sessions:
            loop.submit(session)
        self._over.wait()
        self.seconds = time.perf_counter() - started
        loop.stop()
        group.stop()
        if self._failed:
            raise RuntimeError(self._failed)
        self.answers = {s.request.tokens: s.tokens[PROMPT:] for s in sessions}

    def _beside(
        self, group: DrafterGroup, session: TargetSession, loop: TargetLoop
    ) -> BesideSession:
        request = session.request
        opened = m.OpenDraft(
            "",
            request.tokens,
            request.sampling,
            request.drafters,
            request.max_nodes,
            True,
            PROMPT + ANSWER,
            "sequential",
        )

        def drafted(message: Any) -> None:
            if isinstance(message, m.Proposal):
                session.proposals.put(message.drafter, message.base_len, message.tree)

        drafting = group.open(opened, drafted)
        return BesideSession(drafting, request.drafters, 0, False, PROMPT)

    def _deliver(self, results: Sequence[tuple[TargetSession, Any]]) -> None:
        for session, message in results:
            if isinstance(message, m.Failed):
                self._failed = message.message
            if isinstance(message, m.Finished | m.Failed):
                if session.beside is not None:
                    session.beside.close()
                self._left -= 1
        if not self._left:
            self._over.set()
