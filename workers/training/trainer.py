"""The training loop: many small steps, and never more than a few minutes of work to lose."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from tqdm import tqdm

from workers.training.samples import Agreement, Sample

logger = logging.getLogger(__name__)

CHECKPOINT: Final = "checkpoint.pt"
CURVE: Final = "curve.json"
_FINAL_RATE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how fast to train; `tokens` are answer tokens in all."""

    tokens: int
    learning_rate: float
    texts_per_step: int
    warmup_steps: int
    seed: int
    evaluate_every: int
    checkpoint_minutes: float


class Learner(Protocol):
    """A draft in training."""

    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""

    def loss(self, sample: Sample) -> torch.Tensor:
        """The loss of a text, averaged over its positions."""

    def agreement(self, sample: Sample, into: Agreement) -> None:
        """Count how often the guesses of a held-out text are right."""

    @property
    def depths(self) -> int:
        """Depths that `agreement` counts."""

    def save(self, folder: Path) -> None:
        """Write what a draft worker loads."""


class Trainer:
    """Trains a learner on samples, in a folder that a broken-off run continues from."""

    def __init__(
        self,
        learner: Learner,
        plan: Plan,
        samples: Callable[[int], Iterator[Sample]],
        held_out: list[Sample],
        folder: Path,
    ) -> None:
        """`samples(skip)` yields for ever, from the one behind the first `skip`."""
        self._learner = learner
        self._plan = plan
        self._samples = samples
        self._held_out = held_out
        self._folder = folder
        self._parameters = learner.parameters()
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._seen = self._texts = self._step = 0
        self._seconds = 0.0
        self.curve: list[dict[str, Any]] = []

    def run(self, progress: bool = True) -> None:
        """Train to the end of the plan; raises ValueError if the folder holds another plan's run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        started = saved = time.monotonic()
        before = self._seconds
        texts = self._samples(self._texts)
        if not self.curve:
            self._evaluate()
        next_evaluation = (self._seen // self._plan.evaluate_every + 1) * self._plan.evaluate_every
        with tqdm(
            total=self._plan.tokens, initial=self._seen, unit="tok", disable=not progress
        ) as bar:
            while self._seen < self._plan.tokens:
                tokens, loss = self._train_step(texts)
                self._seconds = before + time.monotonic() - started
                bar.update(tokens)
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if self._seen >= min(next_evaluation, self._plan.tokens):
                    next_evaluation += self._plan.evaluate_every
                    rates = self._evaluate()
                    bar.write(f"{self._seen} tokens: {rates}")
                if time.monotonic() - saved > 60 * self._plan.checkpoint_minutes:
                    self._save_checkpoint()
                    saved = time.monotonic()
        self._save_checkpoint()
        self._learner.save(self._folder)

    def _train_step(self, texts: Iterator[Sample]) -> tuple[int, float]:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        tokens, total = 0, 0.0
        for _ in range(self._plan.texts_per_step):
            sample = next(texts)
            loss = self._learner.loss(sample) / self._plan.texts_per_step
            loss.backward()
            total += float(loss.detach())
            tokens += len(sample.tokens) - sample.answer_from
            self._texts += 1
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._seen += tokens
        self._step += 1
        return tokens, total

    def _learning_rate(self) -> float:
        warm = min(1.0, (self._step + 1) / max(1, self._plan.warmup_steps))
        left = 1.0 - min(1.0, self._seen / self._plan.tokens)
        return self._plan.learning_rate * warm * max(_FINAL_RATE, left)

    def _evaluate(self) -> list[list[float]]:
        counted = Agreement.over(self._learner.depths)
        with torch.no_grad():
            for sample in self._held_out:
                self._learner.agreement(sample, counted)
        rates = counted.rates()
        self.curve.append(
            {
                "tokens": self._seen,
                "seconds": round(self._seconds),
                "agreement": rates,
                "overlap": round(counted.overlap / max(1, counted.tests[0]), 4),
            }
        )
        _write(self._folder / CURVE, json.dumps(self.curve, indent=1))
        plot(self.curve, self._folder / "curve.png")
        return rates

    def _save_checkpoint(self) -> None:
        content = {
            "plan": asdict(self._plan),
            "parameters": [parameter.detach() for parameter in self._parameters],
            "optimizer": self._optimizer.state_dict(),
            "counts": (self._seen, self._texts, self._step, self._seconds),
            "curve": self.curve,
        }
        part = self._folder / f"{CHECKPOINT}.part"
        torch.save(content, part)
        os.replace(part, self._folder / CHECKPOINT)

    def _resume(self) -> None:
        file = self._folder / CHECKPOINT
        if not file.exists():
            return
        content = torch.load(file, weights_only=True)
        if content["plan"] != asdict(self._plan):
            raise ValueError(
                f"{self._folder} holds a run with another plan: {content['plan']}; take the same "
                "options to continue it, or another folder"
            )
        with torch.no_grad():
            for parameter, value in zip(self._parameters, content["parameters"], strict=True):
                parameter.copy_(value)
        self._optimizer.load_state_dict(content["optimizer"])
        self._seen, self._texts, self._step, self._seconds = content["counts"]
        self.curve = content["curve"]
        logger.info("going on at %d of %d tokens", self._seen, self._plan.tokens)


def plot(curve: list[dict[str, Any]], file: Path) -> None:
    """Draw a held-out curve over the logarithm of the tokens seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [point for point in curve if point["tokens"]]
    if not points:
        return
    figure, axes = pyplot.subplots(figsize=(8.5, 4.5), layout="constrained")
    tokens = [point["tokens"] for point in points]
    for place, rank in enumerate(Agreement.ranks):
        values = [point["agreement"][0][place] for point in points]
        axes.plot(tokens, values, marker="o", label=f"first {rank}" if rank > 1 else "first guess")
    for depth in range(1, len(points[0]["agreement"])):
        values = [point["agreement"][depth][0] for point in points]
        axes.plot(
            tokens, values, marker=".", linestyle="--", label=f"first guess, depth {depth + 1}"
        )
    if max(tokens) > 4 * min(tokens):
        axes.set_xscale("log")
    axes.set_xlabel("answer tokens seen")
    axes.set_ylabel("held-out agreement with the target")
    axes.set_ylim(0, min(1.0, math.ceil(10 * axes.get_ylim()[1]) / 10))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _write(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text + "\n")
    os.replace(part, file)
