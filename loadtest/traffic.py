"""What a load test asks, and when: mixes of prompts, Poisson arrivals, shapes over time."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from loadtest.prompts_file import Prompt

FLAT: Final = "none"
"""The shape of a load that is the same from beginning to end."""
_CHUNKS: Final = 4
_SPIKE_BASE: Final = 0.2
_SOAK_RISE: Final = 0.05


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; after `give_up_after` chunks with tokens the client leaves, None: never."""

    prompt: Prompt
    seed: int
    give_up_after: int | None


@dataclass(frozen=True, slots=True)
class Drafting:
    """Whether a request is drafted, and by whom; no names leave it to the server."""

    enabled: bool
    drafters: tuple[str, ...]


def drafting(text: str) -> Drafting:
    """What `--speculation` says: on, off, or names of drafters joined by "+"."""
    if text in ("on", "off"):
        return Drafting(text == "on", ())
    return Drafting(True, tuple(text.split("+")))


def parse_mix(text: str) -> dict[str, float]:
    """Weights by category: `writing:3,math:1`. Raises ValueError for other forms."""
    mix: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().rpartition(":")
        try:
            mix[name] = float(weight)
        except ValueError:
            mix[name] = 0.0
        if not name or not 0 < mix[name] < float("inf"):
            raise ValueError(
                f"--mix has {part!r}: write category:weight with a weight above 0, joined by commas"
            )
    return mix


def grouped(
    prompts: Sequence[Prompt], mix: Mapping[str, float]
) -> list[tuple[float, list[Prompt]]]:
    """The prompts that a mix draws from, by its weights; names are categories or kinds of task.

    An empty mix draws evenly from all prompts. Raises ValueError for a name that no prompt has.
    """
    if not mix:
        return [(1.0, list(prompts))]
    groups = []
    for name, weight in mix.items():
        group = [prompt for prompt in prompts if name in (prompt.category, prompt.kind)]
        if not group:
            there = sorted({n for prompt in prompts for n in (prompt.category, prompt.kind)})
            raise ValueError(f"--mix: no prompt is of {name!r}; there are {', '.join(there)}")
        groups.append((weight, group))
    return groups


def asks(
    groups: Sequence[tuple[float, Sequence[Prompt]]], cancel_share: float, rng: random.Random
) -> Iterator[Ask]:
    """Requests without end; of `cancel_share` of them the client leaves after a few chunks."""
    weights = [weight for weight, _ in groups]
    while True:
        _, group = rng.choices(groups, weights)[0]
        prompt, seed = rng.choice(group), rng.randrange(2**31)
        chunks = rng.randint(1, _CHUNKS)
        yield Ask(prompt, seed, chunks if rng.random() < cancel_share else None)


def arrivals(rate: float, level: Callable[[float], float], rng: random.Random) -> Iterator[float]:
    """Seconds from the beginning at which requests come: a Poisson process without end.

    `rate` is per second, `level` the share of it (at most 1) at a time in seconds. With the same seed another
    rate stretches the same arrivals.
    """
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        if rng.random() < level(at):
            yield at


def _ramp(share: float) -> float:
    return share


def _spike(share: float) -> float:
    return 1.0 if 0.4 <= share < 0.6 else _SPIKE_BASE


def _soak(share: float) -> float:
    return min(1.0, share / _SOAK_RISE)


SHAPES: Final[dict[str, Callable[[float], float]]] = {
    FLAT: lambda _: 1.0,
    "ramp": _ramp,
    "spike": _spike,
    "soak": _soak,
}
"""The load as a share of its highest, by the share of the run that has passed (0 to 1)."""


def level(shape: str, run_s: float, at: float) -> float:
    """The share of the highest load `at` seconds into a run of `run_s`; as at its end behind it."""
    return SHAPES[shape](min(1.0, at / run_s))
