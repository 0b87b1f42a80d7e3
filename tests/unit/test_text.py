import random

import pytest

from tests import tiny
from workers.text import Detokenizer, StopStrings

TOKENIZERS = {
    "byte level": tiny.byte_level_tokenizer,
    "byte fallback": tiny.byte_fallback_tokenizer,
}
TEXTS = [
    "the cat in the hat",
    "héllo wörld, naïve café",
    "emoji 👍🏽 and 日本語 text",
    "a" * 40 + "é" * 20,
    " leading and trailing ",
    "\n\nnew\tlines \n",
    "",
]


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text_of_all_tokens(make, text: str) -> None:
    wrapped = make()
    tokenizer = wrapped.backend_tokenizer
    ids = tokenizer.encode("a b " + text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    for start in range(len(ids)):
        detokenizer = Detokenizer(tokenizer, ids[:start])
        pieces = [detokenizer.add(token) for token in ids[start:]]
        pieces.append(detokenizer.flush())
        before = tokenizer.decode(ids[:start])
        if not before.endswith("�"):
            assert before + "".join(pieces) == whole


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_any_bytes_come_out_as_the_tokenizer_decodes_them(make) -> None:
    wrapped = make()
    tokenizer = wrapped.backend_tokenizer
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(len(wrapped)) for _ in range(rng.randrange(1, 30))]
        detokenizer = Detokenizer(tokenizer, [])
        text = "".join(detokenizer.add(token) for token in ids) + detokenizer.flush()
        if make is tiny.byte_level_tokenizer:
            assert text == tokenizer.decode(ids, skip_special_tokens=True)
        else:
            # A run of byte tokens is decoded as a whole there: bytes that come later can spoil a
            # character that was complete. What was readable stays readable.
            readable = tokenizer.decode(ids, skip_special_tokens=True).replace("�", "")
            assert set(readable) <= set(text)


def test_a_character_is_never_cut() -> None:
    tokenizer = tiny.byte_level_tokenizer().backend_tokenizer
    ids = tokenizer.encode("👍").ids
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.add(token) for token in ids] == ["", "", "", "👍"]


def test_special_tokens_have_no_text_and_spoil_nothing() -> None:
    wrapped = tiny.byte_fallback_tokenizer()
    tokenizer = wrapped.backend_tokenizer
    ids = tokenizer.encode("a b").ids
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.add(t) for t in (ids[0], wrapped.eos_token_id, *ids[1:])]
    assert "".join(pieces) + detokenizer.flush() == "a b"


def cut_by_hand(text: str, strings: tuple[str, ...]) -> tuple[str, str | None]:
    hits = [(text.find(s), s) for s in strings if s in text]
    if not hits:
        return text, None
    at, found = min(hits)
    return text[:at], found


@pytest.mark.parametrize("strings", [("end",), ("aab", "ab"), ("\n\n", "###"), ("é",), ("aaa",)])
def test_stop_strings_are_found_across_any_pieces(strings: tuple[str, ...]) -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(500):
        text = "".join(rng.choice("abend\n#é") for _ in range(rng.randrange(20)))
        stops = StopStrings(strings)
        shown, rest = "", text
        while rest and stops.found is None:
            size = rng.randrange(1, 4)
            piece, rest = rest[:size], rest[size:]
            shown += stops.add(piece)
            # What is held back is no more than could still become a stop string.
            assert len(stops.held_back) < max(map(len, strings))
        fed = text[: len(text) - len(rest)]
        expected, found = cut_by_hand(fed, strings)
        assert shown + stops.flush() == expected
        assert stops.found == found
        seen.add(found)
    assert len(seen) > 1
