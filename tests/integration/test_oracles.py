"""K1, K2, K3, K4, K6 of the design: speculation must not change a token."""

import asyncio
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.harness import ReplayDrafter, harness
from tests.oracles import assert_saw_everything, assert_wanders

PROMPTS = ["the cat in the hat", "hello world, this is", "x", "0123456789 " * 12]
SAMPLING = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "filters": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
}
DTYPES = ["float32", "bfloat16"]
tokenizer = tiny.byte_level_tokenizer()
VOCAB = len(tokenizer)


def decoded(tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def ids(text: str) -> list[int]:
    return tokenizer(text).input_ids


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
@pytest.mark.parametrize("dtype", DTYPES)
async def test_k1_on_equals_off(dtype: str, sampling: dict[str, float], tree: bool) -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), drafter, dtype=dtype) as h:
        spoken = []
        for seed, text in enumerate(PROMPTS):
            request = h.request(
                ids(text), seed=seed, max_tokens=64, logprobs=3, tree=tree, **sampling
            )
            off = await h.generate(request, speculate=False)
            assert off.stats.draft_tokens == 0
            assert_wanders(off)
            drafter.learn(request, off)
            on = await h.generate(request)
            on.same_as(off)
            spoken.append(on)
        assert_saw_everything(spoken)
        await h.idle()


@pytest.mark.parametrize("dtype", DTYPES)
async def test_k2_a_draft_that_knows_is_always_accepted(dtype: str) -> None:
    drafter = ReplayDrafter("true", VOCAB)
    async with harness(tiny.llama(), drafter, dtype=dtype) as h:
        request = h.request(ids(PROMPTS[0]), temperature=1.0, seed=5, max_tokens=61)
        off = await h.generate(request, speculate=False)
        drafter.learn(request, off)
        on = await h.generate(request)
        on.same_as(off)
        # The draft session joins while the first tokens are made; from then on nothing is rejected.
        assert all(rate == 1.0 for rate in on.stats.acceptance_by_depth)
        assert on.stats.accepted_tokens == on.stats.draft_tokens > 40


@pytest.mark.parametrize("dtype", DTYPES)
async def test_k3_a_draft_that_is_always_wrong_changes_nothing(dtype: str) -> None:
    drafter = ReplayDrafter("wrong", VOCAB)
    async with harness(tiny.llama(), drafter, dtype=dtype) as h:
        for sampling in SAMPLING.values():
            request = h.request(ids(PROMPTS[1]), seed=3, max_tokens=64, logprobs=0, **sampling)
            off = await h.generate(request, speculate=False)
            drafter.learn(request, off)
            on = await h.generate(request)
            on.same_as(off)
            assert on.stats.draft_tokens > 100
            assert on.stats.accepted_tokens == 0


@pytest.mark.parametrize("dtype", DTYPES)
async def test_k4_an_end_at_every_offset_of_a_block(dtype: str) -> None:
    """EOS, a stop string and max_tokens at each place of the answer, with drafts across it."""
    drafter = ReplayDrafter("true", VOCAB)
    async with harness(tiny.llama(), drafter, dtype=dtype) as h:
        prompt = ids(PROMPTS[0])
        base = h.request(prompt, max_tokens=24, logprobs=0)
        whole = await h.generate(base, speculate=False)
        drafter.learn(base, whole)
        stopped_inside = 0
        for end in range(1, 24):
            token = whole.tokens[end]
            if token in whole.tokens[:end]:
                continue
            requests = [
                h.request(prompt, max_tokens=24, logprobs=0, stop_token_ids=[token]),
                h.request(prompt, max_tokens=end + 1, logprobs=0),
            ]
            text = decoded([token])
            if text and "�" not in text and text not in decoded(whole.tokens[:end]):
                requests.append(h.request(prompt, max_tokens=24, logprobs=0, stop=[text]))
            for request in requests:
                off = await h.generate(request, speculate=False)
                on = await h.generate(request)
                on.same_as(off)
                assert on.tokens == whole.tokens[: end + 1]
                assert len(on.logprobs) == len(on.tokens)
                stopped_inside += on.stats.accepted_tokens > 0
                if request.stopping.strings or request.stopping.token_ids:
                    assert on.finished is not None
                    assert on.finished.reason == "stop"
                    assert on.text == decoded(whole.tokens[:end])
        assert stopped_inside > 20
        await h.idle()


@pytest.mark.parametrize("dtype", DTYPES)
async def test_k6_company_changes_nothing(dtype: str) -> None:
    """Alone, and among others with random cancels, little cache and small chunks: the same."""
    drafter = ReplayDrafter("mixed", VOCAB)
    rng = random.Random(4)
    async with harness(
        tiny.llama(), drafter, dtype=dtype, max_num_batched_tokens=48, max_num_seqs=6
    ) as h:
        requests, alone = [], []
        for seed in range(8):
            prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 120))]
            sampling = list(SAMPLING.values())[seed % 3]
            request = h.request(prompt, seed=seed, max_tokens=50, logprobs=1, **sampling)
            requests.append(request)
            alone.append(await h.generate(request, speculate=False))
            drafter.learn(request, alone[-1])

        async def cancelled(request, after: int) -> None:
            seen = 0
            async for piece in h.generation(request).pieces():
                seen += len(piece.tokens)
                if seen >= after:
                    break

        disturbers = [cancelled(requests[i % 8], rng.randrange(1, 30)) for i in range(12)]
        results = await asyncio.gather(*(h.generate(r) for r in requests), *disturbers)
        for result, expected in zip(results[:8], alone, strict=True):
            result.same_as(expected)
        assert_saw_everything(results[:8])
        await h.idle()


@pytest.mark.parametrize("caching", [True, False])
async def test_preempted_answers_are_the_same(caching: bool) -> None:
    """Long requests, more than fit into a cache of a few hundred tokens."""
    drafter = ReplayDrafter("mixed", VOCAB)
    rng = random.Random(2)
    async with harness(
        tiny.llama(),
        drafter,
        dtype="bfloat16",
        num_gpu_blocks_override=40,
        max_num_seqs=8,
        enable_prefix_caching=caching,
    ) as h:
        requests = []
        for seed in range(20):
            prompt = [rng.randrange(256) for _ in range(rng.randrange(20, 90))]
            sampling = list(SAMPLING.values())[seed % 3]
            requests.append(h.request(prompt, seed=seed, max_tokens=80, **sampling))
        alone = []
        for request in requests:
            alone.append(await h.generate(request, speculate=False))
            drafter.learn(request, alone[-1])
        assert h.target._counters.preemptions == 0
        results = await asyncio.gather(*(h.generate(request) for request in requests))
        assert h.target._counters.preemptions > 0
        for result, expected in zip(results, alone, strict=True):
            result.same_as(expected)
        await h.idle()


@pytest.mark.parametrize("text", PROMPTS)
async def test_greedy_equals_transformers_generate(text: str) -> None:
    folder = tiny.llama()
    prompt = ids(text)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)
    logits = model(reference).logits[0].log_softmax(-1)
    async with harness(folder, ReplayDrafter("true", VOCAB), dtype="float32") as h:
        request = h.request(prompt, max_tokens=64, logprobs=2)
        answer = await h.generate(request, speculate=False)
        assert answer.tokens == reference[0, len(prompt) :].tolist()
        for i, entry in enumerate(answer.logprobs):
            row = logits[len(prompt) - 1 + i]
            assert entry.logprob == pytest.approx(row[answer.tokens[i]].item(), abs=1e-4)
            assert entry.top[0][1] == pytest.approx(row.max().item(), abs=1e-4)
