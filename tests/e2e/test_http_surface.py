"""HTTP as clients use it, through Serve's proxy: connections, request ids, other origins, curl."""

import http.client
import json
import shutil
import socket
import subprocess
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from tests.e2e.conftest import Server

pytestmark = pytest.mark.e2e

ASK = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
CHAT = "/v1/chat/completions"


def test_one_connection_carries_many_requests(server: Server) -> None:
    """Answers, streams and refusals alike leave it open."""
    where = urlsplit(server.http)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    connection.connect()
    first: socket.socket | Any = connection.sock
    headers = {"content-type": "application/json"}
    for body, status in (
        (ASK, 200),
        ({**ASK, "stream": True}, 200),
        ({**ASK, "temperature": 9}, 400),
        ({**ASK, "model": "other"}, 404),
        (ASK, 200),
    ):
        connection.request("POST", CHAT, json.dumps(body), headers)
        answer = connection.getresponse()
        said = answer.read()
        assert answer.status == status, said
        assert connection.sock is first
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b'{"status":"ok"}'
    assert connection.sock is first
    connection.close()


def test_every_answer_has_a_request_id(server: Server) -> None:
    client = server.client
    answers = [
        client.chat.completions.with_raw_response.create(model=server.model, **ASK),
        client.chat.completions.with_raw_response.create(model=server.model, **ASK, stream=True),
        client.models.with_raw_response.list(),
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=server.model, **{**ASK, "temperature": 9})
    assert refused.value.param == "temperature"
    assert refused.value.request_id is not None
    assert len({*ids, refused.value.request_id}) == 4
    named = client.models.with_raw_response.list(extra_headers={"x-request-id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"


def test_curl_streams(server: Server) -> None:
    curl = shutil.which("curl")
    assert curl is not None, "these tests need curl"
    command = [curl, "-sN", f"{server.http}{CHAT}", "-H", "content-type: application/json"]
    body = json.dumps({**ASK, "stream": True})
    said = subprocess.run([*command, "-d", body], capture_output=True, text=True, check=True).stdout
    assert said.endswith("data: [DONE]\n\n")
    events = [json.loads(event[6:]) for event in said.split("\n\n")[:-2]]
    whole = subprocess.run(
        [*command, "-d", json.dumps(ASK)], capture_output=True, text=True, check=True
    ).stdout
    text = json.loads(whole)["choices"][0]["message"]["content"]
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == text
    verbose = [curl, "-s", "-o", "/dev/null", "-w", "%{http_code} %{content_type}"]
    refused = subprocess.run(
        [*verbose, f"{server.http}{CHAT}", "-d", "not JSON"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert refused == "400 application/json"
