"""A draft model that learns from its target's answers (Online Speculative Decoding, arXiv 2310.07177)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workers.draft.drafter import Learning
from workers.draft.drafters.model import ModelDrafter, ModelSession
from workers.draft.models import DraftModel
from workers.engine.model import Model
from workers.request import SamplingParams
from workers.rpc.messages import Features
from workers.training.online import TEXT, ServedAnswer


class Learner(Protocol):
    """Who learns; `model` is the one to draft with now."""

    model: Model
    learning: Learning

    def learn(self, answer: ServedAnswer) -> None:
        """Take an answer that is over."""

    def stop(self) -> None:
        """Learn no more."""


@dataclass(slots=True)
class _Heard:
    tokens: list[int]
    opened: int
    sampling: SamplingParams


class OnlineDrafter(ModelDrafter):
    """Drafts the answers that begin with the model that its learner has then, and lets it learn from each."""

    def __init__(
        self,
        draft: DraftModel,
        learner: Learner,
        num_slots: int,
        width: int,
        steps: int,
        floor: float,
    ) -> None:
        super().__init__(draft, num_slots, width, steps, floor)
        self._learner = learner
        self._heard: dict[int, _Heard] = {}

    @property
    def learning(self) -> Learning:
        """See Drafter."""
        return self._learner.learning

    def make_session(self, sampling: SamplingParams) -> ModelSession:
        """See TreeDrafter."""
        self.model = self._learner.model
        return super().make_session(sampling)

    def open(self, session: int, tokens: Sequence[int], sampling: SamplingParams) -> None:
        """See Drafter."""
        super().open(session, tokens, sampling)
        self._heard[session] = _Heard(list(tokens), len(tokens), sampling)

    def observe(self, session: int, tokens: Sequence[int], features: Sequence[Features]) -> None:
        """See Drafter."""
        super().observe(session, tokens, features)
        self._heard[session].tokens += tokens

    def close(self, session: int) -> None:
        """See Drafter."""
        super().close(session)
        heard = self._heard.pop(session)
        length = len(heard.tokens)
        text = tuple(heard.tokens[-TEXT:])
        # Something must stand before the first token that is guessed.
        answered = min(length - heard.opened, len(text) - 1)
        if answered > 0:
            self._learner.learn(ServedAnswer(text, answered, length, heard.sampling))

    def end(self) -> None:
        """See Drafter."""
        self._learner.stop()
