"""Training an EAGLE head: on the target's states first, then on its own.

The first pass reads the target's states everywhere. Each further one feeds the head what it made itself,
as it will when it drafts (EAGLE-3's training-time test, arXiv 2503.01840 §3; HASS, arXiv 2408.15766): in
pass k a row sees keys of the first pass up to k positions before it and keys of the passes 1 … k behind
those, one each. Only the law is learned, no state is regressed.

Legend: T rows, row t stands for token t + 1 and the state of position t; it guesses token t + 2.
"""

from pathlib import Path
from typing import Final

import torch
from torch.nn import functional

from workers.draft.eagle import EagleHead, save_head
from workers.training.losses import Divergence
from workers.training.samples import Agreement, Sample, Teacher

_DEPTH_WEIGHT: Final = 0.8


class EagleLearner:
    """An EAGLE head in training; `passes` is how often it is unrolled."""

    def __init__(
        self,
        head: EagleHead,
        teacher: Teacher,
        target: str,
        passes: int,
        window: int,
        divergence: Divergence,
    ) -> None:
        self._head = head
        self._teacher = teacher
        self._target = target
        self._window = window
        self._divergence = divergence
        self.depths = passes

    def parameters(self) -> list[torch.nn.Parameter]:
        """See Learner."""
        return [parameter for parameter in self._head.parameters() if parameter.requires_grad]

    def loss(self, sample: Sample) -> torch.Tensor:
        """See Learner."""
        law = self._teacher.law(sample.last[1:])
        weights = sample.weights()[1:]
        total = torch.zeros((), device=law.device)
        scale = 0.0
        for depth, logits in enumerate(self._passes(sample)):
            guessed = logits.float().log_softmax(-1)
            rows = self._divergence(law[depth:], guessed)
            weight = _DEPTH_WEIGHT**depth
            total = total + weight * (rows * weights[depth:]).sum() / weights[depth:].sum()
            scale += weight
        return total / scale

    def agreement(self, sample: Sample, into: Agreement) -> None:
        """See Learner."""
        choices = self._teacher.choices(sample.last[1:])
        law = self._teacher.law(sample.last[1:])
        # Row t guesses token t + 2: the first of the answer is guessed by row answer_from - 2.
        first = max(0, sample.answer_from - 2)
        for depth, logits in enumerate(self._passes(sample)):
            rows = slice(max(0, first - depth), None)
            guesses = self._teacher.vocabulary[logits[rows].topk(8).indices]
            into.count(depth, guesses, choices[depth:][rows])
            if depth == 0:
                guessed = logits[rows].float().softmax(-1)
                into.overlap += float(torch.minimum(guessed, law[rows].exp()).sum())

    def first_guesses(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [rows, Vd] for every token of the answer, and the target's states [rows, H] there."""
        first = max(0, sample.answer_from - 2)
        return self._passes(sample)[0][first:].float(), sample.last[1:][first:]

    def save(self, folder: Path) -> None:
        """See Learner."""
        save_head(folder, self._head, self._target)

    def _passes(self, sample: Sample) -> list[torch.Tensor]:
        """Logits [T - 1 - k, Vd] of pass k; its first row belongs to row k of the first pass."""
        head = self._head
        features = sample.last if head.config.version == "eagle" else sample.three
        assert features is not None
        tokens = sample.tokens[None, 1:]
        positions = torch.arange(1, len(sample.tokens), device=tokens.device)[None]
        memory = UnrolledAttention(self._window)
        made = []
        with torch.autocast(tokens.device.type, torch.bfloat16):
            states = head.states(features[None, :-1])
            for depth in range(self.depths):
                states = head(tokens[:, depth:], states, positions[:, depth:], memory.attend)
                made.append(head.guess(states)[0])
                memory.depth += 1
                states = states[:, :-1]
        return made


class UnrolledAttention:
    """Keys and values of the passes so far, and attention over them as at drafting time."""

    def __init__(self, window: int) -> None:
        self.depth = 0
        self._window = window
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Queries [1, heads, R, D] to [1, R, heads, D]; row r of pass k stands at row r + k of the first."""
        groups = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(groups, 1))
        self._values.append(value.repeat_interleave(groups, 1))
        rows, depth, scale = query.shape[2], self.depth, query.shape[3] ** -0.5
        seen = self._keys[0][:, :, :rows]
        place = torch.arange(rows, device=query.device)
        # Row r of pass k stands k further on than row r of the first pass, and sees its own part up to r.
        distance = place[:, None] - place[None, :]
        visible = (distance >= 0) & (distance + depth < self._window)
        scores = (query @ seen.transpose(-1, -2)).float() * scale
        scores = scores.masked_fill(~visible, float("-inf"))
        # Of pass j the row that stands depth - j before this one.
        own = [
            (query * self._keys[j][:, :, :rows]).sum(-1, keepdim=True).float() * scale
            for j in range(1, depth + 1)
        ]
        weights = functional.softmax(torch.cat([scores, *own], -1), -1).to(query.dtype)
        out = weights[..., :rows] @ self._values[0][:, :, :rows]
        for j in range(1, depth + 1):
            out = out + weights[..., rows + j - 1 : rows + j] * self._values[j][:, :, :rows]
        return out.transpose(1, 2)
