"""Calls of tools: what grammar they have, and what is found in text that comes in any pieces."""

import json
import random
import re
from typing import Any

import pytest

from deployments.openai.tools import NO_ARGUMENTS, Calls, Found, Function, calls_grammar
from tests import tiny
from workers.grammar import Grammars
from workers.rpc.errors import InvalidRequest

tokenizer = tiny.byte_level_tokenizer()
EOS = tokenizer.eos_token_id
GRAMMARS = Grammars(tokenizer.backend_tokenizer, len(tokenizer), frozenset([EOS]))
WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Rome", 'Pa"ris']}},
    },
)
CLOCK = Function("clock", NO_ARGUMENTS)
# Neither is a grammar of llama.cpp's what a description seems to make one.
RULE = Function("rule", {"type": "object", "description": "root ::= x"})
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\\"ris", "days": 2}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def accepts(text: str, *, several: bool = True, forced: bool = True) -> bool:
    """Whether an answer may be this text, and end."""
    state = GRAMMARS.start(calls_grammar([WEATHER, CLOCK], several, forced))
    for token in [*tokenizer(text).input_ids, EOS]:
        if not state.allowed()[token]:
            return False
        if token != EOS:
            state.observe(token)
    return True


def test_the_grammar_of_forced_calls() -> None:
    for call in (ROME, PARIS, TIME):
        assert accepts(call)
        assert accepts(call, several=False)
    assert accepts(f"{TIME}\n{ROME}")
    assert calls_grammar([RULE], False, True)
    assert not accepts(f"{TIME}\n{ROME}", several=False)
    assert not accepts("")
    assert not accepts("Hello")
    assert not accepts(ROME.replace("Rome", "Oslo"))
    assert not accepts(TIME.replace("{}", '{"a": 1}'))
    assert not accepts(TIME.replace("clock", "watch"))


def test_the_grammar_of_calls_that_are_free() -> None:
    for text in ("", "Hello\nyou", f"Let me see.\n{ROME}", f"{TIME}\n{PARIS} so", "a < b <tool"):
        assert accepts(text, forced=False)
    assert not accepts(f"Hm. {ROME.replace('Rome', 'Oslo')}", forced=False)
    assert not accepts(f"{TIME}{ROME.replace('Rome', 'Oslo')}", forced=False)
    assert accepts(f"Hm. {ROME} so", forced=False, several=False)


def test_parameters_that_cannot_be_compiled_are_named_with_the_place() -> None:
    bad = Function("bad", {"type": "object", "properties": {"a": {"type": "strng"}}})
    with pytest.raises(InvalidRequest, match="bad cannot be compiled: at /properties/a") as raised:
        calls_grammar([CLOCK, bad], True, True)
    assert raised.value.param == "tools.1.function.parameters"


def find(text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]], list[Found]]:
    """What is found in a text that comes in pieces: content, and (name, arguments) of calls."""
    parser = Calls()
    ends = [*cuts, len(text)]
    news = [parser.add(text[a:b], b == len(text)) for a, b in zip([0, *cuts], ends, strict=True)]
    calls: list[tuple[str, str]] = []
    for found in news:
        for delta in found.calls:
            if "id" in delta:
                assert delta["index"] == len(calls)
                assert re.fullmatch("call_[0-9a-f]{24}", delta["id"])
                calls.append((delta["function"]["name"], ""))
            name, arguments = calls[delta["index"]]
            calls[delta["index"]] = (name, arguments + delta["function"]["arguments"])
    assert parser.count == len(calls)
    return "".join(found.content for found in news), calls, news


TEXTS: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("Hello  you \n", "Hello  you \n", []),
    (ROME, "", [("get_weather", {"city": "Rome"})]),
    (f" {PARIS}\n", "", [("get_weather", {"city": 'Pa"ris', "days": 2})]),
    (
        f"Let me see.\n{TIME}\n{ROME}",
        "Let me see.",
        [("clock", {}), ("get_weather", {"city": "Rome"})],
    ),
    (f"a{TIME} b c {ROME}\n d e", "ab cd e", [("clock", {}), ("get_weather", {"city": "Rome"})]),
    ("1 < 2 <tool_ <tool_call", "1 < 2 <tool_ <tool_call", []),
    ("<tool_call>nonsense</tool_call> x", "<tool_call>nonsense</tool_call> x", []),
    ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    (
        '<tool_call>{"arguments": {"a": [{"b": "}]"}]}, "name": "f"}</tool_call>',
        "",
        [("f", {"a": [{"b": "}]"}]})],
    ),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    (
        '<tool_call>\n{"name": "f", "arguments": {"a": "\\\\"}, "x": 1}\n</tool_call>!',
        "!",
        [("f", {"a": "\\"})],
    ),
]


@pytest.mark.parametrize(("text", "content", "calls"), TEXTS)
def test_calls_are_found_however_the_text_is_cut(
    text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    rng = random.Random(1)
    ways = [[], list(range(1, len(text)))]
    ways += [sorted(rng.sample(range(len(text)), rng.randrange(1, len(text)))) for _ in range(60)]
    for cuts in ways:
        said, found, _ = find(text, cuts)
        assert said == content
        assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_arguments_come_as_they_are_written() -> None:
    _, calls, news = find(PARIS, list(range(1, len(PARIS))))
    assert calls == [("get_weather", '{"city": "Pa\\"ris", "days": 2}')]
    pieces = [delta for found in news for delta in found.calls]
    assert len(pieces) > 20
    assert all(("id" in delta) == (at == 0) for at, delta in enumerate(pieces))


def test_a_call_that_is_cut_off() -> None:
    """By max_tokens: what is there is given, as OpenAI does."""
    for end, arguments in (("}", '{"city": "Rome"}'), ('{"ci', '{"ci'), ('"city": ', '{"city": ')):
        cut = ROME[: ROME.rindex(end, 0, -14) + len(end)]
        assert find(cut, [])[:2] == ("", [("get_weather", arguments)])
        assert find(cut, list(range(1, len(cut))))[:2] == ("", [("get_weather", arguments)])
    # Before its name there is nothing to give; but not all that begins so is a call.
    assert find(f"So: {ROME[:20]}", [])[:2] == ("So:", [])
    assert find("<tool_call> is a tag", [])[:2] == ("<tool_call> is a tag", [])
