"""Predicted outputs: none changes a token, a right one makes long runs, usage says what it was worth."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from deployments.config import AppConfig
from tests import tiny
from tests.harness import Answer, Harness, ReplayDrafter, harness, http_client
from tests.integration.test_failover import cut_after
from tests.oracles import assert_saw_everything
from workers.draft.drafters.lookup import LookupDrafter
from workers.prediction import Alignment

tokenizer = tiny.byte_level_tokenizer()
VOCAB = len(tokenizer)
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello world", "0123456789 " * 8)]
MESSAGES = [{"role": "user", "content": "hi there"}]


def edited(tokens: Sequence[int]) -> list[int]:
    """What would be sent: a stretch is other, one is missing, one is there that does not come."""
    other = [(token + 1) % 256 for token in tokens[12:15]]
    return [*tokens[:12], *other, *tokens[15:30], *tokens[34:44], 1, 2, 3, *tokens[44:]]


async def plain(h: Harness, prompt: Sequence[int], **options: Any) -> Answer:
    request = h.request(prompt, **{"max_tokens": 64, "logprobs": 1, **options})
    return await h.generate(request, speculate=False)


async def predicted(
    h: Harness, prompt: Sequence[int], prediction: Sequence[int], **options: Any
) -> Answer:
    options = {"max_tokens": 64, "logprobs": 1, **options}
    return await h.generate(h.request(prompt, prediction=prediction, **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_on_equals_off(dtype: str, temperature: float) -> None:
    async with harness(tiny.llama(), {}, dtype=dtype) as h:
        spoken = []
        for seed, prompt in enumerate(PROMPTS):
            options = {"temperature": temperature, "seed": seed}
            off = await plain(h, prompt, **options)
            on = await predicted(h, prompt, edited(off.tokens), **options)
            on.same_as(off)
            assert on.stats.drafter == "prediction"
            spoken.append(on)
        assert_saw_everything(spoken)
        await h.idle()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_right_prediction_is_taken_in_long_runs(temperature: float) -> None:
    async with harness(tiny.llama(), {}, max_draft_tokens=5) as h:
        options = {"temperature": temperature, "seed": 4, "max_tokens": 120}
        off = await plain(h, PROMPTS[0], **options)
        on = await predicted(h, PROMPTS[0], off.tokens, **options)
        on.same_as(off)
        assert all(rate == 1.0 for rate in on.stats.acceptance_by_depth)
        # Each round verifies up to 64, whatever others may draft.
        assert on.stats.rounds <= 4
        changed = [*off.tokens[:50], *(255 - t % 100 for t in off.tokens[50:56]), *off.tokens[56:]]
        again = await predicted(h, PROMPTS[0], changed, **options)
        again.same_as(off)
        assert again.stats.rounds <= 14


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_wrong_prediction_changes_nothing(temperature: float) -> None:
    rng = random.Random(1)
    async with harness(tiny.llama(), {}) as h:
        for seed, prompt in enumerate(PROMPTS):
            options = {"temperature": temperature, "seed": seed}
            off = await plain(h, prompt, **options)
            for wrong in ([rng.randrange(256) for _ in range(200)], [5], off.tokens[::-1] * 3):
                (await predicted(h, prompt, wrong, **options)).same_as(off)
        await h.idle()


async def test_it_shares_rounds_with_other_drafters() -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), {"test": drafter}, beside={"lookup": LookupDrafter()}) as h:
        for prompt in PROMPTS:
            off = await plain(h, prompt)
            drafter.learn(h.request(prompt), off)
            on = await predicted(h, prompt, edited(off.tokens))
            on.same_as(off)
            assert on.stats.drafter == "lookup+prediction+test"
            chosen = await predicted(h, prompt, edited(off.tokens), auto=True)
            chosen.same_as(off)
            assert chosen.stats.accepted_tokens > 20
        await h.idle()


async def test_it_is_followed_whatever_the_server_would_choose() -> None:
    """Nobody else is asked while drafting rests; what the request says itself is."""
    async with harness(tiny.llama(), {}, patient=False) as h:
        off = await plain(h, PROMPTS[0], max_tokens=120)
        on = await predicted(h, PROMPTS[0], off.tokens, auto=True, max_tokens=120)
        on.same_as(off)
        assert on.stats.accepted_tokens > 60


async def test_company_changes_nothing() -> None:
    rng = random.Random(4)
    async with harness(tiny.llama(), {}, max_num_batched_tokens=100, max_num_seqs=6) as h:
        asked, alone = [], []
        for seed in range(8):
            prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
            options = {"temperature": float(seed % 2), "seed": seed}
            alone.append(await plain(h, prompt, **options))
            said = edited(alone[-1].tokens)
            asked.append(
                predicted(h, prompt, said, **options) if seed % 3 else plain(h, prompt, **options)
            )
        together = await asyncio.gather(*asked)
        for answer, expected in zip(together, alone, strict=True):
            answer.same_as(expected)
        assert_saw_everything(together)
        await h.idle()


async def test_another_target_follows_it_too() -> None:
    async with harness(tiny.llama(), {}, others=[tiny.llama()]) as h:
        off = await plain(h, PROMPTS[0], max_tokens=90)
        request = h.request(PROMPTS[0], max_tokens=90, logprobs=1, prediction=off.tokens)
        on = await cut_after(h, request, [30])
        on.same_as(off)
        assert on.stats.faults["target_lost"] == 1
        assert on.stats.rounds < 40
        await h.idle()


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    asked = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    response = await client.post("/v1/chat/completions", json={**asked, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_usage_says_what_of_it_appeared() -> None:
    """The same whoever drafts: it is about the texts."""
    bias = {"logit_bias": {str(t): 100 for t in range(64, 90)}}  # Letters: tokens of their own.
    stats = {"speculation": {"stats": True}}
    async with harness(tiny.llama(), LookupDrafter(), patient=False) as h, http_client(h) as client:
        off = await chat(client, **bias)
        assert "completion_tokens_details" not in off["usage"]
        text = off["choices"][0]["message"]["content"]
        prediction = text[:15] + "QQQ" + text[18:] + "never said"
        parts = [{"type": "text", "text": prediction[:9]}, {"type": "text", "text": prediction[9:]}]
        for content in (prediction, parts):
            sent = {"prediction": {"type": "content", "content": content}}
            on = await chat(client, **bias, **sent, **stats)
            assert on["choices"] == off["choices"]
            assert "prediction" in on["speculation"]["drafter"]
            details = on["usage"]["completion_tokens_details"]
            alignment = Alignment(tokenizer(prediction).input_ids)
            alignment.observe(off["choices"][0]["token_ids"])
            assert details["accepted_prediction_tokens"] == alignment.accepted >= 30
            assert sum(details.values()) == len(tokenizer(prediction).input_ids)
            undrafted = await chat(client, **bias, **sent, speculation={"enabled": False})
            assert undrafted["usage"] == on["usage"]
        streamed = await client.post(
            "/v1/chat/completions",
            json={
                **bias,
                **sent,
                "messages": MESSAGES,
                "max_tokens": 40,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
        last = streamed.text.split("\n\n")[-3]
        assert f'"accepted_prediction_tokens":{details["accepted_prediction_tokens"]}' in last
        both = await chat(client, n=2, **bias, **sent)
        twice = {name: 2 * count for name, count in details.items()}
        assert both["usage"]["completion_tokens_details"] == twice
        await h.idle()


async def test_who_follows_it_can_be_said() -> None:
    sent = {"prediction": {"type": "content", "content": "hello"}}
    async with harness(tiny.llama(), LookupDrafter(), patient=False) as h, http_client(h) as client:

        async def drafters(**body: Any) -> str:
            said = body.pop("speculation", {})
            answer = await chat(client, **body, speculation={**said, "stats": True})
            return str(answer["speculation"]["drafter"])

        async def refused(path: str, body: dict[str, Any]) -> str:
            response = await client.post(path, json=body)
            assert response.status_code == 400, response.text
            return str(response.json()["error"]["message"])

        alone = {"speculation": {"drafter": "prediction"}}
        assert await drafters(**sent, **alone) == "prediction"
        assert await drafters(**sent, speculation={"drafter": "test"}) in ("test", "")
        assert await drafters(prediction={"type": "content", "content": ""}) in ("test", "")
        assert "has none" in await refused("/v1/chat/completions", {"messages": MESSAGES, **alone})
        assert "prediction" in await refused("/v1/completions", {"prompt": "x", **sent})
        assert "prediction" not in (await client.get("/v1/models")).json()["data"][0]["drafters"]
        for wrong, named in (
            ({"type": "text", "content": "x"}, "prediction.type"),
            ({"type": "content"}, "prediction.content"),
            ({"type": "content", "content": [{"type": "image_url"}]}, "image_url"),
            ("x", "prediction"),
        ):
            body = {"messages": MESSAGES, "prediction": wrong}
            assert named in await refused("/v1/chat/completions", body)


def test_its_name_is_taken() -> None:
    with pytest.raises(ValueError, match='the name "prediction" is taken'):
        AppConfig.model_validate(
            {
                "model_id": "m",
                "target": {"model": "x"},
                "drafts": [{"name": "prediction", "kind": "lookup"}],
            }
        )
