"""Training an early exit: an adapter of one layer and a norm behind the target's first layers.

It learns the target's law between frozen layers and a frozen head, as Kangaroo's does (arXiv 2404.18911); it
begins as the target's last layer and norm. Our adapter is a whole layer, with its MLP, so that it runs where
the target's layers do.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from workers.draft import exits
from workers.draft.cut import cut_module, reduce_head


class ExitStudent:
    """A draft model in training: the first `layers` of a model of transformers', in place, and the adapter.

    While it learns it guesses in `vocabulary` only, which saves most of the head's time.
    """

    def __init__(self, module: Any, layers: int, vocabulary: torch.Tensor, target: str) -> None:
        """Raises ValueError unless the model has more layers than are kept."""
        count = module.config.num_hidden_layers
        if not 0 < layers < count:
            raise ValueError(
                f"--exit {layers}: the target has {count} layers: give 1 to {count - 1}"
            )
        self._layers = layers
        self._target = target
        self.module = cut_module(module, (*range(layers), count - 1))
        reduce_head(self.module, vocabulary)
        self.module.requires_grad_(False)
        self._layer, self._norm = self.module.model.layers[-1], self.module.model.norm
        self._layer.requires_grad_(True)
        self._norm.requires_grad_(True)
        self.module.lm_head.to(torch.bfloat16)

    def parameters(self) -> list[nn.Parameter]:
        """See Student."""
        return [*self._layer.parameters(), *self._norm.parameters()]

    def save(self, folder: Path) -> None:
        """See Student."""
        exits.save(folder, self._layers, self._target, self._layer, self._norm)
