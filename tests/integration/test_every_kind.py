"""Every kind of drafter that a config can name: no token changes, chains and trees, greedy and drawn."""

import asyncio
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.harness import harness
from tests.integration.test_host_drafters import GROWS, adapter
from workers.draft.config import (
    CustomConfig,
    DatastoreConfig,
    DrafterConfig,
    EagleConfig,
    EarlyExitConfig,
    JacobiConfig,
    LayerSkipConfig,
    LookaheadConfig,
    LookupConfig,
    MaskConfig,
    MedusaConfig,
    ModelConfig,
    PredictionConfig,
    SuffixConfig,
)
from workers.draft.drafter import Drafter
from workers.draft.drafters.lookup import LookupDrafter

tokenizer = tiny.byte_level_tokenizer()
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello", "0123456789 " * 8)]
REPEATING = {"logit_bias": tuple((token, 100.0) for token in (65, 66, 67))}
"""Answers of three tokens: who drafts what was there before is right sometimes."""

KINDS = [config.kind for config in typing.get_args(DrafterConfig) if config is not PredictionConfig]
"""Predictions come with requests: tests/integration/test_prediction.py."""


@dataclass(frozen=True)
class Case:
    """A drafter of a kind, the target that it is right about at times, and what requests ask for."""

    config: DrafterConfig
    target: Path
    asks: dict[str, Any]


def lookup(target: str) -> Drafter:
    """A drafter of somebody's own."""
    return LookupDrafter()


def case(kind: str, dtype: str, folder: Path) -> Case:
    learned, even, flat = tiny.llama(), tiny.even_llama(), tiny.flat_llama()
    loaded = {"dtype": dtype, "device": "cpu", "num_threads": 0}
    match kind:
        case "lookup":
            return Case(LookupConfig("own"), learned, REPEATING)
        case "custom":
            return Case(CustomConfig("own", f"{__name__}:lookup", {}), learned, REPEATING)
        case "suffix":
            return Case(SuffixConfig("own", True, 4096), learned, REPEATING)
        case "datastore":
            tiny.datastore(folder, [[65, 66, 67, 65, 65, 66, 66, 67, 67] * 3])
            return Case(DatastoreConfig("own", str(folder), False, 0), learned, REPEATING)
        case "model":
            options = {**GROWS, **loaded, "shared_vocabulary": False, "online": False}
            return Case(ModelConfig("own", str(tiny.shaken(1)), **options), learned, {})
        case "eagle":
            options = {**GROWS, **loaded, "window": 512}
            return Case(
                EagleConfig("own", str(tiny.trained_head("eagle3")), **options), learned, {}
            )
        case "medusa":
            return Case(MedusaConfig("own", str(tiny.trained_medusa()), **loaded), learned, {})
        case "mask":
            config = MaskConfig("own", str(tiny.trained_mask()), num_slots=4096, **loaded)
            return Case(config, learned, {})
        case "layer_skip":
            return Case(LayerSkipConfig("own", (4,), True, **GROWS), even, {})
        case "early_exit":
            return Case(EarlyExitConfig("own", adapter(), None, **GROWS), even, {})
        case "jacobi":
            return Case(JacobiConfig("own", 8), flat, {})
        case "lookahead":
            return Case(LookaheadConfig("own", 4, 3, 4), flat, REPEATING)
    raise AssertionError(f"there is no case of {kind}: add one")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
async def test_k1_k6_no_token_changes(kind: str, dtype: str, tmp_path: Path) -> None:
    made = case(kind, dtype, tmp_path / "store")
    # In float32 the engine takes torch's operations, which are slow.
    prompts, tokens = (1, 40) if dtype == "float32" else (3, 48)
    features = {"eagle": "three", "medusa": "last"}.get(kind)
    options: dict[str, Any] = {"dtype": dtype, "features": features}
    async with harness(made.target, {}, beside=[made.config], **options) as h:
        for tree in (True, False):
            alone, requests = [], []
            for seed, prompt in enumerate(PROMPTS[:prompts]):
                for temperature in (0.0, 1.0):
                    asks = {"temperature": temperature, "tree": tree, "logprobs": 1, **made.asks}
                    request = h.request(
                        prompt, seed=seed, max_tokens=tokens, ignore_eos=True, **asks
                    )
                    requests.append(request)
                    alone.append(await h.generate(request, speculate=False))
            together = await asyncio.gather(*(h.generate(request) for request in requests))
            for answer, expected in zip(together, alone, strict=True):
                answer.same_as(expected)
            drafted = sum(answer.stats.draft_tokens for answer in together)
            accepted = sum(answer.stats.accepted_tokens for answer in together)
            assert 0 < accepted < drafted
        await h.idle()
