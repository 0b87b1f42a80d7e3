"""The HTTP front door over real workers, without Ray: every parameter reaches the answer."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from deployments.config import CoordinatorThresholds
from deployments.coordinator import Workers
from tests import tiny
from tests.harness import front_door, harness, http_client
from tests.structures import CHOICES, GBNF, LARK, REGEX, SCHEMA, STRUCTURES
from workers.draft.drafters.lookup import LookupDrafter

tokenizer = tiny.byte_level_tokenizer()
EOS = tokenizer.eos_token_id
CHAT = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 12}
TEXT = {"prompt": "the cat in the", "max_tokens": 12}


@pytest.fixture
async def client():
    async with harness(tiny.llama(), LookupDrafter(), patient=False) as h:
        async with http_client(h) as made:
            yield made
        await h.idle()


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    body = {"temperature": 0, "return_token_ids": True, **body}
    response = await client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    return await post(client, "completions", {**TEXT, **body})


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    return await post(client, "chat/completions", {**CHAT, **body})


async def refused(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    response = await client.post(f"/v1/{path}", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return str(error["message"])


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict]:
    response = await client.post(f"/v1/{path}", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    events = [line[6:] for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


CHANGES: dict[str, Any] = {
    "presence_penalty": 2,
    "frequency_penalty": 2,
    "repetition_penalty": 1.5,
    "logit_bias": {"65": 100},
    "stop_token_ids": list(range(256)),
    "seed": 9,
    "top_k": 2,
    "top_p": 0.3,
    "min_p": 0.5,
    "n": 2,
    "max_tokens": 3,
    "truncate_prompt_tokens": 3,
}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_no_parameter_is_ignored(client: httpx.AsyncClient, path: str) -> None:
    """Kind (d): each changes the answer of a request that it should change."""
    base = {**(TEXT if path == "completions" else CHAT), "max_tokens": 40}
    for name, value in CHANGES.items():
        drawn = {"temperature": 1, "seed": 1} if name in ("seed", "top_k", "top_p", "min_p") else {}
        plain = await post(client, path, {**base, **drawn})
        changed = await post(client, path, {**base, **drawn, name: value})
        assert plain["choices"] != changed["choices"], name


async def test_n_answers_share_a_prompt(client: httpx.AsyncClient) -> None:
    four = await complete(client, n=4, temperature=1, seed=3)
    texts = [choice["token_ids"] for choice in four["choices"]]
    assert [choice["index"] for choice in four["choices"]] == [0, 1, 2, 3]
    assert len({tuple(text) for text in texts}) == 4
    one = await complete(client, temperature=1, seed=3)
    assert one["choices"][0]["token_ids"] == texts[0]
    assert four["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert four["usage"]["completion_tokens"] == sum(map(len, texts))
    both = await complete(client, prompt=["the cat in the", "x"], n=2, temperature=1, seed=3)
    assert [c["token_ids"] for c in both["choices"][:2]] == texts[:2]
    assert [c["index"] for c in both["choices"]] == [0, 1, 2, 3]
    streamed: dict[int, str] = dict.fromkeys(range(4), "")
    for chunk in await stream(client, "completions", {**TEXT, "n": 4, "temperature": 1, "seed": 3}):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert list(streamed.values()) == [choice["text"] for choice in four["choices"]]
    unseeded = await complete(client, n=3, temperature=1)
    assert len({tuple(c["token_ids"]) for c in unseeded["choices"]}) == 3
    message = await refused(client, "completions", {**TEXT, "prompt": ["a"] * 60, "n": 3})
    assert "180" in message or "128" in message


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_usage_grows_with_every_chunk_if_asked_for(
    client: httpx.AsyncClient, path: str
) -> None:
    asked = {"include_usage": True, "continuous_usage_stats": True}
    body = {**(TEXT if path == "completions" else CHAT), "n": 2, "return_token_ids": True}
    *chunks, last = await stream(client, path, {**body, "stream_options": asked})
    seen = {0: 0, 1: 0}
    for chunk in chunks:
        choice = chunk["choices"][0]
        seen[choice["index"]] += len(choice.get("token_ids", ()))
        assert chunk["usage"]["completion_tokens"] == seen[choice["index"]]
        assert chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == sum(seen.values())
    alone = {**body, "stream_options": {"continuous_usage_stats": True}}
    assert not any("usage" in chunk for chunk in await stream(client, path, alone))


async def test_echo_and_prompt_logprobs(client: httpx.AsyncClient) -> None:
    plain = await complete(client, logprobs=2)
    echoed = await complete(client, logprobs=2, echo=True)
    text = plain["choices"][0]["text"]
    assert echoed["choices"][0]["text"] == TEXT["prompt"] + text
    logprobs = echoed["choices"][0]["logprobs"]
    prompt = echoed["choices"][0]["prompt_token_ids"]
    count = len(prompt) + len(plain["choices"][0]["token_ids"])
    assert all(len(logprobs[name]) == count for name in logprobs)
    assert logprobs["token_logprobs"][0] is None
    assert (
        logprobs["token_logprobs"][len(prompt) :]
        == plain["choices"][0]["logprobs"]["token_logprobs"]
    )
    model = AutoModelForCausalLM.from_pretrained(tiny.llama(), dtype=torch.float32)
    with torch.inference_mode():
        rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for position in range(1, len(prompt)):
        expected = rows[position - 1, prompt[position]].item()
        assert logprobs["token_logprobs"][position] == pytest.approx(expected, abs=0.3)  # bfloat16
    scored = await complete(client, logprobs=1, echo=True, max_tokens=0)
    assert scored["choices"][0]["text"] == TEXT["prompt"]
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["choices"][0]["finish_reason"] == "length"
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(prompt)
    assert "echo" in await refused(client, "completions", {**TEXT, "max_tokens": 0})
    listed = await complete(client, prompt_logprobs=1)
    entries = listed["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(prompt)
    entry = entries[1][str(prompt[1])]
    assert entry["logprob"] == pytest.approx(logprobs["token_logprobs"][1])
    assert entry["rank"] >= 1
    chunks = await stream(
        client, "completions", {**TEXT, "temperature": 0, "echo": True, "logprobs": 2}
    )
    assert "".join(c["choices"][0]["text"] for c in chunks) == TEXT["prompt"] + text
    offsets = [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == logprobs["text_offset"]


async def test_chat_rendering(client: httpx.AsyncClient) -> None:
    async def prompt_of(**body: Any) -> str:
        answer = await chat(client, **body)
        return str(tokenizer.decode(answer["choices"][0]["prompt_token_ids"]))

    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Sure, here "},
    ]
    assert (await prompt_of(messages=turns)).endswith("Sure, here \nassistant:")
    assert (await prompt_of(messages=turns, add_generation_prompt=False)).endswith("Sure, here \n")
    goes_on = await prompt_of(
        messages=turns, add_generation_prompt=False, continue_final_message=True
    )
    assert goes_on.endswith("assistant:Sure, here ")
    message = await refused(
        client, "chat/completions", {"messages": turns, "continue_final_message": True}
    )
    assert "add_generation_prompt" in message
    developer = await prompt_of(messages=[{"role": "developer", "content": "be brief"}])
    assert developer.startswith("system:be brief")


async def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.llama(), folder)
    template = "{% if thinking %}THINK{% endif %}{{ messages[0]['content'] }}"
    (folder / "chat_template.jinja").write_text(template)
    async with (
        harness(folder, LookupDrafter(), patient=False) as h,
        http_client(h) as client,
    ):
        plain = await chat(client)
        asked = await chat(client, chat_template_kwargs={"thinking": True})
        plain_prompt, asked_prompt = (
            tokenizer.decode(answer["choices"][0]["prompt_token_ids"]) for answer in (plain, asked)
        )
        assert asked_prompt == "THINK" + plain_prompt


async def test_the_models_own_defaults_hold_until_the_request_says_otherwise(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.llama(), folder)
    recommended = {
        "do_sample": True,
        "temperature": 0.4,
        "top_k": 3,
        "repetition_penalty": 1.2,
        "max_new_tokens": 7,
        "eos_token_id": [EOS, 65, 66],
    }
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    body = {"messages": CHAT["messages"], "seed": 5, "return_token_ids": True}
    async with harness(tiny.llama(), LookupDrafter()) as h, http_client(h) as client:
        given = {"temperature": 0.4, "top_k": 3, "repetition_penalty": 1.2, "max_tokens": 7}
        expected = (await client.post("/v1/chat/completions", json={**body, **given})).json()
    async with harness(folder, LookupDrafter()) as h, http_client(h) as client:
        silent = (await client.post("/v1/chat/completions", json=body)).json()
        assert silent["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        assert len(silent["choices"][0]["token_ids"]) == 7
        other = {"temperature": 1, "top_k": -1, "max_tokens": 30, "repetition_penalty": 1}
        spoken = (await client.post("/v1/chat/completions", json={**body, **other})).json()
        assert spoken["choices"][0]["token_ids"][:7] != silent["choices"][0]["token_ids"]
        # Each of a list of end tokens ends the answer.
        for token in (EOS, 65, 66):
            ended = await complete(client, logit_bias={str(token): 100})
            assert ended["choices"][0]["token_ids"] == [token]
            assert ended["choices"][0]["stop_reason"] == token


async def test_special_tokens_and_stops_in_the_text(client: httpx.AsyncClient) -> None:
    bias = {"logit_bias": {str(EOS): 100}}
    hidden = await complete(client, ignore_eos=True, max_tokens=3, **bias)
    shown = await complete(client, ignore_eos=True, max_tokens=3, skip_special_tokens=False, **bias)
    assert hidden["choices"][0]["text"] == ""
    assert shown["choices"][0]["text"] == tiny.EOS * 3
    kept = await complete(
        client, include_stop_str_in_output=True, skip_special_tokens=False, **bias
    )
    assert kept["choices"][0]["text"] == tiny.EOS
    waited = await complete(client, min_tokens=5, **bias)
    assert len(waited["choices"][0]["token_ids"]) == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"70000": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 0 for i in range(200)}, "n": 0}, "n"),
        ({"min_tokens": 50}, "min_tokens"),
        ({"n": 129}, "n"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"priority": 3}, "scheduling_policy"),
        ({"prompt_logprobs": 99}, "prompt_logprobs"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"best_of": 2}, "best_of"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
async def test_refusals(client: httpx.AsyncClient, change: dict[str, Any], named: str) -> None:
    for path, body in (("completions", TEXT), ("chat/completions", CHAT)):
        assert named in await refused(client, path, {**body, **change})


async def test_priority_where_the_target_schedules_by_it() -> None:
    policy = {"scheduling_policy": "priority"}
    async with harness(tiny.llama(), LookupDrafter(), **policy) as h, http_client(h) as c:
        await complete(c, priority=-3)


async def test_truncation_keeps_the_end(client: httpx.AsyncClient) -> None:
    short = await complete(client, prompt="in the", truncate_prompt_tokens=2)
    long = await complete(client, prompt="the cat in the", truncate_prompt_tokens=2)
    assert long["choices"][0]["prompt_token_ids"] == short["choices"][0]["prompt_token_ids"]
    whole = await complete(client, prompt="x" * 2000, truncate_prompt_tokens=-1, max_tokens=1)
    assert len(whole["choices"][0]["prompt_token_ids"]) == 511


class Late:
    """A pool whose workers come when `there` is set."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.there = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lease(self, *arguments: Any) -> AsyncIterator[Any]:
        await self.there.wait()
        async with self._pool.lease(*arguments) as lease:
            yield lease


async def test_a_front_that_knows_no_target_yet_waits_for_one() -> None:
    """As long as an answer waits for another; `/health` says so at once."""
    async with harness(tiny.llama(), LookupDrafter(), patient=False) as h:
        pool: Any = Late(h.targets)
        workers = Workers("tiny", pool, ())
        async with front_door(workers, CoordinatorThresholds(failover_wait_s=0.2)) as client:
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/v1/models")).json()["data"] == []
            refused = await client.post("/v1/completions", json=TEXT)
            assert refused.status_code == 503
            assert "no target worker of 'tiny'" in refused.json()["error"]["message"]
            asking = asyncio.create_task(client.post("/v1/completions", json=TEXT))
            await asyncio.sleep(0.05)
            pool.there.set()
            assert (await asking).status_code == 200
            coordinator = (await asking).headers["x-slipstream-coordinator"]
            assert coordinator == (await client.get("/health")).headers["x-slipstream-coordinator"]


async def test_another_law_needs_consent(client: httpx.AsyncClient) -> None:
    body = {**TEXT, "temperature": 1.0, "speculation": {"verification": "typical"}}
    assert "set speculation.lossy" in await refused(client, "completions", body)
    body["speculation"] = {"verification": "typical", "lossy": True}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    body["speculation"] = {"verification": "exact"}
    assert "'coupled', 'rejection', 'block' or 'typical'" in await refused(
        client, "completions", body
    )


SHAPES: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_object"}}, None),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "cat", "schema": SCHEMA, "strict": True},
            }
        },
        STRUCTURES["json"][1],
    ),
    ({"structured_outputs": {"json": SCHEMA}}, STRUCTURES["json"][1]),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, STRUCTURES["json"][1]),
    ({"structured_outputs": {"regex": REGEX}}, STRUCTURES["regex"][1]),
    ({"structured_outputs": {"choice": CHOICES}}, STRUCTURES["choice"][1]),
    ({"structured_outputs": {"grammar": LARK}}, STRUCTURES["lark"][1]),
    ({"structured_outputs": {"grammar": GBNF}}, STRUCTURES["gbnf"][1]),
]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_structures(client: httpx.AsyncClient, path: str) -> None:
    for shape, fits in SHAPES:
        body = {**(TEXT if path == "completions" else CHAT), **shape, "max_tokens": 300}
        answer = await post(client, path, {**body, "temperature": 1, "seed": 3, "n": 2})
        texts = [
            choice["text"] if path == "completions" else choice["message"]["content"]
            for choice in answer["choices"]
        ]
        ended = [choice["finish_reason"] for choice in answer["choices"]]
        if fits is None:
            # Nothing bounds it: it may be cut.
            assert all(text.startswith("{") for text in texts)
            assert all(
                json.loads(t) is not None for t, e in zip(texts, ended, strict=True) if e == "stop"
            )
        else:
            assert ended == ["stop", "stop"]
            assert all(fits(text) for text in texts)
        cut = await post(client, path, {**body, "max_tokens": 2})
        assert cut["choices"][0]["finish_reason"] == "length"


async def test_200_schema_requests_at_16_at_once_all_parse(client: httpx.AsyncClient) -> None:
    at_once = asyncio.Semaphore(16)

    async def one(seed: int) -> None:
        async with at_once:
            shape = SHAPES[1 + seed % 2][0]
            options = {"max_tokens": 300, "temperature": seed % 2, "seed": seed}
            answer = await complete(client, **shape, **options)
            STRUCTURES["json"][1](answer["choices"][0]["text"])

    await asyncio.gather(*(one(seed) for seed in range(200)))


async def test_what_a_structure_gains_is_in_the_statistics(client: httpx.AsyncClient) -> None:
    body = {"structured_outputs": {"choice": ["a very long and certain answer"]}}
    answer = await complete(client, **body, max_tokens=100, speculation={"stats": True})
    assert "grammar" in answer["speculation"]["drafter"].split("+")
    assert answer["speculation"]["accepted_tokens"] > 15
    off = {"stats": True, "enabled": False}
    plain = await complete(client, **body, max_tokens=100, speculation=off)
    assert plain["speculation"]["draft_tokens"] == 0
    assert plain["choices"] == answer["choices"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {
                "structured_outputs": {
                    "json": {"properties": {"a": {"type": "strng"}}, "type": "object"}
                }
            },
            "structured_outputs.json cannot be compiled: at /properties/a",
        ),
        ({"structured_outputs": {"json": "{"}}, "is not JSON"),
        ({"structured_outputs": {"json": "3"}}, "a JSON object"),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {"grammar": "start: b"}}, "b"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "exactly one of json, regex, choice, grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"$ref": "#/a"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "cannot both be given",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a"}, "structured_outputs: {regex: …}"),
        ({"guided_choice": ["a"]}, "structured_outputs: {choice: …}"),
    ],
)
async def test_structures_that_are_refused(
    client: httpx.AsyncClient, change: dict[str, Any], named: str
) -> None:
    for path, body in (("completions", TEXT), ("chat/completions", CHAT)):
        assert named in await refused(client, path, {**body, **change})
