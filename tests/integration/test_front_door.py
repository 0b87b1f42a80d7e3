"""What clients of OpenAI's and vLLM's send besides parameters: forms of messages, tokens, other origins."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import CoordinatorThresholds
from deployments.coordinator import Coordinator, Workers
from deployments.openai.routes import make_app
from deployments.openai.schema import ChatMessage
from tests import tiny
from tests.harness import front_door, harness, http_client, no_metrics
from workers.draft.drafters.lookup import LookupDrafter

tokenizer = tiny.byte_level_tokenizer()
EOS = tokenizer.eos_token_id
CHAT = "/v1/chat/completions"
LETTERS = {str(token): 100 for token in range(64, 90)}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with harness(tiny.llama(), LookupDrafter(), patient=False) as h, http_client(h) as made:
        yield made


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refused(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def rendered(client: httpx.AsyncClient, *messages: dict[str, Any]) -> str:
    answer = await post(client, "/tokenize", messages=messages)
    return str(tokenizer.decode(answer["tokens"]))


async def test_every_form_of_message(client: httpx.AsyncClient) -> None:
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    asked = {"role": "user", "content": "hi"}
    for messages, shown in (
        ([{"role": "user", "content": parts("a", "b")}], "user:ab\n"),
        ([{"role": "developer", "content": "be brief"}, asked], "system:be brief\nuser:hi\n"),
        ([{"role": "system", "content": parts("be brief")}, asked], "system:be brief\nuser:hi\n"),
        ([asked, {"role": "assistant", "content": "yes", "refusal": None}], "assistant:yes\n"),
        ([asked, {"role": "assistant", "content": None, "refusal": "no"}], "assistant:no\n"),
        ([asked, {"role": "assistant", "refusal": "no", "audio": None}], "assistant:no\n"),
        ([asked, {"role": "assistant", "content": None}], "assistant:\n"),
        (
            [asked, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            "assistant:no\n",
        ),
        ([asked, {"role": "assistant", "content": "a", "annotations": []}], "assistant:a\n"),
        ([{"role": "user", "content": "hi", "name": "Ada"}], "user:hi\n"),
    ):
        assert (await rendered(client, *messages)).endswith(shown + "assistant:")


@pytest.mark.parametrize(
    ("message", "param", "named"),
    [
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content.0", "image_url"),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
            "content.1",
            "input_audio",
        ),
        ({"content": [{"type": "file", "file": {}}]}, "content.0", "file"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "", "cannot refuse"),
        ({"content": [{"type": "text"}]}, "content.0.text", "required"),
        ({"content": [{"text": "a"}]}, "content.0.type", "required"),
        ({"content": [5]}, "content.0", "must be a JSON object"),
        ({"content": 5}, "content", "string"),
        ({"content": None}, "", "needs a content"),
        ({}, "", "needs a content"),
        ({"content": "a", "refusal": "no"}, "", "cannot refuse"),
        ({"content": "a", "audio": {"id": "x"}}, "", "audio is not supported"),
        ({"content": "a", "function_call": {}}, "", "function_call is not supported"),
        ({"content": "a", "nickname": "x"}, "nickname", "unknown parameter"),
        ({"role": "narrator", "content": "a"}, "role", "'assistant'"),
    ],
)
async def test_other_messages_are_refused_by_name(
    client: httpx.AsyncClient, message: dict[str, Any], param: str, named: str
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "user", **message}]
    error = await refused(client, CHAT, messages=messages)
    assert named in error["message"]
    assert error["param"] == f"messages.1.{param}".rstrip(".")


def test_names_reach_the_template() -> None:
    named = ChatMessage.model_validate({"role": "user", "content": "hi", "name": "Ada"})
    assert named.rendered() == {"role": "user", "content": "hi", "name": "Ada"}


async def test_tokens_there_and_back(client: httpx.AsyncClient) -> None:
    text = "the cät in the hat"
    made = await post(client, "/tokenize", prompt=text, return_token_strs=True)
    assert made["tokens"] == tokenizer(text).input_ids
    assert made["count"] == len(made["tokens"])
    assert made["max_model_len"] == 512
    assert made["token_strs"] == tokenizer.convert_ids_to_tokens(made["tokens"])
    assert (await post(client, "/detokenize", tokens=made["tokens"])) == {"prompt": text}
    assert (await post(client, "/tokenize", prompt=text))["token_strs"] is None
    # What is counted is what a chat takes.
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]
    for options in (
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        counted = await post(client, "/tokenize", messages=messages, **options)
        answer = await post(
            client, CHAT, messages=messages, max_tokens=1, return_token_ids=True, **options
        )
        assert answer["choices"][0]["prompt_token_ids"] == counted["tokens"]
        assert answer["usage"]["prompt_tokens"] == counted["count"]


async def test_tokens_of_other_requests(client: httpx.AsyncClient) -> None:
    for body, named in (
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "either"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt needs messages"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "more": 1}, "more"),
        ({"messages": []}, "messages"),
    ):
        assert named in (await refused(client, "/tokenize", **body))["message"]
    for body, named in (
        ({"tokens": [10**6]}, "1000000"),
        ({"tokens": [-1]}, "-1"),
        ({"tokens": "a"}, "tokens"),
        ({}, "tokens"),
    ):
        assert named in (await refused(client, "/detokenize", **body))["message"]
    unknown = await client.post("/tokenize", json={"prompt": "a", "model": "other"})
    assert unknown.status_code == 404
    assert await post(client, "/tokenize", prompt="") == {
        "count": 0,
        "max_model_len": 512,
        "tokens": [],
        "token_strs": None,
    }
    assert await post(client, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_choices_of_a_stream_come_side_by_side(client: httpx.AsyncClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 24,
        "temperature": 1,
        "seed": 2,
        "n": 3,
        "logit_bias": LETTERS,
        "logprobs": True,
    }
    whole = await post(client, CHAT, **body)
    response = await client.post(CHAT, json={**body, "stream": True})
    texts, reasons, roles, logprobs = {}, {}, [], {i: [] for i in range(3)}
    order = []
    for event in response.text.split("\n\n")[:-2]:
        (choice,) = json.loads(event[6:])["choices"]
        index = choice["index"]
        order.append(index)
        if "role" in choice["delta"]:
            roles.append(index)
        texts[index] = texts.get(index, "") + choice["delta"]["content"]
        if choice.get("logprobs"):
            logprobs[index] += choice["logprobs"]["content"]
        if choice["finish_reason"]:
            assert index not in reasons
            reasons[index] = choice["finish_reason"]
    assert roles == [0, 1, 2]
    for choice in whole["choices"]:
        index = choice["index"]
        assert texts[index] == choice["message"]["content"]
        assert reasons[index] == choice["finish_reason"]
        assert logprobs[index] == choice["logprobs"]["content"]
    assert len(set(texts.values())) == 3
    # Not one after the other: the last begins before the first has ended.
    last_of_first = max(place for place, index in enumerate(order) if index == 0)
    first_of_last = order.index(2, 3)
    assert first_of_last < last_of_first


async def test_pages_of_allowed_origins_may_call() -> None:
    ours, theirs = "https://chat.example.org", "https://elsewhere.example.org"
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with harness(tiny.llama(), LookupDrafter(), patient=False) as h:
        workers = Workers("tiny", h.targets, ())  # type: ignore[arg-type]

        async def allowed(origin: str, *origins: str) -> tuple[int, str | None, str | None]:
            async with front_door(
                workers, CoordinatorThresholds(allowed_origins=origins)
            ) as client:
                asked = await client.options(CHAT, headers={"origin": origin, **preflight})
                refusal = await client.post(CHAT, json={}, headers={"origin": origin})
                assert refusal.status_code == 400
                return (
                    asked.status_code,
                    asked.headers.get("access-control-allow-origin"),
                    # A page can read errors, too.
                    refusal.headers.get("access-control-allow-origin"),
                )

        assert await allowed(ours, ours) == (200, ours, ours)
        assert await allowed(theirs, ours) == (400, None, None)
        assert await allowed(theirs, "*") == (200, "*", "*")
        assert await allowed(ours) == (405, None, None)


async def test_the_application_starts_before_there_is_a_coordinator() -> None:
    def none_yet() -> Coordinator:
        raise AssertionError("Serve starts the application first")

    said = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: Any) -> None:
        said.append(message["type"])

    app = make_app(none_yet, no_metrics)
    await app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_keys_guard_tokens_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: [{{id: a, sha256: {hashlib.sha256(b'secret').hexdigest()}}}]\n")
    async with harness(tiny.llama(), LookupDrafter(), patient=False) as h:
        workers = Workers("tiny", h.targets, ())  # type: ignore[arg-type]
        thresholds = CoordinatorThresholds(api_keys_file=str(file), allowed_origins=("*",))
        async with front_door(workers, thresholds) as client:
            for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [64]})):
                assert (await client.post(path, json=body)).status_code == 401
                key = {"authorization": "Bearer secret"}
                assert (await client.post(path, json=body, headers=key)).status_code == 200
            # A browser asks without a key whether it may call.
            preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
            assert (await client.options(CHAT, headers=preflight)).status_code == 200
