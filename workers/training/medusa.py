"""Training Medusa heads: the target stays as it is, each head learns its law some positions on (Medusa-1,
arXiv 2401.10774 §2.2.1).

Legend: T tokens, K heads, R positions of an answer. The state of position t has the law of token t + 1; the
head of depth d, counted from 0, learns that of token t + 2 + d from it.
"""

from pathlib import Path
from typing import Final

import torch

from workers.draft.medusa import MedusaHeads, save_heads
from workers.training.losses import Divergence
from workers.training.samples import Agreement, Sample, Teacher

DEPTH_WEIGHT: Final = 0.8


class MedusaLearner:
    """Medusa heads in training."""

    def __init__(
        self, heads: MedusaHeads, teacher: Teacher, target: str, divergence: Divergence
    ) -> None:
        self._heads = heads
        self._teacher = teacher
        self._target = target
        self._divergence = divergence
        self.depths = len(heads.heads)

    def parameters(self) -> list[torch.nn.Parameter]:
        """See Learner."""
        return [parameter for parameter in self._heads.parameters() if parameter.requires_grad]

    def loss(self, sample: Sample) -> torch.Tensor:
        """See Learner."""
        law = self._teacher.law(sample.last[1:])
        weights = sample.weights()[1:]
        total = torch.zeros((), device=law.device)
        scale = 0.0
        for depth, logits in enumerate(self._logits(sample.last[:-1])):
            count = max(0, len(law) - depth)
            rows = self._divergence(law[depth:], logits[:count].float().log_softmax(-1))
            weight = DEPTH_WEIGHT**depth
            share = (rows * weights[depth:]).sum() / weights[depth:].sum().clamp(min=1e-9)
            total = total + weight * share
            scale += weight
        return total / scale

    def agreement(self, sample: Sample, into: Agreement) -> None:
        """See Learner."""
        guesses, choices = self.levels(sample)
        for depth in range(self.depths):
            into.count(depth, guesses[depth], choices[depth])
        logits, last = self.first_guesses(sample)
        rows = slice(guesses.shape[1])
        law = self._teacher.law(last[rows]).exp()
        into.overlap += float(torch.minimum(logits[rows].softmax(-1), law).sum())

    def levels(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """See LevelGuesser."""
        choices = self._teacher.choices(sample.last[1:])
        # The first token of an answer is guessed from the state two positions before it.
        first = max(0, sample.answer_from - 2)
        end = max(first, len(choices) - self.depths + 1)
        guesses = self._logits(sample.last[first:end]).topk(8).indices
        taken = [choices[first + depth : end + depth] for depth in range(self.depths)]
        return self._teacher.vocabulary[guesses], torch.stack(taken)

    def first_guesses(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [rows, Vd] for every token of the answer, and the target's states [rows, H] there."""
        first = max(0, sample.answer_from - 2)
        return self._logits(sample.last[first:-1])[0].float(), sample.last[first + 1 :]

    def save(self, folder: Path) -> None:
        """See Learner."""
        save_heads(folder, self._heads, self._target)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [K, rows, Vd] of all heads."""
        with torch.autocast(states.device.type, torch.bfloat16):
            logits: torch.Tensor = self._heads(states)
        return logits
