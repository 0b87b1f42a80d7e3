"""The first layers of the target as its draft, with its own head or an adapter; and no token changed."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.harness import harness
from tests.oracles import assert_always_right
from workers.checkpoint import CheckpointError
from workers.draft import exits
from workers.draft.config import EarlyExitConfig
from workers.draft.drafters import make
from workers.engine.loading import load_model

tokenizer = tiny.byte_level_tokenizer()
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello", "0123456789 " * 8)]
SAMPLING = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]
DTYPES = ["float32", "bfloat16"]
HEAVY = tiny.EVEN_WEIGHTY + 1
"""Layers of `even_llama()` that matter; those behind add little."""


def config(**options: Any) -> EarlyExitConfig:
    defaults = {"model": None, "layers": HEAVY, "width": 4, "steps": 4, "floor": 0.0}
    return EarlyExitConfig(**{"name": "exit", "num_slots": 8192, **defaults, **options})


def own_last_layer(path: Path) -> Path:
    """An adapter that is the target's own last layer and norm."""
    module = AutoModelForCausalLM.from_pretrained(tiny.even_llama(), dtype=torch.float32)
    exits.save(path, 5, str(tiny.even_llama()), module.model.layers[-1], module.model.norm)
    return path


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_k2_an_adapter_that_is_what_is_left_out_is_always_right(
    dtype: str, tree: bool, tmp_path: Path
) -> None:
    """Five of six layers, and the sixth as the adapter: the target."""
    path = own_last_layer(tmp_path / "exit")
    if dtype == "float32":
        # Checkpoints are in bfloat16; here the bits must be the target's.
        module = AutoModelForCausalLM.from_pretrained(tiny.even_llama(), dtype=torch.float32)
        layer, norm = module.model.layers[-1].state_dict(), module.model.norm.state_dict()
        tensors = {f"layer.{name}": t for name, t in layer.items()}
        save_file(
            tensors | {f"norm.{name}": t for name, t in norm.items()}, path / exits.WEIGHTS_FILE
        )
    beside = [config(model=str(path), layers=None)]
    async with harness(tiny.even_llama(), {}, beside=beside, dtype=dtype) as h:
        for sampling in SAMPLING:
            request = h.request(PROMPTS[0], max_tokens=60, seed=4, tree=tree, **sampling)
            await assert_always_right(h, request, 35)
        await h.idle()


async def test_adapters_are_reloaded_beside_their_target(tmp_path: Path) -> None:
    useless = own_last_layer(tmp_path / "useless")
    tensors = load_file(useless / exits.WEIGHTS_FILE)
    save_file(
        {name: torch.randn_like(t) for name, t in tensors.items()}, useless / exits.WEIGHTS_FILE
    )
    beside = [config(model=str(useless), layers=None)]
    async with harness(tiny.even_llama(), {}, beside=beside, dtype="bfloat16") as h:
        request = h.request(PROMPTS[0], max_tokens=60)
        off = await h.generate(request, speculate=False)
        before = await h.generate(request)
        before.same_as(off)
        assert before.stats.mean_accepted_length < 1.5
        await h.target.reload({"exit": str(own_last_layer(tmp_path / "exit"))})
        after = await h.generate(request)
        after.same_as(off)
        assert after.stats.mean_accepted_length > 2
        await h.idle()


def test_exits_are_checked(tmp_path: Path) -> None:
    target = str(tiny.even_llama())
    host = load_model(tiny.even_llama(), "float32")
    for layers in (0, 6):
        with pytest.raises(ValueError, match="the target has 6: give 1 to 5"):
            make(config(layers=layers), target, host)
    with pytest.raises(ValueError, match="placement: target"):
        make(config(), target)
    path = own_last_layer(tmp_path / "exit")
    make(config(model=str(path), layers=None), target, host)
    tensors = load_file(path / exits.WEIGHTS_FILE)
    save_file(dict(itertools.islice(tensors.items(), 3)), path / exits.WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match="no adapter for even-llama"):
        make(config(model=str(path), layers=None), target, host)
    (path / "exit.json").write_text(json.dumps({"format": 9}))
    with pytest.raises(CheckpointError, match="format 9"):
        make(config(model=str(path), layers=None), target, host)
