"""What each round of an answer shows to a request that wants to see it, over real workers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.round import Round
from tests import tiny
from tests.harness import Answer, ReplayDrafter, harness, http_client
from workers.draft.drafters.lookup import LookupDrafter
from workers.tree import ANCHOR

tokenizer = tiny.byte_level_tokenizer()
VOCAB = len(tokenizer)
PROMPT = tokenizer("the cat in the hat the cat").input_ids
BODY = {
    "messages": [{"role": "user", "content": "the cat in the hat the cat"}],
    "max_tokens": 40,
    "temperature": 0,
    "return_token_ids": True,
    "skip_special_tokens": False,
    "speculation": {"drafter": ["test"], "stats": True, "rounds": True},
}


def shown(answer: Answer) -> list[Round]:
    return [each for piece in answer.pieces for each in piece.rounds]


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block", "typical"])
async def test_rounds_are_the_answer_and_change_none_of_it(verification: Any) -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), drafter, dtype="float32") as h:
        request = h.request(PROMPT, max_tokens=48, temperature=0.8, seed=3)
        drafter.learn(request, await h.generate(request, speculate=False))
        request = replace(
            request, speculation=replace(request.speculation, verification=verification)
        )
        silent = await h.generate(request)
        told = await h.generate(replace(request, rounds=True))
        if verification == "coupled":
            told.same_as(silent)
        assert shown(silent) == []
        _check_rounds(shown(told), told)
        plain = await h.generate(replace(request, rounds=True), speculate=False)
        assert all(each.committed.draft is None for each in shown(plain))
        assert [t for each in shown(plain) for t in each.committed.tokens] == plain.tokens
        await h.idle()


def _check_rounds(rounds: Sequence[Round], answer: Answer) -> None:
    assert [token for each in rounds for token in each.committed.tokens] == answer.tokens
    length = len(PROMPT)
    saw_rejected = saw_siblings = False
    for each in rounds:
        committed, draft = each.committed, each.committed.draft
        assert committed.base_len == length
        assert committed.features is None
        length += len(committed.tokens)
        assert (draft is None) == (committed.drafted == 0)
        if draft is None:
            assert committed.accepted == 0
            continue
        draft.tree.check(VOCAB, 16)
        assert len(draft.tree) == committed.drafted
        assert len(draft.accepted) == committed.accepted
        path = tuple(draft.tree.tokens[node] for node in draft.accepted)
        assert committed.tokens[: committed.accepted] == path
        assert set(draft.sources) == {"test"}
        assert draft.sources["test"] == tuple(range(len(draft.tree)))
        saw_rejected |= committed.accepted < draft.tree.depth()
        saw_siblings |= draft.tree.parents.count(ANCHOR) > 1
    assert rounds[0].committed.draft is None, "the prefill drafts nothing"
    assert saw_rejected
    assert saw_siblings or answer.stats.draft_tokens == len(answer.tokens)
    assert sum(each.committed.drafted for each in rounds) == answer.stats.draft_tokens
    assert sum(each.proposals for each in rounds) <= answer.stats.proposals
    assert sum(each.hits for each in rounds) <= answer.stats.hits


async def test_who_proposed_a_node_is_known() -> None:
    right, wrong = ReplayDrafter("true", VOCAB), ReplayDrafter("wrong", VOCAB)
    async with harness(tiny.llama(), {"right": right, "wrong": wrong}) as h:
        request = replace(h.request(PROMPT, max_tokens=32), rounds=True)
        plain = await h.generate(request, speculate=False)
        right.learn(request, plain)
        wrong.learn(request, plain)
        both = 0
        for each in shown(await h.generate(request)):
            draft = each.committed.draft
            if draft is not None and set(draft.sources) == {"right", "wrong"}:
                both += 1
                assert set(draft.accepted) <= set(draft.sources["right"])
                assert not set(draft.sources["right"]) & set(draft.sources["wrong"])
                nodes = {*draft.sources["right"], *draft.sources["wrong"]}
                assert nodes == set(range(len(draft.tree)))
        assert both > 2


async def test_drafters_beside_the_target_are_shown_as_well() -> None:
    async with harness(
        tiny.llama(), {"away": LookupDrafter()}, beside={"near": LookupDrafter()}
    ) as h:
        request = replace(h.request(PROMPT, max_tokens=64), rounds=True)
        names = {
            name
            for each in shown(await h.generate(request))
            if each.committed.draft is not None
            for name, nodes in each.committed.draft.sources.items()
            if nodes
        }
        assert names == {"near", "away"}


async def test_rounds_over_http_streamed_and_whole() -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), drafter) as h, http_client(h) as client:
        prompt = (await client.post("/v1/chat/completions", json=BODY)).json()
        tokens = prompt["choices"][0]["token_ids"]
        # No seed: at temperature 0 none matters, but the drafter knows its answers by it.
        body = {**BODY, "seed": 7}
        drafter.answers[tuple(prompt["choices"][0]["prompt_token_ids"]), 7] = tokens
        whole = (await client.post("/v1/chat/completions", json=body)).json()
        choice = whole["choices"][0]
        assert choice["token_ids"] == tokens
        _check_shown(choice["rounds"], choice, whole["speculation"])
        lines = (
            await client.post(
                "/v1/chat/completions",
                json={**body, "stream": True, "stream_options": {"include_usage": True}},
            )
        ).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line and "[DONE]" not in line]
        rounds = [
            each
            for chunk in chunks
            for choice in chunk["choices"]
            for each in choice.get("rounds", ())
        ]
        ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", ())]
        assert ids == tokens
        _check_shown(rounds, {**choice, "token_ids": ids}, chunks[-1]["speculation"])
        without = {**body, "speculation": {"drafter": ["test"]}}
        silent = (await client.post("/v1/chat/completions", json=without)).json()
        assert "rounds" not in silent["choices"][0]
        assert silent["choices"][0]["token_ids"] == tokens


def _check_shown(
    rounds: list[dict[str, Any]], choice: dict[str, Any], stats: dict[str, Any]
) -> None:
    assert [token["id"] for each in rounds for token in each["tokens"]] == choice["token_ids"]
    spelt = bytes(b for each in rounds for token in each["tokens"] for b in token["bytes"])
    assert spelt.decode(errors="replace") == choice["message"]["content"]
    assert len(rounds) == 1 + stats["rounds"]
    assert sum(each["accepted"] for each in rounds) == stats["accepted_tokens"] > 0
    assert sum(len(each["nodes"]) for each in rounds) == stats["draft_tokens"]
    for each in rounds:
        accepted = [node for node in each["nodes"] if node["accepted"]]
        path = [node["id"] for node in accepted]
        assert path == [token["id"] for token in each["tokens"][: each["accepted"]]]
        assert all(node["drafters"] == ["test"] for node in each["nodes"])
        assert all(0 <= node["score"] <= 1 for node in each["nodes"])
        assert all(node["token"] == tokenizer.decode([node["id"]]) for node in each["nodes"])
        assert each["step_ms"] > 0
        assert each["step_rows"] >= 1 + len(each["nodes"])
