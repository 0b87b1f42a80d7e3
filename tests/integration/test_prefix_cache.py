"""The prefix cache: hits, equal answers with it and without, and slots that are given back."""

import asyncio
import random

import torch

from tests import tiny
from tests.harness import ReplayDrafter, harness
from workers.engine.kv_cache import KVPool, KVShape
from workers.engine.native.attention import NativeAttention
from workers.engine.prefix_cache import PrefixCache

tokenizer = tiny.byte_level_tokenizer()
VOCAB = len(tokenizer)
SYSTEM = tokenizer("system: you are a careful and patient assistant. " * 3).input_ids


async def test_two_turns_of_a_chat_hit_the_whole_first_turn() -> None:
    answers = {}
    for caching in (True, False):
        drafter = ReplayDrafter("mixed", VOCAB)
        async with harness(tiny.llama(), drafter, enable_prefix_caching=caching) as h:
            first = h.request(SYSTEM, max_tokens=37, logprobs=2, temperature=1.0, seed=4)
            one = await h.generate(first, speculate=False)
            drafter.learn(first, one)
            await h.generate(first)
            before = h.target._prefix_cache.hits if caching else 0
            turn = SYSTEM + one.tokens + tokenizer(" user: go on").input_ids
            second = h.request(turn, max_tokens=40, logprobs=2, temperature=1.0, seed=5)
            two = await h.generate(second, speculate=False)
            answers[caching] = (one, two)
            if caching:
                # The last answer token was never in the cache; below it whole blocks are.
                known = len(SYSTEM) + len(one.tokens) - 1
                assert h.target._prefix_cache.hits - before == known // 16 * 16
            await h.idle()
    for cached, computed in zip(answers[True], answers[False], strict=True):
        cached.same_as(computed)


async def test_requests_that_share_a_prefix_at_once() -> None:
    rng = random.Random(1)
    results = {}
    for caching in (True, False):
        drafter = ReplayDrafter("mixed", VOCAB)
        async with harness(
            tiny.llama(), drafter, enable_prefix_caching=caching, max_num_batched_tokens=64
        ) as h:
            await h.generate(h.request(SYSTEM, max_tokens=1))
            requests = [
                h.request(
                    [*SYSTEM[: rng.randrange(20, len(SYSTEM))], seed],
                    max_tokens=30,
                    seed=seed,
                    temperature=1.0,
                    logprobs=1,
                )
                for seed in range(12)
            ]
            rng.seed(1)
            results[caching] = await asyncio.gather(*(h.generate(r) for r in requests))
            if caching:
                assert h.target._prefix_cache.hits > 12 * 16
            await h.idle()
    for cached, computed in zip(results[True], results[False], strict=True):
        cached.same_as(computed)


async def test_cached_blocks_give_way_to_sessions() -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    rng = random.Random(3)
    async with harness(tiny.llama(), drafter, num_gpu_blocks_override=32) as h:
        pool = h.target._pool
        for seed in range(12):
            prompt = [rng.randrange(256) for _ in range(120)]
            request = h.request(prompt, max_tokens=200, seed=seed, temperature=1.0, ignore_eos=True)
            answer = await h.generate(request, speculate=False)
            assert len(answer.tokens) == 200
            pool.check_integrity()
            assert pool.cached_slots > 0
        await h.idle()


def test_what_is_restored_is_what_was_stored_and_order_of_use_decides() -> None:
    shape = KVShape(1, 1, 16, torch.float32, torch.device("cpu"))
    pool = KVPool(shape, NativeAttention(), 16 * 16)
    cache = PrefixCache(pool)

    def stored(tokens: list[int]) -> None:
        kv = pool.sequence()
        assert kv.reserve(len(tokens))
        kv.keys.fill_(float(tokens[0]))
        kv.values.fill_(float(tokens[-1]))
        kv.length = len(tokens)
        cache.store(kv, tokens)
        kv.free()
        pool.check_integrity()

    a, b = list(range(40)), list(range(100, 150))
    stored(a)
    stored(b)
    assert cache.slots == 2 * 16 + 3 * 16
    kv = pool.sequence()
    # The last token is never restored, whole blocks only.
    assert cache.restore(kv, a[:32]) == 16
    assert float(kv.keys[0, 0, 0].mean()) == 0.0
    kv.free()
    assert cache.restore(kv, [*a, 7]) == 32
    assert cache.restore(pool.sequence(), [1, *a]) == 0
    kv.free()
    # b was used less recently than a: it goes first, from its end.
    big = pool.sequence()
    assert big.reserve(16 * 12)
    assert len(cache._find(b)) == 2
    assert len(cache._find(a)) == 2
    pool.check_integrity()
    big.free()
    # Nothing is kept where sessions hold everything.
    full = pool.sequence()
    assert full.reserve(16 * 16)
    assert cache.slots == 0
    assert not pool.take_for_cache()
    pool.check_integrity()


def test_equal_blocks_behind_different_prefixes_are_different() -> None:
    pool = KVPool(KVShape(1, 1, 16, torch.float32, torch.device("cpu")), NativeAttention(), 16 * 20)
    cache = PrefixCache(pool)
    same = list(range(50, 66))
    for start in (1, 2):
        kv = pool.sequence()
        kv.reserve(32)
        kv.keys.fill_(float(start))
        kv.length = 32
        cache.store(kv, [start] * 16 + same)
        kv.free()
    kv = pool.sequence()
    assert cache.restore(kv, [2] * 16 + [*same, 0]) == 32
    assert float(kv.keys[0, 0, 1].mean()) == 2.0
    assert cache.restore(pool.sequence(), [*same, 0]) == 0
