"""What a running server tells of its answers: traces, logs, metrics."""

import json
import secrets
import time
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from protos import inference_pb2 as pb
from tests.e2e.conftest import Server
from tests.e2e.test_serving import BOTH, REPEAT, ask

pytestmark = pytest.mark.e2e


def traceparent(sampled: bool = True) -> tuple[bytes, str]:
    """A client's trace, and the header that says so."""
    trace = secrets.token_bytes(16)
    return trace, f"00-{trace.hex()}-{secrets.token_hex(8)}-{int(sampled):02d}"


def spans_of(server: Server, trace: bytes, last: str) -> dict[str, list[Span]]:
    """The spans of a trace by name, once the last of them has come."""
    deadline = time.monotonic() + 20
    while True:
        found: dict[str, list[Span]] = {}
        for span in list(server.spans):
            if span.trace_id == trace:
                found.setdefault(span.name, []).append(span)
        if last in found and "target" in found and "draft" in found:
            return found
        assert time.monotonic() < deadline, sorted(found)
        time.sleep(0.2)


def attributes(span: Span) -> dict[str, Any]:
    kinds = {"int_value", "double_value", "string_value", "bool_value"}
    values = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        values[attribute.key] = (
            getattr(attribute.value, kind) if kind in kinds else attribute.value.array_value
        )
    return values


def test_a_trace_goes_through_all_processes(server: Server) -> None:
    trace, header = traceparent()
    body = {
        "messages": [{"role": "user", "content": REPEAT}],
        "max_tokens": 60,
        "temperature": 0,
        "speculation": {"stats": True, **BOTH},
    }
    url = f"{server.http}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers={"traceparent": header}, timeout=60).json()
    name = f"chat {server.model}"
    spans = spans_of(server, trace, name)
    (chat,) = spans[name]
    stats, usage = answer["speculation"], answer["usage"]
    said = attributes(chat)
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == server.model
    assert said["gen_ai.request.max_tokens"] == 60
    assert said["gen_ai.response.id"] == answer["id"]
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert said["slipstream.rounds"] == stats["rounds"]
    assert said["slipstream.accepted"] == stats["accepted_tokens"]
    assert said["slipstream.drafter"] == stats["drafter"]
    (reason,) = said["gen_ai.response.finish_reasons"].values
    assert reason.string_value == answer["choices"][0]["finish_reason"]
    for below in ("lease", "prefill", "round", "target", "draft"):
        for span in spans[below]:
            if span not in spans["target"] and below == "prefill":
                # The target has a prefill of its own, below its own span.
                continue
            assert span.parent_span_id == chat.span_id, below
    (target,) = spans["target"]
    (queue,) = spans["queue"]
    assert queue.parent_span_id == target.span_id
    assert {span.parent_span_id for span in spans["prefill"]} == {chat.span_id, target.span_id}
    assert len(spans["round"]) == 1 + (stats["rounds"] - 1) // 16
    first = attributes(spans["round"][0])
    assert first["slipstream.base_len"] == usage["prompt_tokens"] + 1
    assert first["slipstream.accepted"] <= first["slipstream.drafted"]
    assert first["slipstream.price"] > 0
    assert REPEAT[:20] not in str(spans)
    # Its own ancestors are Serve's, up to the caller's span.
    parents = {span.span_id: span for found in spans.values() for span in found}
    above = chat
    while above.parent_span_id in parents:
        above = parents[above.parent_span_id]
    assert above.parent_span_id.hex() == header.split("-")[2]


def test_a_trace_comes_in_by_grpc(server: Server) -> None:
    trace, header = traceparent()
    request = pb.GenerateRequest(
        text=REPEAT,
        stopping=pb.Stopping(max_tokens=24),
        speculation=pb.Speculation(drafters=BOTH["drafter"]),
    )
    list(server.stub().Generate(request, metadata=(("traceparent", header),), timeout=60))
    spans = spans_of(server, trace, f"text_completion {server.model}")
    assert attributes(spans["target"][0])["slipstream.tokens"] > 24


def test_who_does_not_trace_is_not_traced(server: Server) -> None:
    trace, header = traceparent(sampled=False)
    body = {"prompt": REPEAT, "max_tokens": 8}
    url = f"{server.http}/v1/completions"
    assert httpx.post(url, json=body, headers={"traceparent": header}, timeout=60).is_success
    time.sleep(1)
    assert not [span for span in server.spans if span.trace_id == trace]


def test_logs_are_structured_and_name_the_request(server: Server) -> None:
    """One line an answer, with the caller's own request id, and nothing of what was said."""
    request_id, secret = secrets.token_hex(8), f"swordfish-{secrets.token_hex(4)}"
    body = {"prompt": f"The password is {secret}. {secret}", "max_tokens": 5}
    url = f"{server.http}/v1/completions"
    answer = httpx.post(url, json=body, headers={"x-request-id": request_id}, timeout=60)
    assert answer.headers["x-request-id"] == request_id
    deadline = time.monotonic() + 10
    lines: list[dict[str, Any]] = []
    while not lines:
        assert time.monotonic() < deadline
        texts = [path.read_text() for path in server.logs.rglob("*Coordinator*.log")]
        everything = [json.loads(line) for text in texts for line in text.splitlines()]
        lines = [line for line in everything if line.get("answer_id") == answer.json()["id"]]
    (line,) = lines
    assert line["request_id"] == request_id
    assert line["finish_reason"] == "length"
    assert line["completion_tokens"] == 5
    assert line["levelname"] == "INFO"
    assert not any(secret in path.read_text() for path in server.logs.rglob("*.log"))


def values(server: Server) -> dict[str, float]:
    """The counters of /metrics, summed over labels, once what was recorded is exported."""
    time.sleep(4)
    text = httpx.get(f"{server.http}/metrics", timeout=30).text
    return {
        sample.name: sum(s.value for s in family.samples if s.name == sample.name)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_metrics_count_what_clients_were_told(server: Server) -> None:
    before = values(server)
    answers = [ask(server, speculation=BOTH), ask(server, speculation={"enabled": False})]
    with pytest.raises(grpc.RpcError):
        server.stub().Generate(pb.GenerateRequest(), timeout=60).next()
    after = values(server)
    stats = [answer["speculation"] for answer in answers]
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    more = {name: after[name] - before.get(name, 0) for name in after}
    assert more["slipstream_answers_total"] == 2
    assert more["slipstream_rounds_total"] == sum(s["rounds"] for s in stats)
    for name in ("draft_tokens", "accepted_tokens"):
        counted = more[f"slipstream_spec_decode_num_{name}_total"]
        assert counted == sum(s[name] for s in stats)
    per_position = more["slipstream_spec_decode_num_accepted_tokens_per_pos_total"]
    assert per_position == more["slipstream_spec_decode_num_accepted_tokens_total"]
    assert more["slipstream_committed_tokens_total"] >= tokens - 2
    for histogram in ("time_to_first_token_seconds", "time_per_output_token_seconds"):
        assert more[f"slipstream_{histogram}_count"] == 2
    assert more["slipstream_worker_steps_total"] >= more["slipstream_rounds_total"] / 2
    assert more["slipstream_worker_step_seconds_count"] == more["slipstream_worker_steps_total"]
    assert more["slipstream_messages_total"] > 0
    assert more["slipstream_coordinator_cpu_seconds_total"] > 0
    assert after["slipstream_worker_price"] > 0
