"""Requests that are wrong, or as large as they may be: each has its status and says what is wrong, and a
neighbour in flight does not notice."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from deployments.config import CoordinatorThresholds
from deployments.coordinator import Workers
from tests import tiny
from tests.harness import front_door, harness
from workers.draft.drafters.lookup import LookupDrafter

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"role": "user", "content": "hi"}
JSON = {"content-type": "application/json"}
DEEP = "[" * 5000 + "]" * 5000
BODY_LIMIT = 200_000


def chat(**body: Any) -> dict[str, Any]:
    return {"url": CHAT, "json": {"messages": [HI], "max_tokens": 2, **body}}


def text(**body: Any) -> dict[str, Any]:
    return {"url": TEXT, "json": {"prompt": "a", "max_tokens": 2, **body}}


def raw(content: str | bytes, headers: dict[str, str] = JSON, url: str = CHAT) -> dict[str, Any]:
    return {"url": url, "content": content, "headers": headers}


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    # No body that could be read
    "empty body": (raw(""), 400, "JSON object"),
    "not JSON": (raw("hello"), 400, "not JSON"),
    "half a body": (raw('{"messages": ['), 400, "not JSON"),
    "two bodies": (raw('{"messages": []}{}'), 400, "not JSON"),
    "a list": (raw("[1, 2]"), 400, "JSON object"),
    "a string": (raw('"hi"'), 400, "JSON object"),
    "a null": (raw("null"), 400, "JSON object"),
    "a form": (raw("a=b", {"content-type": "application/x-www-form-urlencoded"}), 400, "JSON"),
    "no content type": (raw('{"messages": []}', {}), 400, "content-type"),
    "not UTF-8": (raw(b'{"prompt": "\xff\xfe"}', url=TEXT), 400, ""),
    "half a surrogate pair": (raw('{"prompt": "\\ud83d"}', url=TEXT), 400, "surrogate"),
    "deep nesting": (raw(f'{{"messages": {DEEP}}}'), 400, ""),
    "too large": (raw(json.dumps({"prompt": "a" * BODY_LIMIT}), url=TEXT), 413, "larger than"),
    # No such thing
    "no such route": ({"url": "/v1/nothing", "json": {}}, 404, "/v1/nothing"),
    "no such model": (chat(model="other"), 404, "'other' does not exist"),
    "no such parameter": (chat(temprature=1), 400, "unknown parameter temprature"),
    "no such drafter": (chat(speculation={"drafter": "x"}), 400, "there is no drafter 'x'"),
    "no such option of speculation": (chat(speculation={"x": 1}), 400, "speculation.x"),
    # Wrong types
    "a number as messages": (chat(messages=5), 400, "messages"),
    "a text as max_tokens": (chat(max_tokens="many"), 400, "max_tokens"),
    "a part of a token": (chat(max_tokens=1.5), 400, "max_tokens"),
    "a list as temperature": (chat(temperature=[1]), 400, "temperature"),
    "a number as stop": (text(stop=5), 400, "stop"),
    "words as logit_bias": (text(logit_bias={"the": 1}), 400, "logit_bias"),
    "an object as prompt": (text(prompt={"a": 1}), 400, "prompt"),
    "a mixed prompt": (text(prompt=["a", 1]), 400, "prompt"),
    "a number as metadata": (chat(metadata={"a": 1}), 400, "metadata"),
    # Out of range
    "not a number": (raw('{"prompt": "a", "temperature": NaN}', url=TEXT), 400, "temperature"),
    "infinity": (raw('{"prompt": "a", "temperature": Infinity}', url=TEXT), 400, "temperature"),
    "negative temperature": (chat(temperature=-1), 400, "temperature"),
    "no tokens wanted": (chat(max_tokens=0), 400, "max_tokens"),
    "more than the model takes": (chat(max_tokens=10**6), 400, "max_tokens is 1000000"),
    "a huge integer": (chat(max_tokens=10**30), 400, "max_tokens"),
    "a seed beyond 64 bits": (chat(seed=2**70), 400, "seed"),
    "no choices": (chat(n=0), 400, "n"),
    "too many choices": (chat(n=1000), 400, "n"),
    "too many answers": (text(prompt=["a"] * 100, n=2), 400, "100 prompts with n 2"),
    "a token beyond the vocabulary": (text(prompt=[10**6]), 400, "token id 1000000"),
    "a negative token": (text(prompt=[-1]), 400, "token id -1"),
    "too many stops": (text(stop=["a"] * 17), 400, "stop has 17"),
    "a long stop": (text(stop="a" * 300), 400, "300 characters"),
    "an empty stop": (text(stop=""), 400, "0 characters"),
    "nothing to draw from": (text(top_p=0), 400, "top_p"),
    "too many log-probabilities": (text(logprobs=21), 400, "logprobs"),
    # What does not go together
    "no messages": (chat(messages=[]), 400, "messages"),
    "no prompt": ({"url": TEXT, "json": {}}, 400, "prompt"),
    "an empty prompt": (text(prompt=""), 400, "no tokens"),
    "one empty prompt of two": (text(prompt=["a", ""]), 400, "no tokens"),
    "a prompt as long as the model": (text(prompt="a b " * 300), 400, "the model's length is 512"),
    "options of no stream": (chat(stream_options={"include_usage": True}), 400, "stream: true"),
    "alternatives of nothing": (chat(top_logprobs=2), 400, "logprobs: true"),
    "min above max": (chat(min_tokens=5), 400, "min_tokens"),
    "another law without consent": (
        chat(temperature=1, speculation={"verification": "typical"}),
        400,
        "lossy",
    ),
}

EXTREME: dict[str, dict[str, Any]] = {
    "every choice there may be": text(prompt=["a"] * 64, n=2),
    "the longest prompt": text(prompt=[65] * 510, max_tokens=1),
    "the most biases and log-probabilities": text(
        logit_bias={str(token): -100 for token in range(200)}, logprobs=20
    ),
    "every stop there may be": text(stop=[chr(0x4E00 + i) * 256 for i in range(16)]),
    "the longest name": chat(user="u" * 10_000, metadata={"k" * 1000: "v" * 10_000}),
    "all that may be null": chat(
        temperature=None, stop=None, tools=None, response_format=None, speculation=None, n=None
    ),
    "outer values": chat(temperature=2, top_p=1e-9, seed=-(2**63), frequency_penalty=-2, top_k=1),
    "many drafted tokens": chat(speculation={"max_draft_tokens": 256}),
}


async def test_each_is_answered_and_its_neighbour_is_not_disturbed() -> None:
    asked = {"messages": [HI], "max_tokens": 60, "temperature": 1, "seed": 3, "logprobs": True}
    async with harness(tiny.llama(), LookupDrafter(), patient=False) as h:
        workers = Workers("tiny", h.targets, (h.drafts.draft_pool,))  # type: ignore[arg-type]
        thresholds = CoordinatorThresholds(max_body_bytes=BODY_LIMIT)
        async with front_door(workers, thresholds) as client:
            alone = (await client.post(CHAT, json=asked)).json()

            async def in_flight() -> httpx.Response:
                return await client.post(CHAT, json={**asked, "speculation": {"enabled": True}})

            wrong = []
            for name, (request, status, named) in REFUSED.items():
                neighbour = asyncio.create_task(in_flight())
                await asyncio.sleep(0)
                answer = await client.post(**request)
                error = answer.json().get("error", {})
                right = error.get("type") == "invalid_request_error" and named in error["message"]
                if answer.status_code != status or not right:
                    wrong.append((name, answer.status_code, answer.text))
                assert (await neighbour).json()["choices"] == alone["choices"], name
            for name, request in EXTREME.items():
                neighbour = asyncio.create_task(in_flight())
                answer = await client.post(**request)
                if answer.status_code != 200:
                    wrong.append((name, answer.status_code, answer.text))
                assert (await neighbour).json()["choices"] == alone["choices"], name
        assert not wrong
        assert len(REFUSED) + len(EXTREME) >= 40
        await h.idle()


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_other_methods(method: str) -> None:
    async with harness(tiny.llama(), LookupDrafter(), patient=False) as h:
        workers = Workers("tiny", h.targets, ())  # type: ignore[arg-type]
        async with front_door(workers, CoordinatorThresholds()) as client:
            answer = await client.request(method, CHAT)
            assert answer.status_code == 405
            assert "Method Not Allowed" in answer.json()["error"]["message"]
