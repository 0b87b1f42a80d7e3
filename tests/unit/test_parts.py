"""Parts of a loaded model: what some of its layers compute, without a copy of its weights."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny
from tests import tiny_architectures as zoo
from workers.draft.cut import cut_module
from workers.engine.loading import load_model
from workers.engine.model import Model
from workers.engine.parts import Ending
from workers.engine.rows import RowBatch, SequenceRows

KINDS = ["llama", "llama tied", "qwen2 window", "qwen3", "gemma2", "gemma3", "olmo2", "phi3"]


def logits_of(model: Model, tokens: list[int]) -> torch.Tensor:
    """All rows of a prompt, in two chunks."""
    kv = model.pool(256).sequence()
    kv.reserve(len(tokens))
    made = []
    for chunk in (tokens[:5], tokens[5:]):
        made.append(model.forward(RowBatch([SequenceRows(kv, chunk, range(len(chunk)))])))
        kv.keep(range(len(chunk)))
    return torch.cat(made)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_what_a_model_of_these_layers_computes(kind: str, dtype: str) -> None:
    folder, layers = zoo.folder(kind), (0, 2, 3)
    whole = load_model(folder, dtype)
    before = logits_of(whole, zoo.PROMPT)
    part = whole.part(layers)
    cut = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        module = cut_module(cut, layers)
        expected = module(torch.tensor([zoo.PROMPT]), use_cache=False).logits[0].float()
    made = logits_of(part, zoo.PROMPT)
    distance = float((made - expected).norm() / expected.norm())
    assert distance < (1e-3 if dtype == "float32" else 5e-2)
    assert part.kv_shape.layers == 3
    # The whole is what it was.
    assert torch.equal(logits_of(whole, zoo.PROMPT), before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("features", ["last", "three"])
def test_features_of_the_whole_do_not_notice_its_parts(features: Any, dtype: str) -> None:
    def kept(with_part: bool) -> torch.Tensor:
        whole = load_model(tiny.llama(), dtype)
        whole.keep_features(features)
        kv = whole.pool(64).sequence()
        kv.reserve(16)
        if with_part:
            logits_of(whole.part((0, 1)), zoo.PROMPT)
        whole.forward(RowBatch([SequenceRows(kv, zoo.PROMPT, [])]))
        return kv.features[: len(zoo.PROMPT)]

    assert torch.equal(kept(True), kept(False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_ending_stands_for_the_layers_behind_it(dtype: str) -> None:
    """With the target's own last layer and norm as the ending, a part is a part again."""
    whole = load_model(tiny.llama(), dtype)
    module = AutoModelForCausalLM.from_pretrained(tiny.llama(), dtype=getattr(torch, dtype))
    module.set_attn_implementation("slipstream")
    layer = copy.deepcopy(module.model.layers[2])
    layer.self_attn.layer_idx = 3
    ended = whole.part((0, 1), Ending(layer, module.model.norm))
    assert ended.kv_shape.layers == 3
    made, expected = logits_of(ended, zoo.PROMPT), logits_of(whole, zoo.PROMPT)
    torch.testing.assert_close(made, expected, atol=1e-4 if dtype == "float32" else 0.1, rtol=0.05)


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    whole = load_model(zoo.folder("gpt2"), "float32")
    with pytest.raises(ValueError, match="'gpt2' has no list of layers"):
        whole.part((0, 1))
