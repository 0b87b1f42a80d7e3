"""Streams as they come over the wire."""

import json

import httpx

from loadtest import client


def test_chunks_are_read_whatever_their_text_holds() -> None:
    """U+2028 and U+0085 end lines for Python, not in a stream; a chunk may come in pieces."""
    said = [{"text": "one\u2028two\x85"}, {"text": "дві"}]
    wire = "".join(f"data: {json.dumps(c, ensure_ascii=False)}\n\n" for c in said).encode()
    wire += b": a comment\r\n\r\ndata: [DONE]\r\n\r\n"

    def answer(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.read())["stream"] is True
        return httpx.Response(200, content=(wire[at : at + 5] for at in range(0, len(wire), 5)))

    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as http:
        assert list(client.blocking_events(http, client.CHAT, {})) == [*said, None]
