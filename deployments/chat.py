"""A conversation with a running server, streamed; with --stats, what speculation did below each answer.

A line is a message; Ctrl-C ends an answer, Ctrl-D the conversation. Where the input is no terminal, each of
its lines is answered. The API key is $OPENAI_API_KEY, if the server wants one.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx

_DONE: Final = "[DONE]"


class Refused(Exception):
    """The server does not answer; the message says why."""


@dataclass(slots=True)
class Reply:
    """An answer as far as it has come; `seconds` are those since its first text."""

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    speculation: dict[str, Any] | None = None

    @property
    def rate(self) -> float:
        """Tokens a second behind the first; 0 if there is no other."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--model", help="left out: the only one that is served")
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--drafter", nargs="+", help="names of drafters, or off; left out: the server chooses"
    )
    parser.add_argument(
        "--stats", action="store_true", help="what speculation did, below an answer"
    )


def run(options: argparse.Namespace) -> int:
    """Talk until the input ends; 1 if the server refuses where nobody could try again."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    messages: list[dict[str, str]] = []
    if options.system:
        messages.append({"role": "system", "content": options.system})
    terminal = sys.stdin.isatty()
    with httpx.Client(base_url=options.url, headers=headers, timeout=600) as client:
        for line in _lines(terminal):
            messages.append({"role": "user", "content": line})
            reply = Reply()
            try:
                for text in _stream(client, _body(options, messages), reply):
                    print(text, end="", flush=True)
            except KeyboardInterrupt:
                print(" …", end="")
            except (Refused, httpx.HTTPError) as error:
                print(_explained(error, options.url), file=sys.stderr)
                if not terminal:
                    return 1
                messages.pop()
                continue
            print()
            messages.append({"role": "assistant", "content": reply.text})
            if options.stats and reply.speculation is not None:
                print(_dim(stats_line(reply)))
    return 0


def stats_line(reply: Reply) -> str:
    """What speculation did for a whole answer, in a line."""
    stats = reply.speculation or {}
    rounds, drafted = stats["rounds"], stats["draft_tokens"]
    parts = [f"{reply.tokens} tokens, {reply.rate:.1f} tokens/s"]
    if drafted:
        parts += [
            f"drafted {drafted / rounds:.1f} a round",
            f"accepted {stats['accepted_tokens'] / drafted:.0%}",
            f"τ {stats['mean_accepted_length']:.2f}",
            str(stats["drafter"]),
        ]
    else:
        parts.append("nothing drafted")
    return " · ".join(parts)


def _lines(terminal: bool) -> Iterator[str]:
    """The messages of the user."""
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if line:
            yield line


def _body(options: argparse.Namespace, messages: list[dict[str, str]]) -> dict[str, Any]:
    speculation: dict[str, Any] = {"stats": options.stats}
    if options.drafter == ["off"]:
        speculation["enabled"] = False
    elif options.drafter:
        speculation["drafter"] = options.drafter
    return {
        "model": options.model,
        "messages": messages,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "speculation": speculation,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _stream(client: httpx.Client, body: dict[str, Any], reply: Reply) -> Iterator[str]:
    """The answer's text as it comes; `reply` grows with it."""
    began: float | None = None
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            raise Refused(_message(response.read().decode(errors="replace")))
        for event in _events(response):
            if "error" in event:
                raise Refused(event["error"]["message"])
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                if text:
                    now = time.monotonic()
                    began = now if began is None else began
                    reply.seconds = now - began
                    reply.text += text
                    yield text
            if event.get("usage"):
                reply.tokens = event["usage"]["completion_tokens"]
                reply.speculation = event.get("speculation")


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream; a server that is cut off announces no end, which is an error."""
    rest = b""
    for data in response.iter_bytes():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            said = event.decode().removeprefix("data: ")
            if said == _DONE:
                return
            yield json.loads(said)
    raise Refused("the answer was cut off: the server, or something before it, went away")


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body


def _explained(error: Exception, url: str) -> str:
    if isinstance(error, httpx.ConnectError):
        return (
            f"nobody answers at {url}: start a server (make serve), or say where one is with --url"
        )
    return str(error)


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text
