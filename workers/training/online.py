"""Learning while serving: a draft learns the answers that it hears of (OSD, Liu et al., arXiv 2310.07177).

An answer teaches most where the draft was wrong: what the target said there is what to guess. Prompts teach
nothing. After a round of learning, the answers that come next are guessed with the update and without it. One
that clearly helps is what later ones are compared with; one that clearly harms is taken back. One that does
neither stays, together with the next: what many of them do becomes clear.
"""

import os
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from safetensors.torch import save

from workers.draft.drafter import Learning
from workers.draft.models import load_draft_module
from workers.draft.updates import Updates, learnable
from workers.request import SamplingParams
from workers.sampling import rank_children
from workers.training.distill import LowRank

TEXT: Final = 512
"""Last tokens of prompt and answer that are read."""

ANSWERS: Final = 8
"""Answers between two rounds of learning."""

MOST_ANSWERS: Final = 128
"""The same where learning has not helped for long; no more are remembered."""

MOST_COMPARED: Final = 512
"""Tokens on which an update is compared that makes no clear difference."""

_RANK: Final = 32
_LEARNING_RATE: Final = 1.5e-3
_RIGHT: Final = 0.1
"""How much a token counts that was guessed, beside one that was not."""

_LEAST_DIFFERING: Final = 12
_LOWEST_PRIORITY: Final = 19
_IGNORED: Final = -100


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """The end of an answer of `length` tokens with its prompt; `answered` of `tokens` are what is guessed."""

    tokens: tuple[int, ...]
    answered: int
    length: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Lesson:
    """What answers have taught: updates to draft with from now on, if others than before."""

    updates: Updates | None
    learning: Learning


class OnlineStudent:
    """A draft model that learns by updates of low rank.

    `ids` [Vd] are the target's ids of what it can guess, None where they are its own.
    """

    def __init__(self, module: Any, ids: torch.Tensor | None, seed: int = 0) -> None:
        """Take one of transformers' models in float32."""
        self._module = module.requires_grad_(False)
        self._ids = ids
        vocabulary = torch.arange(module.lm_head.out_features) if ids is None else ids.long()
        self._places = torch.full((module.config.vocab_size,), _IGNORED)
        self._places[vocabulary] = torch.arange(len(vocabulary))
        torch.manual_seed(seed)
        self._random = random.Random(seed)
        self._parameters: dict[str, torch.nn.Parameter] = {}
        for name in learnable(module):
            layer = LowRank(module.get_submodule(name), _RANK)
            module.set_submodule(name, layer)
            self._parameters |= {f"{name}.up": layer.up, f"{name}.down": layer.down}
        module.lm_head.to(torch.bfloat16)
        self._served = self._copy()
        self._before: Updates | None = None
        self._judging = False
        self._lead = self._differ = self._compared = 0
        self._remembered: deque[tuple[ServedAnswer, torch.Tensor]] = deque(maxlen=MOST_ANSWERS)
        self._new, self._patience = 0, ANSWERS
        self._optimizer = self._begin()
        self._learning = Learning()

    def learn(self, answers: Sequence[ServedAnswer]) -> Lesson:
        """Compare on answers what was learned, remember them, and learn if it is time."""
        served = self._served
        for answer in answers:
            right = self._right(answer, self._served)
            if self._judging and self._before is not None:
                self._judge(right, self._right(answer, self._before), self._before)
            weights = torch.where(torch.tensor(right), _RIGHT, 1.0)
            self._remembered.append((answer, weights))
            self._new += 1
        if not self._judging and self._new >= self._patience:
            self._learn()
        return Lesson(None if self._served is served else self._served, self._learning)

    def _judge(self, right: list[bool], right_before: list[bool], before: Updates) -> None:
        """Take an answer into account, and decide if enough was seen."""
        self._lead += sum(right) - sum(right_before)
        self._differ += sum(a != b for a, b in zip(right, right_before, strict=True))
        self._compared += len(right)
        done = self._learning
        self._learning = done = replace(
            done,
            online_compared=done.online_compared + len(right),
            online_right=done.online_right + sum(right),
            online_right_before=done.online_right_before + sum(right_before),
        )
        # The sign test on the tokens where they differ: two standard deviations decide.
        clear = self._differ >= _LEAST_DIFFERING and self._lead**2 > 4 * self._differ
        if not clear and self._compared < MOST_COMPARED:
            return
        self._judging = False
        if self._lead <= 0:
            self._patience = min(MOST_ANSWERS, 2 * self._patience)
        elif clear:
            self._patience = ANSWERS
        if clear:
            self._before = None
        if clear and self._lead < 0:
            self._served = before
            self._optimizer = self._begin()
            self._learning = replace(done, online_reverts=done.online_reverts + 1)

    def _learn(self) -> None:
        """One pass over what is new, and as much of what is older."""
        self._take(self._served)
        answers = list(self._remembered)
        old, new = answers[: -self._new], answers[-self._new :]
        texts = new + self._random.sample(old, min(len(old), len(new)))
        self._random.shuffle(texts)
        for answer, weights in texts:
            self._loss(answer, weights).backward()
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
        if self._before is None:
            self._before = self._served
        self._served = self._copy()
        self._judging = True
        self._lead = self._differ = self._compared = self._new = 0
        self._learning = replace(self._learning, online_updates=self._learning.online_updates + 1)

    def _loss(self, answer: ServedAnswer, weights: torch.Tensor) -> torch.Tensor:
        places = self._places[torch.tensor(answer.tokens[-answer.answered :])]
        losses = torch.nn.functional.cross_entropy(
            self._logits(answer), places, ignore_index=_IGNORED, reduction="none"
        )
        return (losses * weights).sum() / weights.sum()

    @torch.no_grad()
    def _right(self, answer: ServedAnswer, updates: Updates) -> list[bool]:
        """Whether the first guess of each answered token is right, with the answer's own noise."""
        self._take(updates)
        first = answer.length - answer.answered
        right = []
        for i, row in enumerate(self._logits(answer)):
            guess, _ = rank_children(row, self._ids, answer.sampling, first + i, 1.0, 1)
            right.append(guess == [int(self._places[answer.tokens[i - answer.answered]])])
        return right

    def _logits(self, answer: ServedAnswer) -> torch.Tensor:
        """What is guessed for the answered tokens, float32 [answered, Vd]."""
        tokens = torch.tensor([answer.tokens[:-1]])
        with torch.autocast("cpu", torch.bfloat16):
            made = self._module(tokens, use_cache=False, logits_to_keep=answer.answered)
        return made.logits[0].float()  # type: ignore[no-any-return]

    def _begin(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self._parameters.values(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )

    @torch.no_grad()
    def _take(self, updates: Updates) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(updates[name])

    def _copy(self) -> Updates:
        return {name: value.detach().clone() for name, value in self._parameters.items()}


def study(reference: str, connection: Connection) -> None:
    """Be a student in a process of its own, until the other end closes: lists of answers come, lessons go."""
    os.nice(_LOWEST_PRIORITY)
    torch.set_num_threads(1)
    student = OnlineStudent(*load_draft_module(reference, "float32", "cpu"))
    while True:
        try:
            lesson = student.learn(connection.recv())
            # As bytes: what torch sends by itself needs shared memory, of which containers have little.
            packed = None if lesson.updates is None else save(dict(lesson.updates))
            connection.send((packed, lesson.learning))
        except (EOFError, OSError):
            return
