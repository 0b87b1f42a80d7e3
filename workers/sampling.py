"""How a token is drawn: the request's processors, and noise that is a pure function.

Legend: V vocabulary, S survivors of the filters.

The target's token after a prefix is `argmax(processed logits + noise(position))`, an exact sample of
the processed law (the Gumbel-max trick) that nothing drafted can change. The noise of a position is
computed from the request's seed, so draft and target know the same noise without talking (Daliri et
al., arXiv 2408.07978).
"""

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch

from workers.engine.native import sampling as native_sampling
from workers.grammar import Grammar
from workers.request import SamplingParams
from workers.tree import Law

_MASK64: Final = 2**64 - 1
_MASK32: Final = 0xFFFFFFFF
PURPOSE_TOKEN: Final = 0
PURPOSE_DRAFT: Final = 1
PURPOSE_ACCEPT: Final = 2
PURPOSE_RESIDUAL: Final = 3

LAW_TOKENS: Final = 64
"""A drafter that draws does so from its likeliest tokens only: their law is sent with every node."""


def noise_key(seed: int, choice: int, position: int, purpose: int = PURPOSE_TOKEN) -> int:
    """The 64-bit key of one draw; every input bit affects every bit of it."""
    key = _avalanche(seed & _MASK64)
    for value in (choice, position, purpose):
        key = _avalanche(key ^ _avalanche(value & _MASK64))
    return key


def _avalanche(x: int) -> int:
    """The output function of SplitMix64 (Steele et al., 2014), on a word moved off zero."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def hash32(key: int, ids: torch.Tensor) -> torch.Tensor:
    """32-bit hashes of token ids under a key: int64 [S] to int64 [S] in [0, 2^32).

    Integer arithmetic only, so equal on every device.
    """
    x = (ids ^ (key & _MASK32)) & _MASK32
    x = _mix32(x)
    return _mix32(x ^ (key >> 32))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Two rounds of multiply and shift that mix all 32 bits (the lowbias32 constants)."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK32
    return x ^ (x >> 15)


def gumbel_noise(key: int, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of token ids: int64 [S] to float32 [S], always finite.

    Written as -log(-log1p(-v)): large noise comes from small v, where float32 is precise.
    """
    v = (hash32(key, ids).to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v.clamp(max=1 - 2.0**-24)))


def survivors(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """What the filters leave of one row: float32 [V] to (ids int64 [S], processed logits [S]).

    Order: temperature, top-k, top-p, min-p. Ids ascend. Tokens as likely as the last one kept are kept
    too, so the result does not depend on how a sort breaks ties.
    """
    values = logits / params.temperature
    threshold = -torch.inf
    if 0 < params.top_k < len(values):
        threshold = float(values.topk(params.top_k).values[-1])
    if params.top_p < 1.0:
        threshold = max(threshold, _top_p_threshold(values, params.top_p, threshold))
    if params.min_p > 0.0:
        threshold = max(threshold, float(values.max()) + math.log(params.min_p))
    if threshold == -torch.inf:
        return torch.arange(len(values), device=values.device), values
    ids = (values >= threshold).nonzero()[:, 0]
    return ids, values[ids]


def _top_p_threshold(values: torch.Tensor, top_p: float, threshold: float) -> float:
    """The logit of the last token that is needed to reach the mass `top_p`."""
    kept = values[values >= threshold]
    total = kept.logsumexp(0)
    size = 256
    while True:
        # Most laws reach their mass within few tokens; the whole vocabulary is sorted only if not.
        size = min(size, len(kept))
        best = kept.topk(size).values
        mass = (best - total).exp().cumsum(0)
        if size == len(kept) or float(mass[-1]) >= top_p:
            last = int((mass < top_p).sum())
            return float(best[min(last, size - 1)])
        size *= 16


def draw(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """The target's token at a position, from logits float32 [V].

    Raises ValueError if the row holds no finite maximum: the model produced no usable numbers.
    """
    token: int | None
    if params.greedy:
        token = int(logits.argmax())
        if not math.isfinite(float(logits[token])):
            token = None
    else:
        key = noise_key(params.seed, params.choice, position)
        native = native_sampling.serves(logits)
        token = (native_sampling.draw_token if native else _draw_token)(logits, params, key)
    if token is None:
        raise ValueError(f"position {position}: the target's logits are not finite numbers")
    return token


def _draw_token(logits: torch.Tensor, params: SamplingParams, key: int) -> int | None:
    """The rule in torch operations, for every device: the reference of the native one."""
    if bool(logits.isnan().any()) or not math.isfinite(float(logits.max())):
        return None
    ids, values = survivors(logits, params)
    return int(ids[(values + gumbel_noise(key, ids)).argmax()])


def rank_children(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    params: SamplingParams,
    position: int,
    softness: float,
    count: int,
) -> tuple[list[int], list[float]]:
    """A draft's guesses at a position, from its logits float32 [V], best first.

    They are ranked by the target's own rule and noise. `ids` int32 [V] are the target's ids of the draft's
    tokens, None where they are equal. Returns places in the row, and the probability of each to be the
    target's token: a softmax over logits and noise at temperature `softness`, with which it is calibrated.
    """
    key = noise_key(params.seed, params.choice, position)
    if native_sampling.serves(logits):
        return native_sampling.top_children(logits, ids, params, key, softness, count)
    return _rank_children(logits, ids, params, key, softness, count)


def _rank_children(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    params: SamplingParams,
    key: int,
    softness: float,
    count: int,
) -> tuple[list[int], list[float]]:
    """The rule in torch operations, for every device: the reference of the native one."""
    places = torch.arange(len(logits), device=logits.device)
    values = logits
    if not params.greedy:
        places, values = survivors(logits, params)
        names = places if ids is None else ids[places].long()
        values = values + gumbel_noise(key, names)
    best = values.topk(min(count, len(values)))
    probabilities = (values / softness).softmax(0)[best.indices]
    return places[best.indices].tolist(), probabilities.tolist()


def draw_children(
    logits: torch.Tensor,
    ids: torch.Tensor | None,
    params: SamplingParams,
    drafter: int,
    draw: int,
    count: int,
) -> tuple[list[int], Law]:
    """Guesses drawn from a draft's own law, without replacement, from its logits float32 [V].

    `ids` as in `rank_children`. Returns the target's ids of what was drawn, in order, and the law of the
    first: that of the likeliest tokens, as the request's filters leave them. `draw` numbers the draws that a
    `drafter` makes for an answer: their noise is nobody else's.
    """
    places, values = survivors(logits, params)
    best = values.topk(min(LAW_TOKENS, len(values)))
    places = places[best.indices]
    names = places if ids is None else ids[places].long()
    logprobs = best.values.log_softmax(0)
    probabilities = logprobs.exp()
    # What is too unlikely to be told cannot be drawn.
    known = probabilities > 0.0
    key = noise_key(params.seed, params.choice, draw, PURPOSE_DRAFT + (drafter << 8))
    order = (logprobs + gumbel_noise(key, names))[known].topk(min(count, int(known.sum()))).indices
    names, probabilities = names[known], probabilities[known]
    return names[order].tolist(), Law(tuple(names.tolist()), tuple(probabilities.tolist()))


class Luck:
    """What verification by the laws of drafters leaves to chance (see workers.verification.Chance).

    A pure function of the request's seed and of where the round begins: a position that is tested again in a
    later round is tested anew.
    """

    def __init__(self, params: SamplingParams, base_len: int) -> None:
        self._params = params
        self._base_len = base_len

    def accept(self, node: int, probability: float) -> bool:
        """See Chance."""
        key = noise_key(self._params.seed, self._params.choice, self._base_len, PURPOSE_ACCEPT)
        return (int(hash32(key, torch.tensor([node]))) + 0.5) * 2.0**-32 < probability

    def draw(self, depth: int, law: torch.Tensor) -> int:
        """See Chance."""
        position = self._base_len + depth
        key = noise_key(self._params.seed, self._params.choice, position, PURPOSE_RESIDUAL)
        mass = law.cumsum(0)
        drawn = int(torch.searchsorted(mass, (key >> 11) * 2.0**-53 * float(mass[-1]), right=True))
        # What is next to the whole may be rounded to it.
        return drawn if drawn < len(law) else int(law.nonzero()[-1])


def processed_law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The law that `draw` draws from, float64 [V], from one row float32 [V].

    Raises ValueError if the row holds no finite maximum.
    """
    if bool(logits.isnan().any()) or not math.isfinite(float(logits.max())):
        raise ValueError("the target's logits are not finite numbers")
    ids, values = survivors(logits, params)
    if len(ids) == len(logits):
        return values.softmax(0).cpu().double()
    law = torch.zeros(len(logits), dtype=torch.float64)
    law[ids.cpu()] = values.softmax(0).cpu().double()
    return law


class Processors:
    """What a request does to the target's logits before temperature, with the state that it needs.

    Order: repetition, frequency and presence penalties, bias, then the ban on stop tokens before
    `min_tokens`, and last what the `grammar` forbids, if there is one. Only rows that the verification visits
    pass here, one after the other, so the state is that of plain decoding.
    """

    grammar: Grammar | None = None

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        answer: Sequence[int],
        stop_token_ids: frozenset[int],
        min_tokens: int,
    ) -> None:
        self._params = params
        self._min_tokens = min_tokens
        self._stop_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([value for _, value in params.logit_bias])
        self._penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._prompt = list(prompt)
        self._counts = torch.empty(0)  # [V] float32: occurrences in the answer
        self._seen = torch.empty(0)  # [V] bool: occurs in prompt or answer
        self._answer = list(answer)
        self._length = len(answer)

    def observe(self, token: int) -> None:
        """A token became part of the answer."""
        self._length += 1
        if self._penalised:
            self._answer.append(token)
        if self.grammar is not None:
            self.grammar.observe(token)

    def after(self, tokens: Iterable[int]) -> "Processors":
        """What they would be if these tokens became part of the answer."""
        other = copy.copy(self)
        other._answer = list(self._answer)
        other._counts, other._seen = self._counts.clone(), self._seen.clone()
        if self.grammar is not None:
            other.grammar = self.grammar.copy()
        for token in tokens:
            other.observe(token)
        return other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """One row float32 [V] as the request wants it; the same tensor if it wants nothing."""
        banned = self._length < self._min_tokens and len(self._stop_ids) > 0
        if not (self._penalised or banned or len(self._bias) or self.grammar is not None):
            return logits
        logits = logits.clone()
        if self._penalised:
            self._penalise(logits)
        if len(self._bias):
            logits.index_add_(0, self._bias_ids.to(logits.device), self._bias.to(logits.device))
        if banned:
            logits.index_fill_(0, self._stop_ids.to(logits.device), -torch.inf)
        if self.grammar is not None:
            forbidden = torch.from_numpy(np.frombuffer(self.grammar.allowed(), np.uint8) == 0)
            logits.masked_fill_(forbidden.to(logits.device), -torch.inf)
        return logits

    def _penalise(self, logits: torch.Tensor) -> None:
        if len(self._counts) == 0:
            self._counts = torch.zeros_like(logits)
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen[self._prompt] = True
        for token in self._answer:
            self._counts[token] += 1
            self._seen[token] = True
        self._answer.clear()
        penalty = self._params.repetition_penalty
        if penalty != 1.0:
            weakened = torch.where(logits > 0, logits / penalty, logits * penalty)
            torch.where(self._seen, weakened, logits, out=logits)
        logits -= self._params.frequency_penalty * self._counts
        logits -= self._params.presence_penalty * (self._counts > 0)


def top_logprobs(
    logits: torch.Tensor, token: int, count: int
) -> tuple[float, tuple[tuple[int, float], ...], int]:
    """Log-probability of a token, the `count` likeliest ones, and its rank, from raw logits, float32 [V]."""
    logprobs = logits.log_softmax(0)
    best = logprobs.topk(count)
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return float(logprobs[token]), top, 1 + int((logits > logits[token]).sum())
