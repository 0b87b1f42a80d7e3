"""Drafters that use the target itself, all kinds: none changes a token, and none keeps anything."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.harness import Harness, harness
from tests.oracles import assert_company_changes_nothing
from workers.draft import exits
from workers.draft.config import (
    DrafterConfig,
    EarlyExitConfig,
    JacobiConfig,
    LayerSkipConfig,
    LookaheadConfig,
)
from workers.draft.drafters.tree_drafter import TreeDrafter

tokenizer = tiny.byte_level_tokenizer()
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello", "0123456789 " * 8)]
SAMPLING = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]
GROWS = {"width": 4, "steps": 4, "floor": 0.0, "num_slots": 8192}


def adapter() -> str:
    """The target's last layer and norm, behind the layers that matter."""
    folder = tiny.cache_dir("tests") / "exit-v1"
    if not (folder / "exit.json").exists():
        module = AutoModelForCausalLM.from_pretrained(tiny.even_llama(), dtype=torch.float32)
        layer, norm = module.model.layers[-1], module.model.norm
        exits.save(folder, tiny.EVEN_WEIGHTY + 1, str(tiny.even_llama()), layer, norm)
    return str(folder)


KINDS: dict[str, DrafterConfig] = {
    "layer_skip": LayerSkipConfig("own", (4,), False, **GROWS),
    "swift": LayerSkipConfig("own", (3, 4), True, **GROWS),
    "early_exit": EarlyExitConfig("own", None, tiny.EVEN_WEIGHTY + 1, **GROWS),
    "kangaroo": EarlyExitConfig("own", adapter(), None, **GROWS),
    "jacobi": JacobiConfig("own", 8),
    "lookahead": LookaheadConfig("own", 4, 3, 4),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def model_for(kind: str) -> Path:
    """Guesses that only the noise can make right need flat laws."""
    return tiny.flat_llama() if kind in ("jacobi", "lookahead") else tiny.even_llama()


def beside(kind: str, **target: Any) -> Any:
    return harness(model_for(kind), {}, beside=[KINDS[kind]], **target)


async def assert_nothing_held(h: Harness) -> None:
    await h.idle()
    drafter = h.target._beside._loops["own"].drafter
    if isinstance(drafter, TreeDrafter):
        pool = drafter._pool
        for _ in range(100):
            # Skip sets are compared when an answer is over already.
            if pool.free_slots == pool.num_slots:
                break
            await asyncio.sleep(0.01)
        pool.check_integrity()
        assert pool.free_slots == pool.num_slots
    else:
        assert not getattr(drafter, "_blocks", None)
        assert not getattr(drafter, "_windows", None)


@kinds
async def test_k1_k6_company_changes_nothing(kind: str) -> None:
    async with beside(kind, dtype="bfloat16") as h:
        together = await assert_company_changes_nothing(h, PROMPTS * 3, SAMPLING)
        assert h.target._counters.shared_steps > 0
        assert h.target._prefix_cache is not None
        assert h.target._prefix_cache.hits
        rounds = sum(answer.stats.rounds for answer in together)
        assert sum(answer.stats.committed_tokens for answer in together) > 1.1 * rounds
        await assert_nothing_held(h)


@kinds
async def test_k4_an_end_at_every_place(kind: str) -> None:
    async with beside(kind, dtype="bfloat16") as h:
        whole = await h.generate(h.request(PROMPTS[1], max_tokens=24), speculate=False)
        for end in range(1, 24, 3):
            stop = [whole.tokens[end]]
            for rules in ({"max_tokens": end + 1}, {"max_tokens": 24, "stop_token_ids": stop}):
                request = h.request(PROMPTS[1], logprobs=0, **rules)
                off = await h.generate(request, speculate=False)
                on = await h.generate(request)
                on.same_as(off)
        await assert_nothing_held(h)


@kinds
async def test_preempted_answers_are_the_same(kind: str) -> None:
    async with beside(kind, dtype="bfloat16", num_gpu_blocks_override=32, max_num_seqs=8) as h:
        requests = [
            h.request(PROMPTS[seed % 3], seed=seed, max_tokens=80, **SAMPLING[seed % 3])
            for seed in range(10)
        ]
        alone = [await h.generate(request, speculate=False) for request in requests]
        together = await asyncio.gather(*(h.generate(request) for request in requests))
        assert h.target._counters.preemptions > 0
        for answer, expected in zip(together, alone, strict=True):
            answer.same_as(expected)
        assert sum(answer.stats.accepted_tokens for answer in together) > 20
        await assert_nothing_held(h)


async def test_kinds_draft_for_one_answer_together() -> None:
    """Their trees are one, and what its rows say serves each kind that reads it."""
    both: list[DrafterConfig] = [
        LayerSkipConfig("skip", (4,), False, **GROWS),
        JacobiConfig("jacobi", 8),
        LookaheadConfig("lookahead", 4, 3, 4),
    ]
    async with harness(tiny.even_llama(), {}, beside=both, dtype="bfloat16") as h:
        for seed, sampling in enumerate(SAMPLING):
            request = h.request(
                PROMPTS[0], max_tokens=80, seed=seed, max_draft_tokens=16, **sampling
            )
            off = await h.generate(request, speculate=False)
            on = await h.generate(request)
            on.same_as(off)
            assert on.stats.drafter == "jacobi+lookahead+skip"
            assert on.stats.accepted_tokens > 20
        await h.idle()
