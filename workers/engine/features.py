"""Hidden states of the target that drafters read.

EAGLE-1 and -2 read the state behind the last norm, EAGLE-3 the states that enter three layers (arXiv
2401.15077, 2406.16858, 2503.01840).
"""

from typing import Any

import torch

from workers.checkpoint import FeatureKind
from workers.engine.attention import PartStep


def feature_width(config: Any, kind: FeatureKind) -> int:
    """Values of one position's features, by the text config of the target."""
    return int(config.hidden_size) * (1 if kind == "last" else 3)


class FeatureTap:
    """Takes the features of a model's rows as they pass; `width` values a row."""

    def __init__(self, module: Any, kind: FeatureKind) -> None:
        config = module.config.get_text_config()
        self.width = feature_width(config, kind)
        self._parts: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        if kind == "last":
            self._hooks.append(module.base_model.register_forward_hook(self._take_output))
        else:
            for layer in entered_layers(config.num_hidden_layers):
                entered = module.base_model.layers[layer]
                self._hooks.append(
                    entered.register_forward_pre_hook(self._take_input, with_kwargs=True)
                )

    def take(self) -> torch.Tensor:
        """The features of the rows that just ran, [rows, width]."""
        parts, self._parts = self._parts, []
        return torch.cat(parts, dim=-1)

    def remove(self) -> None:
        """Take no more."""
        for hook in self._hooks:
            hook.remove()

    def _take_output(self, module: Any, arguments: Any, output: Any) -> None:
        self._parts.append(output.last_hidden_state[0])

    def _take_input(self, module: Any, arguments: Any, keywords: Any) -> None:
        # A part of the model shares its layers, but its states are not the model's.
        if isinstance(keywords.get("attention_step"), PartStep):
            return
        hidden = arguments[0] if arguments else keywords["hidden_states"]
        self._parts.append(hidden[0])


def entered_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs EAGLE-3 reads, ascending."""
    first, second, third = sorted((2, num_layers // 2, num_layers - 3))
    return first, second, third
