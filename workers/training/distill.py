"""Distilling a draft model (DistillSpec, arXiv 2310.08461).

The student is cut from the target, some of its layers healed by low-rank updates or whole, or it is a model
of its own with the target's tokenizer. It learns the target's law over the draft vocabulary, on the target's
texts or, for a share of them, on what it wrote itself behind their prompts.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn

from workers.draft.cut import CutConfig, save_cut
from workers.training.losses import Divergence
from workers.training.samples import Agreement, Sample, Teacher

OWN_TOKENS: Final = 128
"""Tokens that a student writes behind a prompt."""


class Student(Protocol):
    """A draft model in training."""

    module: Any

    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""

    def save(self, folder: Path) -> None:
        """Write what a draft worker loads."""


class DistillLearner:
    """A student and how it learns.

    `temperature` is of both laws: the one at which the draft will serve. `rewrite`, if given, is asked for
    every text: it returns the target's states of a text that the student wrote, or None to take the text as
    it is.
    """

    depths = 1

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        divergence: Divergence,
        temperature: float,
        rewrite: Callable[[Sample], Sample] | None = None,
    ) -> None:
        self._student = student
        self._teacher = teacher
        self._divergence = divergence
        self._temperature = temperature
        self._rewrite = rewrite

    def parameters(self) -> list[nn.Parameter]:
        """See Learner."""
        return self._student.parameters()

    def loss(self, sample: Sample) -> torch.Tensor:
        """See Learner."""
        if self._rewrite is not None:
            sample = self._rewrite(sample)
        law = self._teacher.law(sample.last, self._temperature)
        guessed = (self._logits(sample) / self._temperature).log_softmax(-1)
        weights = sample.weights()
        return (self._divergence(law, guessed) * weights).sum() / weights.sum()

    def agreement(self, sample: Sample, into: Agreement) -> None:
        """See Learner."""
        logits, last = self.first_guesses(sample)
        guesses = self._teacher.vocabulary[logits.topk(8).indices]
        into.count(0, guesses, self._teacher.choices(last))
        law = self._teacher.law(last).exp()
        into.overlap += float(torch.minimum(logits.softmax(-1), law).sum())

    def right(self, sample: Sample, most: int) -> torch.Tensor:
        """See Ranked."""
        guesses = self._teacher.vocabulary[self._logits(sample).topk(most).indices]
        return guesses == self._teacher.choices(sample.last)[:, None]

    def first_guesses(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [rows, Vd] for every token of the answer, and the target's states [rows, H] there."""
        rows = slice(sample.answer_from - 1, None)
        return self._logits(sample)[rows], sample.last[rows]

    def save(self, folder: Path) -> None:
        """See Learner."""
        self._student.save(folder)

    def _logits(self, sample: Sample) -> torch.Tensor:
        """The student's logits over the draft vocabulary, float32 [T, Vd]."""
        with torch.autocast(sample.tokens.device.type, torch.bfloat16):
            logits = self._student.module(sample.tokens[None], use_cache=False).logits[0]
        return logits.float()  # type: ignore[no-any-return]


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().to(torch.bfloat16), requires_grad=False)
        self.bias = linear.bias
        self.down = nn.Parameter(
            torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features)
        )
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        update = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        return nn.functional.linear(x, self.weight, self.bias) + update


class CutStudent:
    """Some layers of the target, with low-rank updates of their matrices and trained norms.

    `module` is the cut model with its head reduced to `vocabulary`; rank 0 trains the matrices themselves.
    """

    def __init__(
        self, module: Any, layers: tuple[int, ...], vocabulary: torch.Tensor, base: str, rank: int
    ) -> None:
        self.module = module
        self._config = CutConfig(base, layers)
        self._vocabulary = vocabulary
        module.requires_grad_(False)
        if rank:
            for layer in module.model.layers:
                for parent in (layer.self_attn, layer.mlp):
                    for name, child in list(parent.named_children()):
                        if isinstance(child, nn.Linear):
                            setattr(parent, name, LowRank(child, rank))
        for name, parameter in module.named_parameters():
            trained = rank == 0 or name.endswith((".up", ".down")) or "norm" in name
            parameter.requires_grad_(
                (trained and ".layers." in name) or name == "model.norm.weight"
            )
        module.lm_head.to(torch.bfloat16)

    def parameters(self) -> list[nn.Parameter]:
        """See Student."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def save(self, folder: Path) -> None:
        """See Student."""
        tensors = {"vocabulary": self._vocabulary.to(torch.int32).cpu()}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                stem = name.removesuffix(".up").removesuffix(".down")
                key = name if stem == name else f"{stem}.weight{name.removeprefix(stem)}"
                tensors[key] = parameter.detach().to(torch.bfloat16).cpu()
        save_cut(folder, self._config, tensors)


class WholeStudent:
    """A model of its own, trained whole and saved in Hugging Face's format."""

    def __init__(self, module: Any, tokenizer: Any) -> None:
        self.module = module
        self._tokenizer = tokenizer

    def parameters(self) -> list[nn.Parameter]:
        """See Student."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def save(self, folder: Path) -> None:
        """See Student."""
        self.module.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


class OnPolicy:
    """Lets the student write a share of its texts itself; the target says what it thinks of them."""

    def __init__(
        self,
        student: Student,
        target: Any,
        vocabulary: torch.Tensor,
        share: float,
        temperature: float,
        seed: int,
    ) -> None:
        self._student = student
        self._target = target
        self._vocabulary = vocabulary
        self._share = share
        self._temperature = temperature
        self._random = torch.Generator().manual_seed(seed)

    def __call__(self, sample: Sample) -> Sample:
        """A text behind the prompt of a sample, or the sample itself."""
        if float(torch.rand((), generator=self._random)) >= self._share:
            return sample
        tokens = self._write(sample.tokens[: sample.answer_from])
        with torch.inference_mode():
            last = self._target.base_model(tokens[None], use_cache=False).last_hidden_state[0]
        # Inference tensors cannot be saved for a backward pass.
        return Sample(tokens, sample.answer_from, last.clone(), None)

    @torch.no_grad()
    def _write(self, prompt: torch.Tensor) -> torch.Tensor:
        from transformers import DynamicCache

        cache = DynamicCache(config=self._student.module.config)
        tokens, ids = prompt, prompt
        for _ in range(OWN_TOKENS):
            with torch.autocast(ids.device.type, torch.bfloat16):
                out = self._student.module(ids[None], past_key_values=cache, use_cache=True)
            law = (out.logits[0, -1].float() / self._temperature).softmax(-1)
            place = torch.multinomial(law.cpu(), 1, generator=self._random)
            ids = self._vocabulary.cpu()[place].long().to(prompt.device)
            tokens = torch.cat([tokens, ids])
        return tokens
