"""Answers that must have a structure, one of each kind, and whether a text has it."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from workers import grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", "a very long name of a kind"]},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/friend"}, "maxItems": 1},
    },
    "required": ["name", "age", "kind", "friends"],
    "additionalProperties": False,
    "$defs": {
        "friend": {
            "type": "object",
            "properties": {"nickname": {"type": "string", "maxLength": 4}},
            "required": ["nickname"],
            "additionalProperties": False,
        }
    },
}
REGEX = r"[a-f]{3,12}-(cat|dog) in the hat-[0-9]{2,8}"
CHOICES = ["the cat in the hat", "the cat on the mat", 'a "dog"', "é"]
LARK = r"""
start: "sum(" expr ")"
expr: term | term " + " expr
term: /[0-9]{1,4}/ | "(" expr ")"
"""
GBNF = 'root ::= "yes, " ("the cat" | "the dog") [0-9] [0-9]'

AMBIGUOUS = (
    "start: "
    + " | ".join(f"r{i}" for i in range(900))
    + "".join(f'\nr{i}: "a" r{(7 * i + 1) % 900} r{(13 * i + 5) % 900} | "a"' for i in range(900))
)
"""It compiles, and soon there are too many ways to read the answer."""


def _is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


STRUCTURES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "json": (grammar.of_json_schema(SCHEMA), _is_json),
    "regex": (grammar.of_regex(REGEX), re.compile(REGEX).fullmatch),
    "choice": (grammar.of_choice(CHOICES), CHOICES.__contains__),
    "lark": (grammar.of_text(LARK), re.compile(r"sum\([0-9()+ ]+\)").fullmatch),
    "gbnf": (grammar.of_text(GBNF), re.compile(r"yes, the (cat|dog)\d\d").fullmatch),
}
