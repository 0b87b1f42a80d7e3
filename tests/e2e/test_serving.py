"""The whole way with the real model: OpenAI's client and gRPC, drafted and verified apart."""

import asyncio
import contextlib
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import openai
import pytest

from loadtest.prompts_file import read
from loadtest.sameness import compare
from protos import inference_pb2 as pb
from tests.e2e.conftest import ROOT, Server

pytestmark = pytest.mark.e2e

REPEAT = (
    "Repeat this text word for word: The quick brown fox jumps over the lazy dog, and the lazy dog "
    "does not mind. The quick brown fox jumps over the lazy dog again, and again nobody minds."
)
QUESTIONS = [
    REPEAT,
    "What is the capital of France?",
    "Write one sentence about the sea. Then write the same sentence again.",
    "Translate to English: Der Hund schläft.",
    "List the numbers from one to ten in words.",
    "Who wrote Hamlet?",
    "Name three colours and why people like them.",
    "Count down from five.",
]


# Named drafters are always asked; left to itself the server may find that they do not pay.
BOTH = {"drafter": ["eagle", "lookup"]}


def ask(server: Server, prompt: str = REPEAT, **options: Any) -> dict[str, Any]:
    """One answer, with statistics, and the equation between them checked."""
    speculation = {"stats": True, **options.pop("speculation", {})}
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 48,
        "temperature": 0,
        "return_token_ids": True,
        "speculation": speculation,
        **options,
    }
    response = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    check_equation(answer)
    return answer


def check_equation(answer: dict[str, Any]) -> None:
    stats, reason = answer["speculation"], answer["choices"][0]["finish_reason"]
    completion = answer["usage"]["completion_tokens"]
    cut = 1 + stats["rounds"] + stats["accepted_tokens"] - completion
    assert cut == 0 or (cut == 1 and reason == "stop")
    assert completion == len(answer["choices"][0]["token_ids"])


def said(answer: dict[str, Any]) -> tuple[Any, ...]:
    choice = answer["choices"][0]
    return (
        choice["token_ids"],
        choice["message"]["content"],
        choice["finish_reason"],
        choice["logprobs"],
        answer["usage"],
    )


def test_the_page_and_its_pools(server: Server) -> None:
    ask(server)
    chat = httpx.get(server.http)
    assert chat.status_code == 200
    assert "default-src 'none'" in chat.headers["content-security-policy"]
    assert httpx.get(f"{server.http}/page/chat.js").status_code == 200
    pools = {p["role"]: p for p in httpx.get(f"{server.http}/v1/pools", timeout=30).json()["data"]}
    processes = server.info()
    for role in ("target", "draft"):
        assert pools[role]["models"] == [server.model]
        assert pools[role]["health"] == "HEALTHY"
        assert pools[role]["replicas"] == {"RUNNING": 1}
        (worker,) = pools[role]["workers"]
        assert worker["process_id"] == processes[role].process_id
    status = pools["target"]["workers"][0]["status"]
    assert status["tokens_committed"] >= 1
    assert status["kv_slots"] == processes["target"].kv_slots > 0


def test_three_processes_share_the_work(server: Server) -> None:
    ask(server)
    processes = server.info()
    assert set(processes) == {"coordinator", "target", "draft"}
    assert len({process.process_id for process in processes.values()}) == 3
    assert os.getpid() not in {process.process_id for process in processes.values()}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.95}])
@pytest.mark.parametrize("prompt", QUESTIONS[:4])
def test_on_equals_off(server: Server, prompt: str, sampling: dict[str, Any]) -> None:
    options = {"logprobs": True, "top_logprobs": 2, **sampling}
    off = ask(server, prompt, speculation={"enabled": False}, **options)
    on = ask(server, prompt, **options)
    chain = ask(server, prompt, speculation={"tree": False, "max_draft_tokens": 3}, **options)
    assert said(on) == said(off) == said(chain)
    assert off["speculation"]["draft_tokens"] == 0
    assert off["speculation"]["drafter"] == ""


def helped(server: Server, **options: Any) -> dict[str, Any]:
    """An answer in which two drafts in a row were accepted.

    How many are depends on how soon the drafters come, and the machine may be busy: ten tries.
    """
    for _ in range(10):
        answer = ask(server, **options)
        if len(answer["speculation"]["acceptance_by_depth"]) >= 2:
            return answer
    raise AssertionError(f"drafts do not help: {answer['speculation']}")


def test_drafts_are_accepted(server: Server) -> None:
    stats = helped(server, speculation=BOTH)["speculation"]
    assert stats["drafter"] == "eagle+lookup"
    assert stats["accepted_tokens"] >= 1
    assert stats["mean_accepted_length"] > 1
    assert stats["draft_tokens"] >= stats["accepted_tokens"]


def test_openai_client_streams_what_it_returns_whole(server: Server) -> None:
    client = server.client
    messages = [{"role": "user", "content": "Say hello in French, German and Japanese."}]
    common = {
        "model": server.model,
        "messages": messages,
        "max_tokens": 40,
        "temperature": 0.7,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**common)
    text, logprobs, reasons, usage = "", [], [], None
    for chunk in client.chat.completions.create(
        **common,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculation": {"stats": True}},
    ):
        if chunk.choices:
            choice = chunk.choices[0]
            text += choice.delta.content or ""
            logprobs += choice.logprobs.content if choice.logprobs else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
        else:
            usage, stats = chunk.usage, chunk.model_extra["speculation"]
    choice = whole.choices[0]
    assert text == choice.message.content
    assert reasons == [choice.finish_reason]
    assert logprobs == choice.logprobs.content
    assert usage == whole.usage
    assert len(logprobs) == usage.completion_tokens
    assert stats["rounds"] > 0
    joined = b"".join(bytes(entry.bytes) for entry in logprobs)
    assert joined.decode(errors="ignore").startswith(text[:10])


def test_completions_take_text_lists_and_ids(server: Server) -> None:
    client = server.client
    common = {"model": server.model, "max_tokens": 12, "temperature": 0}
    prompts = ["The capital of France is", "Once upon a time"]
    extra = {"extra_body": {"return_token_ids": True}}
    alone = [client.completions.create(prompt=p, logprobs=1, **extra, **common) for p in prompts]
    both = client.completions.create(prompt=prompts, logprobs=1, **common)
    assert [c.text for c in both.choices] == [a.choices[0].text for a in alone]
    assert [c.index for c in both.choices] == [0, 1]
    assert both.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)
    ids = [a.choices[0].model_extra["prompt_token_ids"] for a in alone]
    by_ids = client.completions.create(prompt=ids, **common)
    assert [c.text for c in by_ids.choices] == [a.choices[0].text for a in alone]
    one = client.completions.create(prompt=ids[0], **common)
    assert one.choices[0].text == alone[0].choices[0].text
    logprobs = alone[0].choices[0].logprobs
    assert "".join(logprobs.tokens) == alone[0].choices[0].text
    assert logprobs.text_offset[0] == 0
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(prompt=prompts, stream=True, **common):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == [c.text for c in both.choices]


def test_stop_strings_and_ids(server: Server) -> None:
    whole = ask(server)
    text, ids = whole["choices"][0]["message"]["content"], whole["choices"][0]["token_ids"]
    stop = text[20:26]
    stopped = ask(server, stop=stop)
    assert stopped["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] == stop
    by_id = ask(server, stop_token_ids=[ids[6]])
    assert by_id["choices"][0]["token_ids"] == ids[: ids.index(ids[6]) + 1]
    assert by_id["choices"][0]["stop_reason"] == ids[6]


def test_grpc_says_what_http_says(server: Server) -> None:
    expected = ask(server, logprobs=True, top_logprobs=2)
    request = pb.GenerateRequest(
        conversation=pb.Conversation(messages=[pb.Message(role="user", content=REPEAT)]),
        sampling=pb.Sampling(temperature=0),
        stopping=pb.Stopping(max_tokens=48),
        speculation=pb.Speculation(stats=True, drafters=["eagle", "lookup"]),
        logprobs=2,
    )
    responses = list(server.stub().Generate(request, timeout=60))
    choice = expected["choices"][0]
    assert "".join(r.text for r in responses) == choice["message"]["content"]
    assert [t for r in responses for t in r.token_ids] == choice["token_ids"]
    logprobs = [entry.logprob for r in responses for entry in r.logprobs]
    assert logprobs == pytest.approx([e["logprob"] for e in choice["logprobs"]["content"]])
    last = responses[-1]
    reasons = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
    assert last.finish_reason == reasons[choice["finish_reason"]]
    assert last.usage.completion_tokens == len(choice["token_ids"])
    assert last.speculation.drafter == "eagle+lookup"
    assert all(not r.finish_reason for r in responses[:-1])
    # A round is one message at most, so drafts show in how few there are.
    assert len(responses) <= 1 + last.speculation.rounds


def test_eight_at_once_equal_each_alone(server: Server) -> None:
    options = [{"temperature": 0} if i % 2 else {"temperature": 0.9, "seed": i} for i in range(8)]
    alone = [ask(server, q, **o) for q, o in zip(QUESTIONS, options, strict=True)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda i: ask(server, QUESTIONS[i], **options[i]), range(8)))
    assert [said(a) for a in together] == [said(a) for a in alone]


def test_a_dead_draft_changes_no_token(server: Server) -> None:
    """Until it returns nothing is accepted; then drafts are accepted again."""
    elsewhere = {"drafter": "lookup"}  # The other one is beside the target.
    before = helped(server, speculation=elsewhere)
    draft = server.info()["draft"]
    os.kill(draft.process_id, signal.SIGKILL)
    # The draft worker is back within seconds: this answer must be shorter than that.
    alone = ask(server, speculation=elsewhere)
    assert said(alone) == said(before)
    assert alone["speculation"]["accepted_tokens"] == 0
    accepted = 0
    deadline = time.monotonic() + 60
    while not accepted and time.monotonic() < deadline:
        answer = ask(server, speculation=elsewhere)
        assert said(answer) == said(before)
        accepted = answer["speculation"]["accepted_tokens"]
    assert accepted > 0
    assert server.info()["draft"].process_id != draft.process_id


def test_a_draft_that_dies_mid_answer_changes_no_token(server: Server) -> None:
    expected = ask(server, "Write a long story about a fox and a dog.", max_tokens=160)
    draft = server.info()["draft"]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(
            ask, server, "Write a long story about a fox and a dog.", max_tokens=160
        )
        time.sleep(1.5)
        os.kill(draft.process_id, signal.SIGKILL)
        assert said(running.result()) == said(expected)


def idle_within(server: Server, seconds: float) -> None:
    """Assert that no session runs or waits and that the cache is free, within a time."""
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        processes = server.info()
        target, draft = processes["target"], processes["draft"]
        held = (
            target.running_sessions,
            target.waiting_sessions,
            target.kv_slots - target.kv_free_slots,
            draft.running_sessions,
        )
        if held == (0, 0, 0, 0):
            return
        assert asked < deadline, held
        time.sleep(0.05)


SWITCHED_OFF = {"x-request-disconnect-disabled": "?1", "x-request-timeout-seconds": "-1"}


@pytest.mark.parametrize("headers", [{}, SWITCHED_OFF], ids=["plain", "detection off"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_slots(
    server: Server, stream: bool, headers: dict[str, str]
) -> None:
    ask(server)
    body = {
        "messages": [{"role": "user", "content": "Tell a very long story."}],
        "max_tokens": 4000,
        "temperature": 1,
        "stream": stream,
    }
    url = f"{server.http}/v1/chat/completions"
    if stream:
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as response:
            lines = response.iter_lines()
            for _ in range(12):
                next(lines)
            assert server.info()["target"].running_sessions == 1
    else:
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(url, json=body, headers=headers, timeout=2)
    idle_within(server, 1.0)


def test_a_cancelled_grpc_stream_frees_its_slots(server: Server) -> None:
    request = pb.GenerateRequest(text="Once upon a time", stopping=pb.Stopping(max_tokens=4000))
    call = server.stub().Generate(request)
    next(iter(call))
    call.cancel()
    idle_within(server, 1.0)


def test_a_deadline_ends_the_answer(server: Server) -> None:
    request = pb.GenerateRequest(
        text="Once upon a time",
        stopping=pb.Stopping(max_tokens=4000, ignore_eos=True),
        timeout_ms=1500,
    )
    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as raised:
        list(server.stub().Generate(request))
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "longer than it may" in raised.value.details()
    assert 1.0 < time.monotonic() - started < 4
    idle_within(server, 1.0)


def test_every_stream_event_is_json_and_the_last_says_done(server: Server) -> None:
    body = {
        "prompt": "Hello",
        "max_tokens": 8,
        "stream": True,
        "speculation": {"stats": True},
    }
    response = httpx.post(f"{server.http}/v1/completions", json=body, timeout=60)
    events = [line[6:] for line in response.text.split("\n\n") if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert [bool(c.get("speculation")) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"n": 0}, "n:"),
    ({"presence_penalty": 5}, "presence_penalty"),
    ({"logit_bias": {"1": 500}}, "logit_bias"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "set target.chat_template",
    ),
    ({"temprature": 1}, "temprature"),
    ({"speculation": {"drafter": "nobody"}}, "nobody"),
    ({"speculation": {"verification": "typical"}}, "verification"),
    ({"speculation": {"max_draft_tokens": -1}}, "max_draft_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, "8192"),
    ({"stop": ["x"] * 17}, "at most 16"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"seed": 2**63}, "seed"),
]


@pytest.mark.parametrize(("change", "named"), REFUSALS, ids=[named for _, named in REFUSALS])
def test_bad_requests_are_named_and_harm_nobody(
    server: Server, change: dict[str, Any], named: str
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **change}
    response = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"


def test_neutral_values_are_accepted(server: Server) -> None:
    neutral = {
        "n": 1,
        "tools": None,
        "logprobs": False,
        "store": False,
        "service_tier": "auto",
        "presence_penalty": 0,
        "logit_bias": None,
        "user": "someone",
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
        "stop": None,
        "speculation": {},
    }
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 4,
        **neutral,
    }
    response = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] <= 4


def test_wrong_model_path_and_json(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match=server.model):
        server.client.chat.completions.create(
            model="gpt-9", messages=[{"role": "user", "content": "hi"}]
        )
    url = f"{server.http}/v1/chat/completions"
    json_type = {"content-type": "application/json"}
    for content, headers, named in (
        (b'{"messages": [', json_type, "not JSON"),
        (b'{"messages": []}', {}, "content-type"),
        (b"[1, 2]", json_type, "JSON object"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', json_type, "messages"),
        (b"[" * 100_000, json_type, "body"),
    ):
        broken = httpx.post(url, content=content, headers=headers, timeout=30)
        assert broken.status_code == 400
        assert named in broken.json()["error"]["message"]
    missing = httpx.get(f"{server.http}/v1/nothing", timeout=30)
    assert missing.status_code == 404
    assert "error" in missing.json()


def test_a_body_that_is_too_large_is_cut_off(server: Server) -> None:
    body = b'{"messages": "' + b"x" * (9 * 2**20)
    response = httpx.post(f"{server.http}/v1/chat/completions", content=body, timeout=30)
    assert response.status_code == 413
    assert "larger than" in response.json()["error"]["message"]


def test_grpc_refusals(server: Server) -> None:
    stub = server.stub()
    cases = [
        (pb.GenerateRequest(), "set one of"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(temperature=9)), "temperature"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10**6])), "49151"),
        (pb.GenerateRequest(text="x", speculation=pb.Speculation(drafters=["no"])), "no"),
    ]
    for request, named in cases:
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(request, timeout=30))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in raised.value.details()
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Generate(pb.GenerateRequest(text="x", model="other"), timeout=30))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_models_and_health(server: Server) -> None:
    assert httpx.get(f"{server.http}/health").json()["status"] == "ok"
    model = server.client.models.list().data[0]
    assert model.id == server.model
    assert model.model_extra["max_model_len"] == 8192
    assert model.model_extra["drafters"] == ["eagle", "lookup"]
    # Three states of 576 values in bfloat16 follow every token to the head.
    assert model.model_extra["feature_bytes_per_token"] == 3 * 576 * 2
    assert model.model_extra["row_invariant"] is True


@pytest.mark.slow
async def test_no_token_differs_on_many_prompts(server: Server) -> None:
    prompts = read(ROOT / "loadtest" / "prompts" / "six_kinds.jsonl")
    differ = await compare(server.http, prompts, at_once=16, max_tokens=64)
    assert set(differ.values()) == {0}


async def test_async_client_at_once(server: Server) -> None:
    client = server.async_client
    answers = await asyncio.gather(
        *(
            client.completions.create(
                model=server.model, prompt="Hello", max_tokens=5, temperature=1, seed=seed
            )
            for seed in range(6)
        )
    )
    assert len({answer.choices[0].text for answer in answers}) > 1


def test_more_than_fit_wait_or_are_told_so(server: Server) -> None:
    """Overload: every request either gets its answer or a 503 with Retry-After."""

    def one(seed: int) -> httpx.Response:
        body = {"prompt": "Tell me", "max_tokens": 4, "seed": seed}
        return httpx.post(f"{server.http}/v1/completions", json=body, timeout=120)

    with ThreadPoolExecutor(80) as threads:
        responses = list(threads.map(one, range(80)))
    codes = {response.status_code for response in responses}
    assert codes <= {200, 503}
    assert 200 in codes
    for response in responses:
        if response.status_code == 503:
            assert response.headers["retry-after"]
            assert response.json()["error"]["type"] == "server_error"
    idle_within(server, 1.0)
