"""Grammars: what they allow, what they demand, what they refuse, and what they make of drafted trees."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jsonschema
import pytest
import torch

from tests import tiny
from tests.structures import AMBIGUOUS, CHOICES, SCHEMA, STRUCTURES
from tests.unit.test_verification_laws import (
    EXACT,
    VOCAB,
    Context,
    drawings,
    error_over,
    law_of,
)
from workers import grammar, limits, verification
from workers.grammar import Grammar, GrammarError, Grammars
from workers.tree import ANCHOR, Law, TokenTree

tokenizer = tiny.byte_level_tokenizer()
EOS = tokenizer.eos_token_id
GRAMMARS = Grammars(tokenizer.backend_tokenizer, len(tokenizer), frozenset([EOS]))


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer(text).input_ids
    return found


def allowed(state: Grammar) -> set[int]:
    return {token for token, may in enumerate(state.allowed()) if may}


def behind(kind: str, text: str) -> Grammar:
    state = GRAMMARS.start(STRUCTURES[kind][0])
    for token in ids(text):
        state.observe(token)
    return state


def test_json_is_written_as_pythons_own() -> None:
    value = {"name": "é", "age": 3, "kind": "cat", "friends": [{"nickname": "x"}]}
    jsonschema.validate(value, SCHEMA)
    state = behind("json", json.dumps(value, ensure_ascii=False))
    assert allowed(state) == {EOS}
    form = {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}
    state = GRAMMARS.start(grammar.of_json_schema({"type": "array", "x-guidance": form}))
    for token in ids("[ 1\n,2 ]"):
        assert token in allowed(state)
        state.observe(token)


def test_the_end_is_allowed_where_the_structure_is_whole_and_nowhere_else() -> None:
    state = GRAMMARS.start(grammar.of_choice(["ab", "abc"]))
    a, b, c = ids("a") + ids("b") + ids("c")
    for token, others in ((a, set()), (b, set()), (c, {EOS})):
        assert allowed(state) == {token} | others
        state.observe(token)
    assert allowed(state) == {EOS}


def test_each_end_token_ends() -> None:
    several = Grammars(tokenizer.backend_tokenizer, len(tokenizer) + 7, frozenset([EOS, EOS - 1]))
    state = several.start(grammar.of_regex("a+"))
    state.observe(ids("a")[0])
    assert allowed(state) == {ids("a")[0], EOS, EOS - 1}
    assert len(state.allowed()) == len(tokenizer) + 7


def test_a_copy_goes_its_own_way() -> None:
    state = behind("choice", "the cat ")
    other = state.copy()
    other.observe(ids("i")[0])
    assert allowed(state) == {*ids("in"), *ids("i"), *ids("o")}
    assert allowed(other) == {*ids("n")}


@pytest.mark.parametrize(
    ("schema", "place", "problem"),
    [
        ({"properties": {"a": {"type": "strng"}}}, "/properties/a", "strng"),
        (
            {"properties": {"a": {"items": {"type": "string", "pattern": "(x"}}}},
            "/properties/a/items",
            "unclosed group",
        ),
        ({"anyOf": [{}, {"not": {}}]}, "/anyOf/1", "not"),
        (
            {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"uniqueItems": True}}},
            "/properties/a",
            "uniqueItems",
        ),
        ({"$ref": "#/$defs/nope"}, "its root", "nope"),
        (
            {"properties": {f"p{i}": {} for i in range(9)} | {"q": {"items": {"not": {}}}}},
            "/properties/q/items",
            "not",
        ),
        ({"enum": []}, "its root", "empty"),
        ({"required": "a"}, "its root", "required"),
        ({"properties": {"x": {"format": "weird", "type": "string"}}}, "/properties/x", "weird"),
        ({"x-guidance": 3}, "", "x-guidance"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_with_the_place(
    schema: dict[str, Any], place: str, problem: str
) -> None:
    with pytest.raises(GrammarError) as raised:
        grammar.of_json_schema({"type": "object", **schema} if "properties" in schema else schema)
    assert place in str(raised.value)
    assert problem in str(raised.value)


def test_other_kinds_that_cannot_be_compiled() -> None:
    for make, text, problem in (
        (grammar.of_regex, "a(", "unclosed group"),
        (grammar.of_regex, "a(?=b)", "look-around"),
        (grammar.of_text, "start: missing", "missing"),
        (grammar.of_text, 'root ::= "a" missing', "missing"),
        (grammar.of_text, "nonsense", "::="),
    ):
        with pytest.raises(GrammarError, match=problem):
            make(text)
    with pytest.raises(GrammarError, match=str(limits.MAX_GRAMMAR_CHARS)):
        grammar.of_choice(["x" * limits.MAX_GRAMMAR_CHARS])
    with pytest.raises(GrammarError, match=str(limits.MAX_GRAMMAR_CHARS)):
        grammar.of_text('root ::= "' + "x" * limits.MAX_GRAMMAR_CHARS + '"')
    with pytest.raises(GrammarError, match=str(limits.MAX_GRAMMAR_CHARS)):
        grammar.of_json_schema({"enum": ["x" * limits.MAX_GRAMMAR_CHARS]})


def test_what_is_too_much_to_follow_says_so_and_drafts_nothing() -> None:
    state = GRAMMARS.start(grammar.of_text(AMBIGUOUS))
    (a,) = ids("a")
    assert allowed(state) == {a}
    with pytest.raises(GrammarError, match="too much to follow"):
        state.observe(a)
    with pytest.raises(GrammarError, match="too much to follow"):
        state.allowed()
    assert state.prune(TokenTree.chain([a, a], [0.5, 0.4])) == TokenTree()
    assert state.extend(TokenTree(), 5) == TokenTree()
    # Nobody else is harmed.
    assert allowed(GRAMMARS.start(grammar.of_text(AMBIGUOUS))) == {a}


def test_a_model_without_ends_or_with_a_strange_tokenizer_refuses() -> None:
    text = STRUCTURES["regex"][0]
    with pytest.raises(GrammarError, match="no end token"):
        Grammars(tokenizer.backend_tokenizer, len(tokenizer), frozenset()).start(text)


def test_compiled_grammars_are_kept_and_some_are_forgotten() -> None:
    grammars = Grammars(tokenizer.backend_tokenizer, len(tokenizer), frozenset([EOS]))
    for number in range(grammar._COMPILED + 5):
        grammars.start(grammar.of_choice([f"text {number}"]))
        grammars.start(grammar.of_choice(["text 0"]))
    assert len(grammars._compiled) == grammar._COMPILED
    assert grammar.of_choice(["text 0"]) in grammars._compiled
    assert grammar.of_choice(["text 1"]) not in grammars._compiled


def test_byte_fallback_tokenizers_are_known() -> None:
    other = tiny.byte_fallback_tokenizer()
    grammars = Grammars(other.backend_tokenizer, len(other), frozenset([other.eos_token_id]))
    state = grammars.start(grammar.of_choice(["a cat"]))
    said = b""
    for _ in range(12):
        (token, *_) = allowed(state)
        if token == other.eos_token_id:
            break
        said += other.decode([token]).encode()
        state.observe(token)
    assert said.decode().replace(" ", "") == "acat"


def test_what_is_forbidden_goes_and_what_is_below_it() -> None:
    state = behind("choice", "the cat ")
    i, n, o, x, blank = (ids(c)[0] for c in ("i", "n", "o", "x", " "))
    tokens = (x, i, o, n, x, EOS, blank, n)
    parents = (-1, -1, -1, 0, 1, 1, 2, 2)
    tree = TokenTree(tokens, parents, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2))
    pruned = state.prune(tree)
    # "on" is the only way behind "o": a blank is not.
    assert pruned == TokenTree((i, o, n), (-1, -1, 1), (0.8, 0.7, 0.2))
    assert allowed(state) == {*ids("in"), i, o}
    assert state.prune(TokenTree()) == TokenTree()
    assert state.prune(pruned) is pruned


def test_what_must_follow_is_added_under_every_end() -> None:
    state = behind("choice", "the cat ")
    i, o = ids("i")[0], ids("o")[0]
    tree = TokenTree((i, o), (-1, -1), (0.5, 0.25))
    grown = state.extend(tree, 20)
    paths = {tokenizer.decode(grown.path(node)) for node in range(len(grown))}
    assert {"in the hat", "on the mat"} <= paths
    grown.check(len(tokenizer), 100)
    assert set(grown.scores) == {0.5, 0.25}
    few = state.extend(tree, 3)
    assert len(few) == 5
    # The likelier path comes first.
    assert sum(score == 0.5 for score in few.scores) == 4
    assert state.extend(tree, 0) == tree
    forced = behind("gbnf", "").extend(TokenTree(), 50)
    assert tokenizer.decode(forced.tokens) == "yes, the "
    assert forced.parents == tuple(range(-1, len(forced) - 1))
    assert set(forced.scores) == {1.0}
    assert behind("choice", CHOICES[2]).extend(TokenTree(), 9) == TokenTree()


def test_under_drawn_tokens_what_must_follow_has_a_law_of_its_own() -> None:
    state = behind("choice", "the cat ")
    i, o, x = ids("i")[0], ids("o")[0], ids("x")[0]
    law = Law((x, o, i), (0.5, 0.3, 0.2))
    tree = TokenTree((x, i), (-1, -1), (0.5, 0.5), (law, law))
    pruned = state.prune(tree)
    assert pruned.tokens == (i,)
    assert pruned.laws[0].ids == (o, i)
    assert pruned.laws[0].probabilities == pytest.approx((0.6, 0.4))
    grown = state.extend(pruned, 4)
    assert len(grown.laws) == len(grown) == 5
    assert grown.laws[1].ids == (grown.tokens[1],)
    assert grown.laws[1].probabilities == (1.0,)
    grown.check(len(tokenizer), 100)


class Forbidding:
    """A matcher that forbids a token behind each context."""

    def __init__(self) -> None:
        self.context: Context = ()

    def mask(self) -> list[int]:
        forbidden = (sum(self.context) + 1) % VOCAB
        return [int(token != forbidden) for token in range(VOCAB)]

    def compute_logit_bias(self) -> bytes:
        return bytes(self.mask())

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        self.context += tuple(tokens)
        return len(tokens)

    def rollback(self, count: int) -> None:
        self.context = self.context[: len(self.context) - count]


def masked_law(context: Context) -> torch.Tensor:
    matcher = Forbidding()
    matcher.context = context
    law = law_of("p", context) * torch.tensor(matcher.mask())
    return law / law.sum()


@pytest.mark.parametrize("cut", [None, 2])
@pytest.mark.parametrize(
    ("rule", "width", "depth"),
    [
        (verification.rejection, 1, 1),
        (verification.rejection, 1, 3),
        (verification.rejection, 2, 1),
        (verification.rejection, 3, 1),
        (verification.rejection, 2, 2),
        (verification.block, 1, 1),
        (verification.block, 1, 3),
    ],
)
def test_pruned_draws_keep_the_law(rule: Any, width: int, depth: int, cut: int | None) -> None:
    """By enumeration: draws that the mask forbids, taken out, leave the law of the masked target."""

    def pruned() -> Iterator[tuple[float, TokenTree]]:
        for weight, drawn in drawings(width, depth):
            state = Grammar(cast(Any, Forbidding()), frozenset())
            tree = state.prune(drawn)
            yield weight, tree if cut is None else tree.cut(cut, depth)

    worst, accepted = error_over(pruned(), rule, depth, masked_law)
    assert accepted > 0
    assert worst < EXACT


def test_paths_and_parts_of_trees() -> None:
    tree = TokenTree((5, 6, 7), (ANCHOR, 0, 0), (0.9, 0.8, 0.7))
    assert tree.path(ANCHOR) == []
    assert tree.path(2) == [5, 7]
    assert tree.part([0, 2]) == TokenTree((5, 7), (ANCHOR, 0), (0.9, 0.7))
    assert tree.part([0, 1, 2]) is tree
