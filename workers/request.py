"""What a request asks of a worker: how tokens are drawn and when the answer ends."""

import math
from dataclasses import dataclass
from typing import Final, Literal

from workers import limits

Mode = Literal["sequential", "pipelined", "multibranch"]
"""What a drafter does while the target verifies: nothing, or it goes on behind the likeliest path, or behind
all likely ones (SwiftSpec, arXiv 2506.11309; Saguaro, arXiv 2603.03251)."""

Verification = Literal["coupled", "rejection", "block", "typical"]
"""How drafted tokens are tested; see workers.verification. Only "coupled" gives the text that there would be
without drafts, only "typical" changes its law."""

DRAWN: Final[frozenset[Verification]] = frozenset(["rejection", "block"])
"""What tests tokens against the laws that they were drawn from."""

DEFAULT_MODE: Final[Mode] = "multibranch"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; the same for the target and, by shared noise, for the draft.

    `logit_bias` holds (token id, value) pairs, ascending. Raises ValueError, naming the parameter and its
    limit, for a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_k", self.top_k, 0, limits.MAX_TOP_K)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        _check_range("seed", self.seed, limits.MIN_SEED, limits.MAX_SEED)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < self.repetition_penalty <= limits.MAX_REPETITION_PENALTY:
            raise ValueError(
                f"repetition_penalty must be above 0 and at most {limits.MAX_REPETITION_PENALTY}, "
                f"not {self.repetition_penalty}"
            )
        if len(self.logit_bias) > limits.MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {limits.MAX_LOGIT_BIAS}"
            )
        for token, value in self.logit_bias:
            _check_range(f"logit_bias of token {token}", value, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class StopRules:
    """When an answer ends besides the model's own end tokens.

    `max_tokens` counts tokens after the prompt; before `min_tokens` of them nothing else ends the answer.
    `include_stop` keeps the text of what ended it. Raises ValueError for a value out of range.
    """

    max_tokens: int
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), not {self.min_tokens}"
            )
        if len(self.strings) > limits.MAX_STOP_STRINGS:
            raise ValueError(
                f"stop has {len(self.strings)} strings; at most {limits.MAX_STOP_STRINGS}"
            )
        for string in self.strings:
            if not 1 <= len(string) <= limits.MAX_STOP_STRING_CHARS:
                raise ValueError(
                    f"stop has a string of {len(string)} characters; "
                    f"1 to {limits.MAX_STOP_STRING_CHARS} are allowed"
                )
        if len(self.token_ids) > limits.MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.token_ids)} ids; at most {limits.MAX_STOP_TOKEN_IDS}"
            )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} must be from {low} to {high}, not {value}")
