"""Training a mask drafter: masks behind random cuts of a text learn the target's law of what follows.

All cuts of a text share one pass: every token is read as in any causal model, and the masks of a cut see what
stands before it and each other (SpecDec, arXiv 2203.16487; the causal rows learn as in DistillSpec, arXiv
2310.08461).

Legend: T tokens, C cuts, M masks of each, K = M + 1 guesses. A cut at t is behind token t: its row guesses
token t + 1, the masks behind it tokens t + 2 … t + 1 + M.
"""

from pathlib import Path

import torch

from workers.draft.masks import save_masks
from workers.training.distill import CutStudent
from workers.training.losses import Divergence
from workers.training.medusa import DEPTH_WEIGHT
from workers.training.samples import Agreement, Sample, Teacher


class MaskLearner:
    """A cut student and its masks; `cuts` of each text are learned from."""

    def __init__(
        self,
        student: CutStudent,
        teacher: Teacher,
        divergence: Divergence,
        masks: int,
        cuts: int,
        seed: int,
    ) -> None:
        self._student = student
        self._teacher = teacher
        self._divergence = divergence
        self._cuts = cuts
        self._random = torch.Generator().manual_seed(seed)
        # They begin as a token like any other.
        mean = student.module.get_input_embeddings().weight.detach().float().mean(0)
        self._masks = torch.nn.Parameter(mean.repeat(masks, 1))
        self.depths = masks + 1

    def parameters(self) -> list[torch.nn.Parameter]:
        """See Learner."""
        return [*self._student.parameters(), self._masks]

    def loss(self, sample: Sample) -> torch.Tensor:
        """See Learner."""
        law = self._teacher.law(sample.last)
        every = self._cuttable(sample)
        order = torch.randperm(len(every), generator=self._random)[: self._cuts]
        chosen = every[order.to(every.device)]
        causal, masked = self._logits(sample, chosen)
        weights = sample.weights()
        rows = self._divergence(law, causal.log_softmax(-1))
        total = (rows * weights).sum() / weights.sum()
        scale = 1.0
        for depth in range(1, self.depths if len(chosen) else 1):
            guessed = masked[:, depth - 1].log_softmax(-1)
            weight = DEPTH_WEIGHT**depth
            total = total + weight * self._divergence(law[chosen + depth], guessed).mean()
            scale += weight
        return total / scale

    def agreement(self, sample: Sample, into: Agreement) -> None:
        """See Learner."""
        cuts = self._cuttable(sample)
        logits = self._behind(sample, cuts)
        guesses, choices = self._judged(sample, cuts, logits)
        for depth in range(self.depths):
            into.count(depth, guesses[depth], choices[depth])
        law = self._teacher.law(sample.last[cuts]).exp()
        into.overlap += float(torch.minimum(logits[0].softmax(-1), law).sum())

    def levels(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        """See LevelGuesser."""
        cuts = self._cuttable(sample)
        return self._judged(sample, cuts, self._behind(sample, cuts))

    def save(self, folder: Path) -> None:
        """See Learner."""
        self._student.save(folder)
        save_masks(folder, self._masks)

    def _cuttable(self, sample: Sample) -> torch.Tensor:
        """Where a text can be cut: within the answer, with as many tokens behind as are guessed."""
        device = sample.tokens.device
        first, end = sample.answer_from - 1, len(sample.tokens) - self.depths + 1
        return torch.arange(first, max(first, end), device=device)

    def _behind(self, sample: Sample, cuts: torch.Tensor) -> torch.Tensor:
        """Logits [K, C, Vd] of all that is guessed behind cuts."""
        causal, masked = self._logits(sample, cuts)
        return torch.cat([causal[cuts][:, None], masked], 1).transpose(0, 1)

    def _judged(
        self, sample: Sample, cuts: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best guesses [K, C, 8] behind cuts, and what the target takes there [K, C]."""
        guesses = self._teacher.vocabulary[logits.topk(8).indices]
        choices = self._teacher.choices(sample.last)
        return guesses, torch.stack([choices[cuts + depth] for depth in range(self.depths)])

    def _logits(self, sample: Sample, cuts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of the text's rows [T, Vd] and of the masks' [C, M, Vd], float32."""
        module, size, masks = self._student.module, len(sample.tokens), len(self._masks)
        device = sample.tokens.device
        embedded = module.get_input_embeddings()(sample.tokens).float()
        rows = torch.cat([embedded, self._masks.repeat(len(cuts), 1)])
        place = torch.arange(size, device=device)
        behind = cuts[:, None] + 1 + torch.arange(masks, device=device)
        positions = torch.cat([place, behind.flatten()])
        # The last token that a row sees, and the cut that it stands behind, -1 for the text's own rows.
        until = torch.cat([place, cuts.repeat_interleave(masks)])
        cut = torch.cat([torch.full_like(place, -1), cuts.repeat_interleave(masks)])
        index = torch.arange(len(rows), device=device)
        before = (index < size) & (index <= until[:, None])
        visible = before | ((cut >= 0) & (cut == cut[:, None]))
        with torch.autocast(device.type, torch.bfloat16):
            logits = module(
                inputs_embeds=rows[None],
                attention_mask=visible[None, None],
                position_ids=positions[None],
                use_cache=False,
            ).logits[0]
        logits = logits.float()
        return logits[:size], logits[size:].view(len(cuts), masks, -1)
