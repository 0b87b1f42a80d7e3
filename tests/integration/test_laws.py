"""Tokens that a drafter has drawn: the answers' law is the target's, through all of the pipeline."""

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import tiny
from tests.harness import Answer, Harness, ReplayDrafter, harness
from tests.integration.test_model_drafter import PROMPTS, drafter
from tests.unit.test_sampling import SIGNIFICANCE, chi_square, exact_law
from workers.request import SamplingParams, Verification

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ANSWERS = 600
AT_ONCE = 12
LENGTH = 3
FILTERS = {"temperature": 1.0, "top_k": 3}
RULES: list[tuple[Verification, bool]] = [
    ("rejection", True),
    ("rejection", False),
    ("block", False),
]
COUNTED = [RULES[0], pytest.param(*RULES[1], marks=pytest.mark.slow), RULES[2]]


def exact(folder: Path, options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """How likely each answer is, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    params = SamplingParams(**options)
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for answer, probability in laws.items():
            with torch.inference_mode():
                row = model(torch.tensor([[*PROMPT, *answer]])).logits[0, -1]
            law = exact_law(row, params)
            for token in law.nonzero()[0].tolist():
                longer[*answer, token] = probability * float(law[token])
        laws = longer
    return laws


async def answers(h: Harness, count: int, **options: Any) -> list[Answer]:
    requests = (
        h.request(PROMPT, max_tokens=LENGTH, ignore_eos=True, seed=seed, **options)
        for seed in range(count)
    )
    found: list[Answer] = []
    while batch := list(itertools.islice(requests, AT_ONCE)):
        found += await asyncio.gather(*(h.generate(request) for request in batch))
    return found


async def has_the_targets_law(h: Harness, folder: Path, **options: Any) -> None:
    """Answers are as likely as with the target alone, and drafts are accepted and rejected."""
    expected = exact(folder, FILTERS)
    found = await answers(h, ANSWERS, **options, **FILTERS)
    counts = Counter(tuple(answer.tokens) for answer in found)
    law = np.array(list(expected.values()))
    observed = np.array([counts.pop(answer, 0) for answer in expected])
    assert not counts
    assert chi_square(observed, law) > SIGNIFICANCE
    accepted = sum(answer.stats.accepted_tokens for answer in found)
    assert 0 < accepted < sum(answer.stats.draft_tokens for answer in found)
    await h.idle()


@pytest.mark.parametrize(("verification", "tree"), COUNTED)
async def test_answers_have_the_targets_law(verification: Verification, tree: bool) -> None:
    folder = tiny.llama()
    other = drafter(tiny.shaken(1))
    async with harness(folder, other, dtype="float32", max_num_seqs=AT_ONCE) as h:
        await has_the_targets_law(h, folder, verification=verification, tree=tree)


@pytest.mark.parametrize("beside", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_two_drafters_that_draw_leave_the_law_as_it_is(beside: bool) -> None:
    """One law, drawn from twice: what one draws must say nothing of what the other does."""
    folder = tiny.llama()
    made = {"one": drafter(tiny.shaken(1)), "two": drafter(tiny.shaken(1))}
    made["one"].number, made["two"].number = 1, 2
    here, there = (made, {}) if beside else ({}, made)
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": AT_ONCE, "beside": here}
    async with harness(folder, there, **options) as h:
        await has_the_targets_law(h, folder, verification="rejection", tree=True)


@pytest.mark.parametrize(("verification", "tree"), RULES)
async def test_a_draft_that_is_the_target_is_never_rejected(
    verification: Verification, tree: bool
) -> None:
    folder = tiny.llama()
    async with harness(folder, drafter(folder), dtype="float32") as h:
        options: dict[str, Any] = {"verification": verification, "tree": tree, **FILTERS}
        request = h.request(PROMPT, max_tokens=40, ignore_eos=True, seed=3, **options)
        answer = await h.generate(request)
        assert all(rate == 1.0 for rate in answer.stats.acceptance_by_depth)
        assert answer.stats.accepted_tokens > 20


@pytest.mark.parametrize("verification", ["rejection", "block", "typical"])
async def test_greedy_answers_are_those_without_drafts(verification: Verification) -> None:
    folder = tiny.llama()
    async with harness(folder, drafter(tiny.llama(seed=1))) as h:
        request = h.request(PROMPTS[0], max_tokens=40, logprobs=2, verification=verification)
        off = await h.generate(request, speculate=False)
        (await h.generate(request)).same_as(off)


@pytest.mark.parametrize("verification", ["rejection", "block"])
async def test_what_was_picked_is_tested_against_the_targets_tokens(
    verification: Verification,
) -> None:
    """Where a drafter has no law, answers are those without drafts, token for token."""
    replay = ReplayDrafter("mixed", len(tiny.byte_level_tokenizer()))
    async with harness(tiny.llama(), replay) as h:
        options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "verification": verification}
        request = h.request(PROMPTS[2], max_tokens=60, logprobs=1, **options)
        off = await h.generate(request, speculate=False)
        replay.learn(request, off)
        on = await h.generate(request)
        on.same_as(off)
        assert on.stats.draft_tokens > on.stats.accepted_tokens > 0


@pytest.mark.parametrize("verification", ["rejection", "block", "typical"])
async def test_penalties_stops_and_logprobs(verification: Verification) -> None:
    """Log-probabilities are the target's at each token's own place; penalties see what was committed."""
    folder = tiny.llama()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    async with harness(folder, drafter(folder), dtype="float32") as h:
        request = h.request(
            PROMPTS[0],
            max_tokens=48,
            temperature=1.0,
            top_k=20,
            seed=11,
            logprobs=2,
            presence_penalty=1.5,
            min_tokens=8,
            tree=verification != "block",
            verification=verification,
        )
        answer = await h.generate(request)
        assert answer.stats.accepted_tokens > 0
        assert len(answer.logprobs) == len(answer.tokens) >= 8
        prompt = PROMPTS[0]
        with torch.inference_mode():
            rows = reference(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
        for place, (token, entry) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            right = float(rows[len(prompt) - 1 + place, token])
            assert entry.logprob == pytest.approx(right, abs=1e-3)
        await h.idle()


async def test_typical_acceptance_takes_more() -> None:
    """And gives another text, which is why it needs consent."""
    folder = tiny.llama()
    async with harness(folder, drafter(tiny.shaken(1))) as h:
        options: dict[str, Any] = {"temperature": 1.5, "top_k": 8, "seed": 2}
        coupled = await h.generate(h.request(PROMPTS[0], max_tokens=100, **options))
        typical = await h.generate(
            h.request(PROMPTS[0], max_tokens=100, verification="typical", **options)
        )
        assert typical.stats.mean_accepted_length > coupled.stats.mean_accepted_length
