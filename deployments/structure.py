"""What an answer may look like, as requests say it, made into the grammar that targets follow."""

import json
from collections.abc import Callable
from typing import Any, Final

from workers import grammar
from workers.grammar import GrammarError
from workers.rpc.errors import InvalidRequest

JSON_OBJECT: Final[dict[str, Any]] = {"type": "object"}
"""The schema of any JSON object."""


def grammar_of(kind: str, value: Any, param: str) -> str:
    """The grammar of a "json" schema (also as text), a "regex", a "choice" of texts or a "grammar".

    May take long. Raises InvalidRequest that names `param`, and in it the place, if there is no such grammar.
    """
    try:
        return _MAKERS[kind](value)
    except GrammarError as error:
        raise InvalidRequest(f"{param} cannot be compiled: {error}", param) from error


def _of_json(schema: Any) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise GrammarError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError(f"a schema is a JSON object, not {schema!r}")
    return grammar.of_json_schema(schema)


_MAKERS: Final[dict[str, Callable[[Any], str]]] = {
    "json": _of_json,
    "regex": grammar.of_regex,
    "choice": grammar.of_choice,
    "grammar": grammar.of_text,
}
