"""Grammars: which tokens may come next in an answer that must have a structure.

A grammar is a text in llguidance's format. Whoever takes a request makes it (`of_json_schema` and the others)
and refuses what cannot be compiled; a target compiles it against its tokenizer. The state follows the tokens
of an answer, one by one, and can look ahead along drafted ones.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from tokenizers import Tokenizer

from workers import limits
from workers.tree import ANCHOR, Law, TokenTree

GRAMMAR: Final = "grammar"
"""What statistics call the drafter of what a structure demands."""

_JSON_FORM: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON is written as Python's json.dumps does: what is free nowhere cannot go on for ever."""

_LIMITS: Final = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_COMPILED: Final = 64
_CHECKED: Final = 256
_TRIALS: Final = 500


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that turned out to be too much on the way."""


def of_json_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON values that a schema allows; see `in_form`.

    The properties of an object come in the order of the schema. Raises GrammarError, naming the place, if the
    schema cannot be compiled.
    """
    grammar = _of_schema(schema)
    problem = _problem(grammar)
    if problem:
        raise GrammarError(f"at {_place(schema, problem) or 'its root'}: {problem}")
    return grammar


def of_regex(regex: str) -> str:
    """The grammar of texts that match a regular expression from end to end; else raises GrammarError."""
    return _checked(LLMatcher.grammar_from_regex(regex))


def of_choice(choices: Sequence[str]) -> str:
    """The grammar of some texts, of which the answer is one."""
    return _checked(
        "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    )


def of_text(text: str) -> str:
    """The grammar that a text in Lark's or llama.cpp's (GBNF) syntax says; else raises GrammarError."""
    # Before it is read: that takes its time.
    if len(text) > limits.MAX_GRAMMAR_CHARS:
        return of_lark(text)
    try:
        return of_lark(grammar_from("grammar", text))
    except ValueError as error:
        raise GrammarError(str(error)) from error


def of_lark(text: str) -> str:
    """The grammar that a text in llguidance's Lark syntax says; else raises GrammarError."""
    return _checked(text)


def in_form(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose values are written as json.dumps does, unless its `x-guidance` says otherwise."""
    form = schema.get("x-guidance", {})
    if not isinstance(form, Mapping):
        raise GrammarError(f"x-guidance must be an object, not {form!r}")
    return {**schema, "x-guidance": {**_JSON_FORM, **form}}


def _of_schema(schema: Mapping[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(in_form(schema))


def _checked(grammar: str) -> str:
    problem = _problem(grammar)
    if problem:
        raise GrammarError(problem)
    return grammar


@lru_cache(_CHECKED)
def _problem(grammar: str) -> str:
    """Why a grammar cannot be compiled; empty if it can."""
    if len(grammar) > limits.MAX_GRAMMAR_CHARS:
        return f"{len(grammar)} characters of grammar; at most {limits.MAX_GRAMMAR_CHARS}"
    return LLMatcher.validate_grammar(grammar, limits=_LIMITS)


_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES: Final = ("items", "additionalProperties", "not")


def _place(schema: Mapping[str, Any], problem: str) -> str:
    """A JSON pointer to the innermost part of a schema that has the problem by itself; empty: the whole."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    at = ""
    parts = list(_parts(schema))
    for _ in range(_TRIALS):
        if not parts:
            break
        place, part = parts.pop(0)
        if LLMatcher.validate_grammar(_of_schema({**part, **shared}), limits=_LIMITS) == problem:
            at, parts = at + place, list(_parts(part))
    return at


def _parts(schema: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    found: list[tuple[str, Any]] = []
    for key in _MAPS:
        if isinstance(schema.get(key), Mapping):
            found += [(f"/{key}/{name}", part) for name, part in schema[key].items()]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            found += [(f"/{key}/{index}", part) for index, part in enumerate(schema[key])]
    found += [(f"/{key}", schema[key]) for key in _SINGLES if key in schema]
    return [(place, part) for place, part in found if isinstance(part, Mapping)]


class Grammars:
    """The grammars that a target compiles, for its tokenizer. For any thread."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._eos_token_ids = eos_token_ids
        self._refusal = ""
        if not eos_token_ids:
            self._refusal = "the model has no end token, so nothing can end when its structure does"
            return
        try:
            self._tokenizer = LLTokenizer(
                tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids)
            )
        except ValueError as error:
            self._refusal = f"the model's tokenizer is of no kind that llguidance knows: {error}"

    def start(self, text: str) -> "Grammar":
        """The beginning of an answer with a grammar, compiled or known. Slow; raises GrammarError."""
        if self._refusal:
            raise GrammarError(self._refusal)
        with self._lock:
            compiled = self._compiled.pop(text, None)
        if compiled is None:
            compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
            if compiled.is_error():
                raise GrammarError(compiled.get_error())
        with self._lock:
            self._compiled[text] = compiled
            if len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
            return Grammar(compiled.deep_copy(), self._eos_token_ids)


class Grammar:
    """Where an answer stands in its grammar.

    `observe` and `allowed` raise GrammarError where it is too much to follow.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def observe(self, token: int) -> None:
        """A token became part of the answer; it must have been allowed."""
        self._matcher.consume_token(token)
        self._check()

    def copy(self) -> "Grammar":
        """Another one that stands at the same place."""
        return Grammar(self._matcher.deep_copy(), self._eos_token_ids)

    def allowed(self) -> bytes:
        """For each id of the vocabulary: 0 if it must not come next."""
        mask = self._matcher.compute_logit_bias()
        self._check()
        return mask

    def prune(self, tree: TokenTree) -> TokenTree:
        """The part of a tree that the grammar allows.

        Draws that it does not allow are as if they had never been made: their law is that of the others, and
        whether one is left out depends on nothing that is drawn after it. So they may go without a change of
        the answer's law.
        """
        below = _children(tree)
        laws = dict(enumerate(tree.laws))
        kept: list[int] = []

        def visit(node: int) -> None:
            children = below[node]
            if laws:
                mask = self._matcher.compute_logit_bias()
                allowed = {tree.tokens[child] for child in children if mask[tree.tokens[child]]}
                # Whose law is one object are draws of one drafter.
                left = {id(law): _left_of(law, mask) for law in (laws[c] for c in children)}
            else:
                allowed = self._allowed_of({tree.tokens[child] for child in children})
            for child in children:
                if tree.tokens[child] not in allowed:
                    continue
                kept.append(child)
                if laws:
                    laws[child] = left[id(laws[child])]
                if below.get(child) and self._step(tree.tokens[child]):
                    visit(child)
                    self._matcher.rollback(1)

        if tree:
            visit(ANCHOR)
        if laws:
            tree = replace(tree, laws=tuple(laws.values()))
        return tree.part(sorted(kept))

    def extend(self, tree: TokenTree, most: int) -> TokenTree:
        """The tree with what must follow under the ends of its paths: at most `most` tokens in all.

        They are as certain as what they follow. Of paths the likeliest come first.
        """
        below = _children(tree)
        ends = [node for node in (ANCHOR, *range(len(tree))) if not below.get(node)]
        ends.sort(key=lambda node: 1.0 if node == ANCHOR else tree.scores[node], reverse=True)
        tokens, parents, scores = list(tree.tokens), list(tree.parents), list(tree.scores)
        laws = list(tree.laws)
        for end in ends:
            if len(tokens) - len(tree) >= most:
                break
            path = tree.path(end)
            if any(token in self._eos_token_ids for token in path):
                continue
            taken = self._matcher.try_consume_tokens(path)
            if taken == len(path):
                parent = end
                for token in self._matcher.compute_ff_tokens()[: most - len(tokens) + len(tree)]:
                    scores.append(1.0 if parent == ANCHOR else scores[parent])
                    tokens.append(token)
                    parents.append(parent)
                    parent = len(tokens) - 1
                    if tree.laws:
                        laws.append(Law((token,), (1.0,)))
            self._matcher.rollback(taken)
        return TokenTree(tuple(tokens), tuple(parents), tuple(scores), tuple(laws))

    def _allowed_of(self, tokens: set[int]) -> set[int]:
        """Those of some tokens that may come next."""
        forced = self._matcher.compute_ff_tokens()
        if forced:
            return {forced[0]}
        # Nothing follows an end, so it takes no row either.
        inside = tokens - self._eos_token_ids
        return {token for token in inside if self._matcher.validate_tokens([token])}

    def _step(self, token: int) -> bool:
        """Go on behind an allowed token, unless it ends the answer."""
        return token not in self._eos_token_ids and self._matcher.try_consume_tokens([token]) == 1

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                f"the answer's structure is too much to follow: {self._matcher.get_error()}"
            )


def _left_of(law: Law, mask: bytes) -> Law:
    """A law without the tokens that a mask forbids."""
    left = [(i, p) for i, p in zip(law.ids, law.probabilities, strict=True) if mask[i]]
    total = sum(p for _, p in left) or 1.0
    return Law(tuple(i for i, _ in left), tuple(p / total for _, p in left))


def _children(tree: TokenTree) -> dict[int, list[int]]:
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        below.setdefault(parent, []).append(node)
    return below
