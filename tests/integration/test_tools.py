"""OpenAI's own clients: answers with a structure that they parse, and calls of tools, streamed and not."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from tests import tiny
from tests.harness import harness, http_client, served
from workers.draft.drafters.lookup import LookupDrafter

TEMPLATE = Path(__file__).parents[2] / "docs" / "chatml_tools.jinja"
HELLO = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
tokenizer = tiny.byte_level_tokenizer()


class Cat(pydantic.BaseModel):
    """What the parse helpers make a schema of."""

    name: Literal["Tom", "Felix"]
    lives: int = pydantic.Field(ge=0, le=9)


class GetWeather(pydantic.BaseModel):
    """A tool of the parse helpers."""

    city: Literal["Rome", "Paris"]


@pytest.fixture
async def client(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def address() -> AsyncIterator[str]:
    options = {"chat_template": str(TEMPLATE), "tool_call_parser": "hermes"}
    folder = tiny.llama(max_position_embeddings=4096)
    async with harness(folder, LookupDrafter(), patient=False, **options) as h:
        async with served(h) as made:
            yield made
        await h.idle()


def options(**more: Any) -> Any:
    return {
        "model": "tiny",
        "messages": HELLO,
        "temperature": 1,
        "seed": 5,
        "max_tokens": 200,
        **more,
    }


def check_weather(call: Any) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")


async def test_the_synchronous_client(address: str) -> None:
    def use() -> None:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0)
        parsed = client.chat.completions.parse(**options(response_format=Cat))
        assert isinstance(parsed.choices[0].message.parsed, Cat)
        form: Any = {"type": "json_object"}
        free = client.chat.completions.create(**options(response_format=form))
        assert str(free.choices[0].message.content).startswith("{")
        called = client.chat.completions.create(
            **options(tools=[WEATHER, CLOCK], tool_choice=NAMED)
        )
        choice = called.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        check_weather(call)
        tool = openai.pydantic_function_tool(GetWeather)
        asked = options(tools=[tool], tool_choice="required", parallel_tool_calls=False)
        (parsed_call,) = client.chat.completions.parse(**asked).choices[0].message.tool_calls or ()
        assert isinstance(parsed_call.function.parsed_arguments, GetWeather)
        # What was called and said goes back, and the conversation goes on.
        turns = [
            *HELLO,
            choice.message.model_dump(include={"role", "content", "tool_calls"}),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        after = client.chat.completions.create(**options(messages=turns, tools=[WEATHER], n=2))
        assert len(after.choices) == 2

    await asyncio.to_thread(use)


async def test_the_asynchronous_client_and_streams(client: openai.AsyncOpenAI) -> None:
    parsed = await client.chat.completions.parse(**options(response_format=Cat))
    assert isinstance(parsed.choices[0].message.parsed, Cat)
    async with client.chat.completions.stream(**options(response_format=Cat)) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
    tool = openai.pydantic_function_tool(GetWeather)
    asked = options(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    async with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_streamed_calls_are_those_that_are_not(
    client: openai.AsyncOpenAI, choice: Any
) -> None:
    """Index, id and name come first, then the arguments in fragments; drafts change nothing."""
    for seed in range(4):
        asked = options(tools=[WEATHER, CLOCK], tool_choice=choice, seed=seed)
        whole = (await client.chat.completions.create(**asked)).choices[0]
        off = {"speculation": {"enabled": False}}
        calls: dict[int, list[str]] = {}
        ids: dict[int, str] = {}
        reasons = []
        async for chunk in await client.chat.completions.create(
            **asked, stream=True, extra_body=off
        ):
            (part,) = chunk.choices
            assert not part.delta.content
            reasons.append(part.finish_reason)
            for call in part.delta.tool_calls or ():
                if call.id is not None:
                    ids[call.index] = call.id
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments
        assert whole.message.tool_calls
        assert len(set(ids.values())) == len(whole.message.tool_calls)
        assert list(calls.values()) == [
            [call.function.name, call.function.arguments] for call in whole.message.tool_calls
        ]
        assert reasons[-1] == whole.finish_reason
        assert set(reasons[:-1]) <= {None}
        if choice is NAMED:
            assert len(calls) == 1
            check_weather(whole.message.tool_calls[0])


async def test_what_is_asked_of_calls(address: str) -> None:
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:

        async def ask(**more: Any) -> dict[str, Any]:
            body = options(tools=[WEATHER, CLOCK], return_token_ids=True, **more)
            response = await client.post("/chat/completions", json=body)
            assert response.status_code == 200, response.text
            choice: dict[str, Any] = response.json()["choices"][0]
            choice["prompt"] = tokenizer.decode(choice["prompt_token_ids"])
            return choice

        for several in (True, False):
            one = await ask(tool_choice="required", parallel_tool_calls=several, max_tokens=400)
            assert several or len(one["message"]["tool_calls"]) == 1
        none = await ask(tool_choice="none")
        assert "get_weather" not in none["prompt"]
        assert "tool_calls" not in none["message"]
        free = await ask()
        assert '<tools>\n{"type": "function", "function": {"name": "get_weather"' in free["prompt"]
        assert free["message"]["content"]
        assert free["token_ids"] == (await ask(tool_choice="auto"))["token_ids"]
        strict = {"type": "function", "function": {"name": "clock", "strict": True}}
        bound = await client.post("/chat/completions", json=options(tools=[strict]))
        assert bound.status_code == 200
        short = await ask(tool_choice="required", max_tokens=45)
        assert short["finish_reason"] == "length"
        assert short["message"]["tool_calls"][0]["function"]["name"]
        turns = [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "clock", "arguments": '{"zone": "é"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "noon"},
        ]
        told = await ask(messages=turns)
        assert (
            '<|im_start|>assistant\n<tool_call>\n{"name": "clock", "arguments": {"zone": "é"}}\n'
            "</tool_call><|im_end|>\n"
            "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        ) in told["prompt"]


BAD_SCHEMA = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "x"}}}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tools": [{"type": "web"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [CLOCK, CLOCK]}, "names must differ"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": NAMED}, "there is clock"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": BAD_SCHEMA}], "tool_choice": "required"},
            "tools.0.function.parameters of f cannot be compiled: at /properties/a",
        ),
        ({"tools": [CLOCK], "response_format": {"type": "json_object"}}, "tool_choice: none"),
        ({"tools": [CLOCK], "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "tool_calls"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
)
async def test_refusals(address: str, change: dict[str, Any], named: str) -> None:
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        response = await client.post("/chat/completions", json=options(**change))
        assert response.status_code == 400, response.text
        assert named in response.json()["error"]["message"]


async def test_a_template_without_tools_refuses_by_name() -> None:
    for more, named in (
        ({}, "set target.chat_template"),
        ({"chat_template": str(TEMPLATE)}, "set target.tool_call_parser"),
    ):
        async with (
            harness(tiny.llama(), LookupDrafter(), patient=False, **more) as h,
            http_client(h) as client,
        ):
            for choice in ("auto", "required"):
                body = options(tools=[CLOCK], tool_choice=choice)
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 400
                assert named in response.json()["error"]["message"]
            # Nothing is asked of the template where none may be called.
            body = options(tools=[CLOCK], tool_choice="none", max_tokens=5)
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
