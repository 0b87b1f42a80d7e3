"""Calls of tools: what an answer that calls must look like, and the calls found in an answer.

One format is known, "hermes": `<tool_call>`, a JSON object with the name and the arguments, `</tool_call>`.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from workers import grammar
from workers.grammar import GrammarError
from workers.rpc.errors import InvalidRequest

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL
)
_CUT: Final = re.compile(r"\s*(\{|$)")

NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "additionalProperties": False}
"""The schema where a function has none."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that an answer may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]


def calls_grammar(functions: Sequence[Function], several: bool, forced: bool) -> str:
    """The grammar of answers that call one of these functions, or `several` times some of them.

    Unless they are `forced` to, they may say something before and behind the calls, or not call at all. May
    take long. Raises InvalidRequest that names the function whose parameters cannot be compiled.
    """
    if forced:
        rules = [
            'start: call ("\\n" call)*' if several else "start: call",
            f"call: {json.dumps(OPEN)} body",
        ]
    else:
        # What is lazy ends where it first can: no text goes on behind what begins a call.
        rules = [
            "start: call* TEXT" if several else "start: call? TEXT",
            "call: begin body",
            f"begin[lazy]: TEXT {json.dumps(OPEN)}",
            r"TEXT: /(.|\n)*/",
        ]
    rules.append("body: " + " | ".join(f"body_{index}" for index in range(len(functions))))
    for index, function in enumerate(functions):
        param = f"tools.{index}.function.parameters"
        try:
            grammar.of_json_schema(function.parameters)
        except GrammarError as error:
            raise InvalidRequest(
                f"{param} of {function.name} cannot be compiled: {error}", param
            ) from error
        begin = json.dumps(f'\n{{"name": {json.dumps(function.name)}, "arguments": ')
        end = json.dumps(f"}}\n{CLOSE}")
        schema = json.dumps(grammar.in_form(function.parameters))
        rules.append(f"body_{index}: {begin} %json {schema} {end}")
    try:
        return grammar.of_lark("\n".join(rules))
    except GrammarError as error:
        raise InvalidRequest(f"tools cannot be compiled: {error}", "tools") from error


@dataclass(slots=True)
class Found:
    """What is new in an answer: text, and parts of calls in the form of OpenAI's streams."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class _Where(Enum):
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()


class Calls:
    """Finds calls in the growing text of an answer; `count` is their number so far.

    Arguments come as they are written. What begins as a call and is none stays text; white space around calls
    is nobody's.
    """

    def __init__(self) -> None:
        self.count = 0
        self._where = _Where.TEXT
        self._left = ""
        self._depth = 0
        self._quoted = self._escaped = False
        self._after_call = False

    def add(self, text: str, last: bool) -> Found:
        """What more text says; all that is left if it is the `last`."""
        self._left += text
        found = Found()
        steps = {
            _Where.TEXT: self._text,
            _Where.HEAD: self._head,
            _Where.ARGUMENTS: self._arguments,
            _Where.TAIL: self._tail,
        }
        while steps[self._where](found, last):
            pass
        return found

    def _text(self, found: Found, last: bool) -> bool:
        before, opened, rest = self._left.partition(OPEN)
        if opened:
            self._say(found, before.rstrip())
            self._left, self._where = rest, _Where.HEAD
            return True
        kept = len(self._left) if last else len(self._left) - _beginning(self._left)
        shown = self._left[:kept]
        # What is white before a call, or behind the last one, is not known to be the answer's own.
        if not last or self._after_call:
            shown = shown.rstrip()
        self._left = "" if last else self._left[len(shown) :]
        self._say(found, shown)
        return False

    def _say(self, found: Found, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        found.content += text

    def _head(self, found: Found, last: bool) -> bool:
        head = _HEAD.match(self._left)
        if head is not None:
            self._begin(found, json.loads(head[1], strict=False))
            self._left, self._where = self._left[head.end() :], _Where.ARGUMENTS
            return True
        inside, closed, rest = self._left.partition(CLOSE)
        if not closed and not last:
            return False
        call = _parsed(inside)
        if call is None and not closed and _CUT.match(inside):
            # The answer was cut before it said whom it calls.
            inside = ""
        elif call is None:
            self._say(found, OPEN + inside + closed)
        else:
            self._begin(found, call["name"])
            arguments = call["arguments"]
            self._argue(found, arguments if isinstance(arguments, str) else json.dumps(arguments))
        self._left, self._where = rest, _Where.TEXT
        return bool(closed)

    def _arguments(self, found: Found, last: bool) -> bool:
        for at, character in enumerate(self._left):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._quoted = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    self._argue(found, self._left[: at + 1])
                    self._left, self._where = self._left[at + 1 :], _Where.TAIL
                    return True
        self._argue(found, self._left)
        self._left = ""
        return False

    def _tail(self, found: Found, last: bool) -> bool:
        _, closed, rest = self._left.partition(CLOSE)
        if closed:
            self._left, self._where = rest, _Where.TEXT
        return bool(closed)

    def _begin(self, found: Found, name: str) -> None:
        found.calls.append(
            {
                "index": self.count,
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
        )
        self.count += 1
        self._after_call = True

    def _argue(self, found: Found, text: str) -> None:
        index = self.count - 1
        if not (found.calls and found.calls[-1]["index"] == index):
            found.calls.append({"index": index, "function": {"arguments": ""}})
        found.calls[-1]["function"]["arguments"] += text


def _parsed(text: str) -> dict[str, Any] | None:
    """A call whose parts stand in another order; None if it is none."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    named = isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call
    return call if named else None


def _beginning(text: str) -> int:
    """Length of the longest end of `text` that may become OPEN."""
    for length in range(min(len(text), len(OPEN) - 1), 0, -1):
        if OPEN.startswith(text[len(text) - length :]):
            return length
    return 0
