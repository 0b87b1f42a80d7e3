"""The whole sampling surface: what each parameter does, and that speculation changes none of it.

Kinds (a) to (d) and (f) of what is seen in other servers: code that takes a step for a token, processors
that skip drafted rows, state that is not rolled back, options that are ignored, and limits that differ.
"""

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import RepetitionPenaltyLogitsProcessor

from tests import tiny
from tests.harness import Answer, Harness, ReplayDrafter, harness
from tests.oracles import assert_saw_everything
from workers import sampling
from workers.request import SamplingParams

tokenizer = tiny.byte_level_tokenizer()
VOCAB = len(tokenizer)
EOS = tokenizer.eos_token_id
PROMPT = tokenizer("the cat in the hat the cat").input_ids

SURFACE: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.0},
    "negative frequency": {"frequency_penalty": -1.5},
    "repetition": {"repetition_penalty": 1.4},
    "all penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
    },
    "bias": {"logit_bias": ((65, 4.0), (66, 4.0), (67, -100.0))},
    "min_tokens": {"min_tokens": 9, "logit_bias": ((EOS, 8.0),)},
    "ignore_eos": {"ignore_eos": True, "logit_bias": ((EOS, 6.0),)},
    "special tokens shown": {"show_special_tokens": True, "logit_bias": ((EOS - 1, 6.0),)},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 1},
}


async def pair(h: Harness, drafter: ReplayDrafter, **options: Any) -> tuple[Answer, Answer]:
    """The answer without and with drafts that are partly right."""
    request = h.request(options.pop("prompt", PROMPT), **{"max_tokens": 48, **options})
    off = await h.generate(request, speculate=False)
    drafter.learn(request, off)
    on = await h.generate(request)
    on.same_as(off)
    return off, on


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_k1_over_the_surface(dtype: str, temperature: float, tree: bool) -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), drafter, dtype=dtype) as h:
        plain, _ = await pair(h, drafter, temperature=temperature, seed=1, tree=tree)
        spoken = []
        for name, options in SURFACE.items():
            off, on = await pair(h, drafter, temperature=temperature, seed=1, tree=tree, **options)
            if name != "prompt logprobs":
                assert off.tokens != plain.tokens, f"{name} had no effect"
            spoken.append(on)
        assert_saw_everything(spoken)
        await h.idle()


@pytest.mark.parametrize("style", ["true", "wrong"])
async def test_k2_k3_over_the_surface(style: str) -> None:
    drafter = ReplayDrafter(style, VOCAB)
    async with harness(tiny.llama(), drafter, dtype="float32") as h:
        for options in SURFACE.values():
            _, on = await pair(h, drafter, temperature=1.0, seed=2, **options)
            if style == "true":
                assert on.stats.accepted_tokens == on.stats.draft_tokens
            else:
                assert on.stats.accepted_tokens == 0


async def test_k6_over_the_surface() -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), drafter, max_num_batched_tokens=40) as h:
        requests, alone = [], []
        for seed, options in enumerate(SURFACE.values()):
            request = h.request(
                PROMPT[seed % 3 :], max_tokens=40, seed=seed, temperature=1.0, **options
            )
            requests.append(request)
            alone.append(await h.generate(request, speculate=False))
            drafter.learn(request, alone[-1])
        together = await asyncio.gather(*(h.generate(request) for request in requests))
        for answer, expected in zip(together, alone, strict=True):
            answer.same_as(expected)


class SharedNoise(LogitsProcessor):
    """Our rule as a processor of transformers: what `generate` then finds likeliest is our token."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids, values = sampling.survivors(scores[0], self._params)
        key = sampling.noise_key(self._params.seed, self._params.choice, input_ids.shape[1])
        noisy = torch.full_like(scores, -torch.inf)
        noisy[0, ids] = values + sampling.gumbel_noise(key, ids)
        return noisy


class OpenAIPenalties(LogitsProcessor):
    def __init__(self, params: SamplingParams, prompt_len: int) -> None:
        self._params, self._prompt_len = params, prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt_len :], minlength=scores.shape[1])
        scores = scores - self._params.frequency_penalty * counts
        return scores - self._params.presence_penalty * (counts > 0)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {
            "temperature": 1.0,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.6,
        },
    ],
    ids=str,
)
async def test_equal_to_generate_with_the_same_rules(options: dict[str, float]) -> None:
    folder, params = tiny.llama(), SamplingParams(seed=11, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(OpenAIPenalties(params, len(PROMPT)))
    if not params.greedy:
        processors.append(SharedNoise(params))
    reference = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=48, do_sample=False, logits_processor=processors
    )[0, len(PROMPT) :].tolist()
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(folder, drafter, dtype="float32") as h:
        off, _ = await pair(h, drafter, seed=11, **options)
        assert off.tokens == reference


async def test_penalties_and_bias_do_what_they_say() -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), drafter) as h:
        loving, _ = await pair(h, drafter, frequency_penalty=-2.0)
        hating, _ = await pair(h, drafter, frequency_penalty=2.0, presence_penalty=2.0)
        assert len(set(loving.tokens)) < 10 < 40 <= len(set(hating.tokens))
        only, _ = await pair(h, drafter, logit_bias=((65, 100.0),))
        assert set(only.tokens) == {65}
        never, _ = await pair(h, drafter, logit_bias=((hating.tokens[0], -100.0),))
        assert hating.tokens[0] not in never.tokens


async def test_min_tokens_holds_back_every_end_but_the_length() -> None:
    drafter = ReplayDrafter("true", VOCAB)
    async with harness(tiny.llama(), drafter) as h:
        eager = {"logit_bias": ((EOS, 100.0),)}
        for wanted in range(12):
            answer, _ = await pair(h, drafter, min_tokens=wanted, **eager)
            assert len(answer.tokens) == wanted + 1
            assert answer.finished.stop_token == EOS
        whole, _ = await pair(h, drafter)
        end = 12
        text = tokenizer.decode(whole.tokens[:end], skip_special_tokens=True)
        stop = next(c for c in text if c != "�" and text.count(c) == 1)
        first, _ = await pair(h, drafter, stop=[stop])
        held, _ = await pair(h, drafter, stop=[stop], min_tokens=20)
        assert len(first.tokens) <= end < 20 < len(held.tokens)
        assert stop in held.text


@pytest.mark.parametrize("include", [True, False])
async def test_what_ended_the_answer_is_kept_if_wanted(include: bool) -> None:
    drafter = ReplayDrafter("true", VOCAB)
    async with harness(tiny.llama(), drafter) as h:
        whole, _ = await pair(h, drafter)
        text = whole.text
        at = next(
            i
            for i in range(6, 30)
            if text.find(text[i : i + 2]) == i and "�" not in text[i : i + 2]
        )
        stop = text[at : at + 2]
        by_string, _ = await pair(h, drafter, stop=[stop], include_stop=include)
        assert by_string.text == text[: at + 2 * include]
        token = next(t for t in whole.tokens[5:] if whole.tokens.index(t) >= 5 and t < 200)
        by_id, _ = await pair(h, drafter, stop_token_ids=[token], include_stop=include)
        kept = by_id.tokens if include else by_id.tokens[:-1]
        assert by_id.text == tokenizer.decode(kept, skip_special_tokens=True)


async def test_ignored_eos_and_shown_special_tokens() -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), drafter) as h:
        options = {"logit_bias": ((EOS, 6.0),), "temperature": 1.0, "seed": 3}
        answer, _ = await pair(h, drafter, ignore_eos=True, **options)
        assert answer.finished.reason == "length"
        assert 0 < answer.tokens.count(EOS) < 48
        assert tiny.EOS not in answer.text
        shown, _ = await pair(h, drafter, ignore_eos=True, show_special_tokens=True, **options)
        assert shown.tokens == answer.tokens
        assert shown.text.count(tiny.EOS) == answer.tokens.count(EOS)


@pytest.mark.parametrize("chunk", [16, 256])
async def test_prompt_logprobs_are_transformers_own(chunk: int) -> None:
    folder = tiny.llama()
    prompt = PROMPT * 3
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(folder, drafter, dtype="float32", max_num_batched_tokens=chunk) as h:
        for _ in range(2):  # the second time the prefix cache must not hide any
            answer, _ = await pair(h, drafter, prompt=prompt, prompt_logprobs=3)
            assert len(answer.prompt_logprobs) == len(prompt) - 1
            for position, entry in enumerate(answer.prompt_logprobs, 1):
                row = rows[position - 1]
                token = prompt[position]
                assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
                assert entry.rank == 1 + int((row > row[token]).sum())
                assert len(entry.top) == 3
        none, _ = await pair(h, drafter, prompt=prompt)
        assert none.prompt_logprobs == []


async def test_choices_of_one_seed_differ_and_each_is_reproducible() -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), drafter) as h:
        answers = []
        for choice in range(4):
            off, _ = await pair(h, drafter, temperature=1.0, seed=5, choice=choice)
            answers.append(tuple(off.tokens))
        assert len(set(answers)) == 4


async def test_generation_to_the_very_end_of_the_models_length() -> None:
    """Kind (f): drafts of every length up to the limit; the last tokens are right."""
    for nodes in (1, 5, 16):
        drafter = ReplayDrafter("true", VOCAB)
        async with harness(tiny.llama(), drafter, max_model_len=80) as h:
            off, on = await pair(h, drafter, max_tokens=200, max_draft_tokens=nodes)
            assert len(PROMPT) + len(off.tokens) == 80
            assert on.finished.reason == "length"
            assert on.stats.accepted_tokens > 0


async def test_a_whole_answer_leaves_no_state_for_the_next() -> None:
    """Kind (c): a second turn behind an answer that ended inside a block equals that of a fresh server."""
    drafter = ReplayDrafter("true", VOCAB)
    answers = []
    for fresh in (False, True):
        async with harness(tiny.llama(), drafter) as h:
            whole, _ = await pair(h, drafter, max_tokens=30)
            stop = whole.tokens[11]
            first = PROMPT + whole.tokens[: whole.tokens.index(stop) + 1]
            if not fresh:
                await pair(h, drafter, max_tokens=30, stop_token_ids=[stop])
            second, _ = await pair(h, drafter, prompt=first + PROMPT, temperature=1.0, seed=1)
            answers.append(second)
    answers[0].same_as(answers[1])
