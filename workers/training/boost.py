"""Drafts that complement each other: boost-tuning, as in SpecInfer (arXiv 2305.09781).

Each draft learns above all where none of those before it guesses what the target takes. Named together their
trees are merged, and a level is right where the guess of any of them is.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from workers.training.samples import Sample

REPORT: Final = "boost.json"


class Ranked(Protocol):
    """A draft whose guesses can be looked at."""

    def right(self, sample: Sample, most: int) -> torch.Tensor:
        """Whether the first, second, … of `most` guesses is what the target takes: bool [T, most]."""


class Residue:
    """Texts, by their number, as one more draft learns from them.

    Of what positions weigh `known_weight` is left where one of the drafts before it is right.
    """

    def __init__(
        self, texts: Callable[[int], Sample], drafts: Sequence[Ranked], known_weight: float
    ) -> None:
        self._texts = texts
        self._drafts = tuple(drafts)
        self._known_weight = known_weight
        self._known: dict[int, torch.Tensor] = {}

    def sample(self, text: int) -> Sample:
        """A text; how often the drafts are right on it is looked up once."""
        sample = self._texts(text)
        if not self._drafts:
            return sample
        if text not in self._known:
            self._known[text] = _first_guesses(self._drafts, sample).any(0)
        return replace(sample, shares=torch.where(self._known[text], self._known_weight, 1.0))


@dataclass(frozen=True, slots=True)
class Together:
    """The first `drafts` of a set, on the positions of answers.

    Shares of them where the first guess of the last one is right, where that of any of them is, and where one
    of as many guesses of the first draft alone is: what a wider tree of one draft would have.
    """

    drafts: int
    alone: float
    any: float
    guesses_of_first: float


@torch.no_grad()
def judge(drafts: Sequence[Ranked], samples: Iterable[Sample]) -> list[Together]:
    """How often drafts are right together, by how many of them there are."""
    hits = torch.zeros(3, len(drafts))
    positions = 0
    for sample in samples:
        rows = slice(sample.answer_from - 1, None)
        alone = _first_guesses(drafts, sample)[:, rows]
        ranked = drafts[0].right(sample, len(drafts))[rows].T
        for place, right in enumerate((alone, alone.cumsum(0) > 0, ranked.cumsum(0) > 0)):
            hits[place] += right.sum(1).cpu()
        positions += alone.shape[1]
    rates = (hits / max(1, positions)).T.tolist()
    return [
        Together(number, *(round(rate, 4) for rate in each)) for number, each in enumerate(rates, 1)
    ]


def keep_report(folder: Path, options: dict[str, Any], judged: Sequence[Together]) -> None:
    """Write how the drafts of a folder were made and how often they are right."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(each) for each in judged]
    (folder / REPORT).write_text(json.dumps({"options": options, "judged": rows}, indent=1) + "\n")


def begin(folder: Path, options: dict[str, Any]) -> None:
    """Say in a folder how its drafts are made; raises ValueError if it holds others."""
    if not (folder / REPORT).exists():
        keep_report(folder, options, [])
    had = json.loads((folder / REPORT).read_text())["options"]
    if had != options:
        raise ValueError(
            f"{folder} holds drafts that are made with {had}; take the same options to continue, or another "
            "folder"
        )


@torch.no_grad()
def _first_guesses(drafts: Sequence[Ranked], sample: Sample) -> torch.Tensor:
    """Whether each draft's first guess is right, bool [drafts, T]."""
    return torch.stack([draft.right(sample, 1)[:, 0] for draft in drafts])
