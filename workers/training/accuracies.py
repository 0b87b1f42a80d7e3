"""How often guesses that are made at once are right, by depth and rank: what their trees are built from."""

from collections.abc import Iterable
from typing import Protocol

import torch

from workers.draft.levels import GUESSES, Accuracies
from workers.training.samples import Sample


class LevelGuesser(Protocol):
    """A learner that guesses K positions at once."""

    depths: int

    def levels(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Guesses [K, R, 8], best first, for R positions of an answer, and what the target takes [K, R]."""


@torch.no_grad()
def measure(guesser: LevelGuesser, samples: Iterable[Sample]) -> Accuracies:
    """Measured where a tree would come: at a depth, if the token of each depth above was guessed."""
    hits = torch.zeros(guesser.depths, GUESSES)
    tests = torch.zeros(guesser.depths, 1)
    for sample in samples:
        guesses, choices = guesser.levels(sample)
        right = (guesses == choices[:, :, None]).cpu()
        reached = torch.ones(right.shape[1], dtype=torch.bool)
        for depth, ranks in enumerate(right):
            hits[depth] += ranks[reached].sum(0)
            tests[depth] += reached.sum()
            reached &= ranks.any(-1)
    return Accuracies((hits / tests.clamp(min=1)).tolist())
