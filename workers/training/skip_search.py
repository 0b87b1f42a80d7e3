"""Which layers a target can draft without (Draft & Verify, arXiv 2309.08168, searched greedily).

From the whole model on, the layer without which most tokens stay the same is left out, again and again. Of
the sets on that way the one is taken with which a chain of drafts is expected to be fastest: with a share `a`
of tokens that match and a pass that costs `c` of the target's, K drafts give (1 - a^(K+1)) / (1 - a) tokens
in the time of 1 + K c steps (Leviathan et al., arXiv 2211.17192).
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from tqdm import tqdm

from workers.draft import skips
from workers.engine.kv_cache import KVPool
from workers.engine.model import Model
from workers.engine.rows import RowBatch, SequenceRows
from workers.target.measure import time_step
from workers.training.corpus import Text

_MOST_DRAFTED: Final = 12
_TIMES: Final = 9
_CONTEXT: Final = 64


def search(model: Model, texts: Sequence[Text], most: int) -> tuple[tuple[int, ...], list[Any]]:
    """The best set of at most `most` layers to skip, and the way to it: one entry for each size."""
    layers = model.num_layers
    cost = _Cost(model)
    target = [_choices(model, text) for text in texts]
    tokens = sum(len(choices) for choices in target)
    found: list[dict[str, Any]] = []
    skip: tuple[int, ...] = ()
    with tqdm(total=sum(layers - size for size in range(most)), unit="set") as bar:
        for _ in range(most):
            matched: dict[int, int] = {}
            for layer in skips.kept(skip, layers):
                part = model.part(skips.kept((*skip, layer), layers))
                matched[layer] = sum(
                    int((_choices(part, text) == choices).sum())
                    for text, choices in zip(texts, target, strict=True)
                )
                bar.update()
            best = max(matched, key=lambda layer: (matched[layer], layer))
            skip = tuple(sorted((*skip, best)))
            rate = matched[best] / tokens
            gain = expected_gain(rate, cost(layers - len(skip)))
            found.append({"skip": skip, "matched": round(rate, 4), "gain": round(gain, 4)})
            bar.set_postfix(matched=f"{rate:.3f}", gain=f"{gain:.3f}")
    chosen = max(found, key=lambda entry: float(entry["gain"]))
    return tuple(chosen["skip"]), found


def expected_gain(rate: float, cost: float) -> float:
    """Tokens in the time of a plain step, with the best number of drafts that are right so often."""

    def gain(drafts: int) -> float:
        return sum(rate**depth for depth in range(drafts + 1)) / (1 + drafts * cost)

    return max(gain(drafts) for drafts in range(1, _MOST_DRAFTED + 1))


class _Cost:
    """What a pass of some of a model's layers takes, as a share of the whole's; measured at two sizes."""

    def __init__(self, model: Model) -> None:
        self._layers = model.num_layers
        half = model.part(range(0, self._layers, 2))
        self._whole_s, half_s = self._seconds(model), self._seconds(half)
        self._layer_s = max(0.0, self._whole_s - half_s) / (self._layers - half.num_layers)

    def __call__(self, layers: int) -> float:
        return 1.0 - (self._layers - layers) * self._layer_s / self._whole_s

    @staticmethod
    def _seconds(model: Model) -> float:
        pool = model.pool(2 * _CONTEXT)
        return min(time_step(model, pool, 1, _CONTEXT) for _ in range(_TIMES))


def _choices(model: Model, text: Text) -> torch.Tensor:
    """The likeliest token at each place of a text's answer, by the tokens before it."""
    kv = model.pool(len(text.tokens) + KVPool.GRAIN).sequence()
    kv.reserve(len(text.tokens))
    rows = range(text.answer_from - 1, len(text.tokens) - 1)
    logits = model.forward(RowBatch([SequenceRows(kv, text.tokens.tolist(), rows)]))
    kv.free()
    return logits.argmax(1)
