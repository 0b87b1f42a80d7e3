"""The OpenAPI document is true: real answers, streams and errors are what it says, and nothing else."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests import tiny
from tests.harness import harness, http_client
from tests.integration.test_tools import TEMPLATE, WEATHER
from workers.draft.drafters.lookup import LookupDrafter

CHAT = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 8}
TEXT = {"prompt": "the cat in the", "max_tokens": 8}
CALLS = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
SENT = {"prediction": {"type": "content", "content": "hello"}}
EVERYTHING = {
    "return_token_ids": True,
    "prompt_logprobs": 1,
    "n": 2,
    "speculation": {"stats": True, "rounds": True},
}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class Document:
    """The document of a server, and whether something is as it says."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def schema_of(self, response: httpx.Response) -> dict[str, Any]:
        """The schema of an answer, by its route, status and content type."""
        request = response.request
        described = self.content["paths"][request.url.path][request.method.lower()]["responses"]
        status = str(response.status_code)
        one = described.get(status) or described[f"{status[0]}XX"]
        schema: dict[str, Any] = one["content"][response.headers["content-type"].split(";")[0]]
        return schema["schema"]

    def check(self, item: Any, schema: dict[str, Any]) -> None:
        jsonschema.validate(item, {**schema, "components": self.content["components"]})

    def check_answer(self, response: httpx.Response) -> None:
        """An answer, or every event of a stream."""
        schema = self.schema_of(response)
        if response.headers["content-type"].startswith("text/event-stream"):
            events = [line[6:] for line in response.text.split("\n\n") if line]
            assert events[-1] == "[DONE]"
            for event in events[:-1]:
                self.check(json.loads(event), schema)
        else:
            self.check(response.json(), schema)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    options = {"chat_template": str(TEMPLATE), "tool_call_parser": "hermes"}
    folder = tiny.llama(max_position_embeddings=4096)
    async with (
        harness(folder, LookupDrafter(), patient=False, **options) as h,
        http_client(h) as made,
    ):
        yield made


async def document(client: httpx.AsyncClient) -> Document:
    return Document((await client.get("/openapi.json")).json())


async def test_answers_and_streams_are_what_it_says(client: httpx.AsyncClient) -> None:
    described = await document(client)
    for path, body, more in (
        ("/v1/chat/completions", CHAT, [SENT, CALLS, {"logprobs": True, "top_logprobs": 2}]),
        ("/v1/completions", TEXT, [{"logprobs": 2, "echo": True}, {"prompt": ["a", "b"]}]),
    ):
        for options in ({}, EVERYTHING, {"stop": ["e"]}, *more):
            for stream in ({}, {"stream": True}, {"stream": True, **USAGE}):
                response = await client.post(path, json={**body, **options, **stream})
                assert response.status_code == 200, response.text
                described.check_answer(response)
    for path in ("/health", "/v1/models", "/v1/pools"):
        described.check_answer(await client.get(path))
    described.check_answer(await client.post("/tokenize", json={"prompt": "hi"}))
    described.check_answer(await client.post("/detokenize", json={"tokens": [64, 65]}))


async def test_errors_are_what_it_says(client: httpx.AsyncClient) -> None:
    described = await document(client)
    for path, body, status in (
        ("/v1/chat/completions", {}, 400),
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404),
        ("/v1/completions", {**TEXT, "logit_bias": {"70000": 1}}, 400),
        ("/tokenize", {}, 400),
        ("/detokenize", {"tokens": [10**9]}, 400),
    ):
        response = await client.post(path, json=body)
        assert response.status_code == status
        described.check_answer(response)


async def test_it_would_notice(client: httpx.AsyncClient) -> None:
    described = await document(client)
    response = await client.post("/v1/chat/completions", json=CHAT)
    answer, schema = response.json(), described.schema_of(response)
    for change in ({"more": 1}, {"object": "x"}, {"usage": None}, {"choices": [{}]}):
        with pytest.raises(jsonschema.ValidationError):
            described.check({**answer, **change}, schema)


async def test_requests_are_described(client: httpx.AsyncClient) -> None:
    """What is sent here is what the document allows, and every route has its body and its errors."""
    described = await document(client)
    for path, body in (
        ("/v1/chat/completions", {**CHAT, **SENT, **CALLS, **EVERYTHING}),
        ("/v1/completions", {**TEXT, **EVERYTHING}),
        ("/tokenize", {"messages": CHAT["messages"]}),
    ):
        operation = described.content["paths"][path]["post"]
        described.check(body, operation["requestBody"]["content"]["application/json"]["schema"])
        assert {"200", "4XX", "5XX"} == set(operation["responses"])
