"""One text as training sees it, with what its target thought of it."""

from dataclasses import dataclass
from typing import Final

import torch

PROMPT_WEIGHT: Final = 0.3
"""Of a prompt's positions beside an answer's: most prompts are the target's own text, too."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A text and the target's states; T tokens, H hidden, F three times as much.

    `tokens` int64 [T]; `answer_from` is where the answer begins; `last` [T, H] are the states behind the
    last norm, `three` [T, F] those that enter three layers, where they are trained on. `shares` float32 [T],
    if given, are what positions keep of their weight.
    """

    tokens: torch.Tensor
    answer_from: int
    last: torch.Tensor
    three: torch.Tensor | None
    shares: torch.Tensor | None = None

    def weights(self) -> torch.Tensor:
        """How much each position counts, float32 [T]: position t stands for the guess of token t + 1."""
        weights = torch.full((len(self.tokens),), PROMPT_WEIGHT, device=self.tokens.device)
        weights[self.answer_from - 1 :] = 1.0
        return weights if self.shares is None else weights * self.shares


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's head over the draft vocabulary and over its own.

    `reduced` [Vd, H] and `whole` [V, H] in the dtype of the states; `vocabulary` int64 [Vd] ascending.
    """

    vocabulary: torch.Tensor
    reduced: torch.Tensor
    whole: torch.Tensor

    @staticmethod
    def of(head: torch.Tensor, vocabulary: torch.Tensor, dtype: torch.dtype) -> "Teacher":
        """Made from the target's head [V, H]."""
        whole = head.to(dtype)
        return Teacher(vocabulary.long(), whole[vocabulary.long()], whole)

    def law(self, last: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """The target's log-probabilities over the draft vocabulary, float32 [T, Vd]."""
        return ((last @ self.reduced.T).float() / temperature).log_softmax(-1)

    def choices(self, last: torch.Tensor) -> torch.Tensor:
        """The token that the target takes at temperature 0, [T]."""
        return (last @ self.whole.T).argmax(-1)


@dataclass(slots=True)
class Agreement:
    """How often a draft's guesses hold what the target takes, over the positions of answers.

    `hits[d][k]` of `tests[d]` at depth d + 1, for the first 1, 3 and 8 guesses; `overlap` is Σ min(p, q) over
    the draft vocabulary, summed over the positions of depth 1.
    """

    ranks = (1, 3, 8)

    hits: list[list[int]]
    tests: list[int]
    overlap: float = 0.0

    @staticmethod
    def over(depths: int) -> "Agreement":
        """Nothing counted yet."""
        return Agreement([[0, 0, 0] for _ in range(depths)], [0] * depths)

    def count(self, depth: int, guesses: torch.Tensor, choices: torch.Tensor) -> None:
        """Count guesses [T, 8], best first, against the target's choices [T], at a depth from 0."""
        right = guesses == choices[:, None]
        for place, rank in enumerate(self.ranks):
            self.hits[depth][place] += int(right[:, :rank].any(1).sum())
        self.tests[depth] += len(choices)

    def rates(self) -> list[list[float]]:
        """Per depth the share of hits within the first 1, 3 and 8 guesses."""
        return [
            [round(hit / max(1, tests), 4) for hit in hits]
            for hits, tests in zip(self.hits, self.tests, strict=True)
        ]
