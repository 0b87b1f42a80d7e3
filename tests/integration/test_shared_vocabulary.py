"""A draft with another tokenizer than its target: what both have is drafted, nothing else changes."""

import pytest

from tests import tiny
from tests.harness import harness
from workers.draft import drafters, models
from workers.draft.config import ModelConfig
from workers.draft.drafters.model import ModelDrafter
from workers.text import TokenBytes
from workers.vocabulary import SharedVocabulary

target = tiny.byte_level_tokenizer()
draft = tiny.byte_fallback_tokenizer()
SAMPLING = [{}, {"temperature": 1.0}]


def test_shared_tokens_have_the_same_bytes_or_the_same_name() -> None:
    shared = SharedVocabulary(target.backend_tokenizer, draft.backend_tokenizer)
    of_target = TokenBytes(target.backend_tokenizer)
    of_draft = TokenBytes(draft.backend_tokenizer)
    special = {tiny.BOS, tiny.EOS, tiny.PAD}
    for theirs, ours in zip(shared.draft_ids, shared.target_ids, strict=True):
        name = draft.convert_ids_to_tokens(theirs)
        if name in special:
            assert target.convert_ids_to_tokens(ours) == name
        else:
            assert of_draft.of(theirs) == of_target.of(ours)
    # All bytes, the merged " a" and the special tokens; no token of the target twice.
    assert len(set(shared.target_ids)) == len(shared.target_ids) == 256 + 1 + 3
    assert draft.convert_tokens_to_ids("a") in shared.draft_ids
    assert draft.convert_tokens_to_ids("<0x61>") not in shared.draft_ids
    assert {*special} <= {draft.convert_ids_to_tokens(i) for i in shared.draft_ids}


@pytest.mark.parametrize("text", ["the cat", "é and ß", "a\nb\t", "😀!", "the the in"])
def test_a_text_reads_the_same_in_the_drafts_tokens(text: str) -> None:
    shared = SharedVocabulary(target.backend_tokenizer, draft.backend_tokenizer)
    of_draft = TokenBytes(draft.backend_tokenizer)
    made = shared.to_draft(target(text).input_ids)
    assert b"".join(of_draft.of(token) for token in made).decode().strip() == text.strip()


async def test_k1_with_a_draft_of_another_tokenizer() -> None:
    loaded = models.load(str(tiny.spelling_llama()), "float32", "cpu", str(tiny.llama()))
    made = ModelDrafter(loaded, num_slots=8192, width=4, steps=3, floor=0.0)
    async with harness(tiny.llama(), made) as h:
        for sampling in SAMPLING:
            request = h.request(target("the cat in").input_ids, max_tokens=60, seed=3, **sampling)
            off = await h.generate(request, speculate=False)
            on = await h.generate(request)
            on.same_as(off)
            assert on.stats.draft_tokens > 100
        await h.idle()


def test_another_tokenizer_needs_consent() -> None:
    config = ModelConfig(
        name="d",
        model=str(tiny.spelling_llama()),
        dtype="float32",
        device="cpu",
        shared_vocabulary=False,
        online=False,
        width=4,
        steps=3,
        floor=0.0,
        num_slots=1024,
        num_threads=0,
    )
    with pytest.raises(ValueError, match="vocabulary: shared"):
        drafters.make(config, str(tiny.llama()))
