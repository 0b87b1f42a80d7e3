"""Suffix decoding and retrieval: no token changes, and no key sees what another was told."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.harness import Answer, Harness, harness
from tests.oracles import assert_saw_everything
from workers.draft.config import SuffixConfig
from workers.draft.drafter import Ask, Drafter
from workers.draft.drafters.datastore import DatastoreDrafter
from workers.draft.drafters.suffix import SuffixDrafter
from workers.draft.group import DrafterGroup
from workers.draft.history import History
from workers.tree import TokenTree

tokenizer = tiny.byte_level_tokenizer()
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello world", "0123456789 " * 8)]
KINDS = ["suffix", "datastore"]


def requests(h: Harness, **options: Any) -> list[Any]:
    return [
        h.request(prompt, seed=seed, max_tokens=64, logprobs=1, **options)
        for seed, prompt in enumerate(PROMPTS)
    ]


def muddled(prompt: Sequence[int], answer: Sequence[int]) -> list[list[int]]:
    """A text that is right in most places, and one that goes other ways from the same places."""
    wrong = [token if i % 7 else (token + 1) % 256 for i, token in enumerate(answer)]
    return [[*prompt, *answer[:20], 1, *answer[20:]], [*prompt, *wrong]]


@pytest.mark.parametrize("beside", [False, True], ids=["elsewhere", "beside"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
@pytest.mark.parametrize("kind", KINDS)
async def test_on_equals_off(
    kind: str, tree: bool, temperature: float, beside: bool, tmp_path: Path
) -> None:
    options = {"tree": tree, "temperature": temperature}
    async with harness(tiny.llama(), {}) as h:
        off = [await h.generate(request, speculate=False) for request in requests(h, **options)]
    texts = [
        text
        for prompt, answer in zip(PROMPTS, off, strict=True)
        for text in muddled(prompt, answer.tokens)
    ]
    made: Drafter
    if kind == "suffix":
        history = History(4096)
        for text in texts:
            history.learn("", text)
        made = SuffixDrafter(history)
    else:
        made = DatastoreDrafter(tiny.datastore(tmp_path / "store", texts), "", None)
    here, there = ({"test": made}, {}) if beside else ({}, {"test": made})
    async with harness(tiny.llama(), there, beside=here) as h:
        spoken = []
        for request, expected in zip(requests(h, **options), off, strict=True):
            answer = await h.generate(request)
            answer.same_as(expected)
            spoken.append(answer)
        assert_saw_everything(spoken)
        await h.idle()


class Listening(SuffixDrafter):
    """Remembers what it proposed that does not occur in the answer itself up to there."""

    def __init__(self) -> None:
        super().__init__(History(4096))
        self.foreign: set[int] = set()

    def propose(self, asks: Sequence[Ask]) -> list[TokenTree | None]:
        trees = super().propose(asks)
        for ask, tree in zip(asks, trees, strict=True):
            assert tree is not None
            self.foreign |= {*tree.tokens} - {*self._sessions[ask.session].tokens}
        return trees


@pytest.mark.parametrize("beside", [False, True], ids=["elsewhere", "beside"])
async def test_a_key_drafts_from_its_own_answers_only(beside: bool) -> None:
    drafter = Listening()
    here, there = ({"test": drafter}, {}) if beside else ({}, {"test": drafter})
    async with harness(tiny.llama(), there, beside=here) as h:

        async def answered(key: str) -> Answer:
            request = h.request(PROMPTS[0], max_tokens=60, temperature=1.0, seed=3)
            drafter.foreign.clear()
            answer = await h.generate(dataclasses.replace(request, key_id=key))
            await h.idle()
            return answer

        first = await answered("a")
        assert not drafter.foreign
        again = await answered("a")
        again.same_as(first)
        assert again.stats.accepted_tokens > 30
        assert len(drafter.foreign) > 10
        for stranger in ("b", ""):
            other = await answered(stranger)
            other.same_as(first)
            assert not drafter.foreign


async def test_they_have_no_weights_to_reload() -> None:
    group = DrafterGroup((SuffixConfig("s", False, 1024),), "", lambda send: send())
    with pytest.raises(ValueError, match="no drafter with weights"):
        await group.reload({"s": "elsewhere"})
