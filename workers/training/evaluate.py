"""How often a trained draft is right on texts of the target: by shared noise, and as rejection would have it.

At every position of an answer the draft's first guesses are compared with the token that the target takes,
at temperature 0 and, with the noise that both know, at temperature 1. Rejection sampling (Leviathan et
al., arXiv 2211.17192) would accept a drafted token with probability Σ min(p, q) there: the same positions,
no draws.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from workers.sampling import gumbel_noise, noise_key
from workers.training.samples import Sample, Teacher

RANKS = (1, 2, 3, 8)


class Guesser(Protocol):
    """A learner whose guesses are looked at."""

    def first_guesses(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [rows, Vd] for every token of the answer, and the target's states [rows, H] there."""


@dataclass(slots=True)
class Evaluation:
    """Means over `positions`; lists are for the first 1, 2, 3 and 8 guesses.

    `covered` is the share of the target's probability on tokens that the draft can guess.
    """

    positions: int = 0
    greedy: list[float] = field(default_factory=lambda: [0.0] * len(RANKS))
    shared_noise: list[float] = field(default_factory=lambda: [0.0] * len(RANKS))
    rejection: float = 0.0
    covered: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        content = asdict(self)
        for name in ("greedy", "shared_noise"):
            rates = content[name]
            content[name] = {
                f"first {rank}": round(rate, 4) for rank, rate in zip(RANKS, rates, strict=True)
            }
        return content | {"rejection": round(self.rejection, 4), "covered": round(self.covered, 4)}


@torch.inference_mode()
def evaluate(
    guesser: Guesser, teacher: Teacher, samples: Iterable[Sample], seed: int
) -> Evaluation:
    """Compare a draft with its target on every position of the answers."""
    made = Evaluation()
    everything = torch.arange(len(teacher.whole))
    for number, sample in enumerate(samples):
        logits, last = guesser.first_guesses(sample)
        target = (last @ teacher.whole.T).float()
        noise = torch.stack(
            [
                gumbel_noise(noise_key(seed, number, position), everything)
                for position in range(len(last))
            ]
        ).to(target.device)
        for rates, added in ((made.greedy, 0.0), (made.shared_noise, noise)):
            taken = (target + added).argmax(-1)
            ranked = logits + (added if isinstance(added, float) else added[:, teacher.vocabulary])
            guesses = teacher.vocabulary[ranked.topk(max(RANKS)).indices]
            for place, rank in enumerate(RANKS):
                right = (guesses[:, :rank] == taken[:, None]).any(1)
                rates[place] += float(right.sum())
        law = target.softmax(-1)[:, teacher.vocabulary]
        made.rejection += float(torch.minimum(law, logits.softmax(-1)).sum())
        made.covered += float(law.sum())
        made.positions += len(last)
    count = max(1, made.positions)
    made.greedy = [rate / count for rate in made.greedy]
    made.shared_noise = [rate / count for rate in made.shared_noise]
    made.rejection /= count
    made.covered /= count
    return made
