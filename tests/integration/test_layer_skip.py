"""The target without some of its layers as its own draft: sets, caches, search; and no token changed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.harness import harness
from tests.oracles import assert_always_right, assert_drafts_until_full
from workers.draft import skips
from workers.draft.config import LayerSkipConfig
from workers.draft.drafter import Ask
from workers.draft.drafters import make
from workers.draft.drafters.layer_skip import LayerSkipDrafter
from workers.engine.loading import load_model
from workers.engine.model import Model
from workers.request import SamplingParams

tokenizer = tiny.byte_level_tokenizer()
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello", "0123456789 " * 8)]
SAMPLING = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]
GREEDY = SamplingParams(temperature=0.0)
DTYPES = ["float32", "bfloat16"]


def config(**options: Any) -> LayerSkipConfig:
    defaults = {"skip": (4,), "online": False, "width": 4, "steps": 4, "floor": 0.0}
    return LayerSkipConfig(**{"name": "skip", "num_slots": 8192, **defaults, **options})


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_k2_with_nothing_skipped_everything_is_accepted(dtype: str, tree: bool) -> None:
    beside = [config(skip=())]
    async with harness(tiny.even_llama(), {}, beside=beside, dtype=dtype) as h:
        for sampling in SAMPLING:
            request = h.request(PROMPTS[0], max_tokens=60, seed=4, tree=tree, **sampling)
            on = await assert_always_right(h, request, 35)
            assert tree or on.stats.accepted_tokens == on.stats.draft_tokens
        await h.idle()


async def test_drafting_stops_where_its_cache_ends() -> None:
    async with harness(tiny.even_llama(), {}, beside=[config(num_slots=64)]) as h:
        await assert_drafts_until_full(h, h.request(PROMPTS[0], max_tokens=150), 64)


def test_online_search_leaves_a_bad_set_between_answers() -> None:
    """Another set takes over for the answers that begin then; one that runs keeps its own."""
    folder, heavy = tiny.even_llama(), tiny.EVEN_WEIGHTY
    host = load_model(folder, "float32")
    made = make(config(skip=(heavy,), online=True, steps=0), str(folder), host)
    assert isinstance(made, LayerSkipDrafter)
    assert made._search is not None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made.open(0, PROMPTS[0], GREEDY)
    made.propose([Ask(0, 8, 8, chain=False)])
    for number in range(1, 40):
        prompt = tokenizer(f"say {number}").input_ids
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False)[0]
        made.open(number, prompt, GREEDY)
        made.observe(number, answer[len(prompt) :].tolist(), ())
        made.propose([Ask(number, 8, 8, chain=False)])
        made.close(number)
        if heavy not in made._search.skip:
            break
    assert len(made._search.skip) == 1
    assert heavy not in made._search.skip
    before = made._sessions[0]
    made.open(1, PROMPTS[0], GREEDY)
    after = made._sessions[1]
    assert before.model is not after.model
    # Both at once, in one pass of each.
    made.observe(0, [5], ())
    both = made.propose([Ask(0, 8, 8, chain=False), Ask(1, 8, 8, chain=False)])
    assert all(both)
    made.close(0)
    made.close(1)
    made._pool.check_integrity()
    assert made._pool.free_slots == made._pool.num_slots


async def test_an_answer_keeps_the_set_that_it_began_with() -> None:
    """Two answers in one pass of two sets; what each is drafted is what its own set says."""
    async with harness(tiny.even_llama(), {}, beside=[config()], dtype="float32") as h:
        drafter = drafter_of(h)
        host = h.target._model
        requests = [h.request(PROMPTS[i], seed=i, max_tokens=60) for i in range(3)]
        alone = [await h.generate(request, speculate=False) for request in requests]
        opened = drafter.make_session
        parts = iter([drafter.model, host.part(skips.kept((3,), host.num_layers))] * 2)
        drafter.make_session = lambda sampling: with_part(opened(sampling), next(parts))  # type: ignore[method-assign]
        together = await asyncio.gather(*(h.generate(request) for request in requests))
        for answer, expected in zip(together, alone, strict=True):
            answer.same_as(expected)
            assert answer.stats.accepted_tokens > 10
        await h.idle()


def test_sets_come_from_files_and_are_checked(tmp_path: Path) -> None:
    host = load_model(tiny.even_llama(), "float32")
    target = str(tiny.even_llama())

    def layers(**options: Any) -> int:
        made = make(config(**options), target, host)
        assert isinstance(made, LayerSkipDrafter)
        return made.model.num_layers

    skips.save(tmp_path / "skip.json", (4, 1), {})
    assert layers(skip=str(tmp_path / "skip.json")) == host.num_layers - 2
    assert layers(skip=None) == host.num_layers - len(skips.every_second(host.num_layers))
    (tmp_path / "other.json").write_text(json.dumps({"format": 9, "skip": []}))
    for wrong, reason in (
        ((1, 6), r"skip names layers \[6\], but the target has 6"),
        ((1, 1), "twice"),
        (tuple(range(6)), "none of the 6 layers"),
        (str(tmp_path / "none.json"), "none.json is no set"),
        (str(tmp_path / "other.json"), "format 9"),
    ):
        with pytest.raises(ValueError, match=reason):
            layers(skip=wrong)
    with pytest.raises(ValueError, match="placement: target"):
        make(config(), target)


def drafter_of(h: Any) -> LayerSkipDrafter:
    drafter = h.target._beside._loops["skip"].drafter
    assert isinstance(drafter, LayerSkipDrafter)
    return drafter


def with_part(session: Any, part: Model) -> Any:
    session.model = part
    return session
