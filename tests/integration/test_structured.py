"""Answers with a structure: exact under speculation, in any company, on any target, wherever they end."""

import asyncio
import json
from typing import Any

import pytest
import torch

from tests import tiny
from tests.harness import Answer, Harness, ReplayDrafter, harness
from tests.oracles import assert_company_changes_nothing, assert_saw_everything
from tests.structures import AMBIGUOUS, STRUCTURES
from workers import grammar
from workers.draft.drafter import Drafter
from workers.draft.drafters.eagle import EagleDrafter
from workers.draft.drafters.jacobi import JacobiDrafter
from workers.draft.drafters.lookup import LookupDrafter
from workers.draft.eagle import load_head
from workers.draft.head_runner import HeadRunner
from workers.rpc.errors import InvalidRequest

tokenizer = tiny.byte_level_tokenizer()
VOCAB = len(tokenizer)
PROMPT = tokenizer('the cat in the hat: {"name": "the hat", "age": 12, "kind": "dog"}').input_ids
ANYTHING = grammar.of_json_schema({"type": "object"})


def head() -> EagleDrafter:
    target = tiny.llama()
    runner = HeadRunner(load_head(tiny.trained_head("eagle3"), target), torch.float32, "cpu", 64)
    return EagleDrafter(runner, "", num_slots=4096, window=64, width=4, steps=3, floor=0.0)


def drafters(which: str) -> dict[str, Drafter]:
    lookup = LookupDrafter()
    return {"lookup": lookup} if which == "lookup" else {"lookup": lookup, "head": head()}


def fits(kind: str, answer: Answer) -> None:
    """A whole answer has its structure, and then ends."""
    assert answer.finished is not None
    assert answer.finished.reason == "stop"
    assert answer.finished.stop_token == tokenizer.eos_token_id
    assert STRUCTURES[kind][1](answer.text)


async def pair(h: Harness, **options: Any) -> tuple[Answer, Answer]:
    """The answer without and with drafts; a drafter that replays learns it in between."""
    request = h.request(PROMPT, **{"max_tokens": 300, "logprobs": 1, **options})
    off = await h.generate(request, speculate=False)
    for drafter in h.drafters.values():
        if isinstance(drafter, ReplayDrafter):
            drafter.learn(request, off)
    on = await h.generate(request)
    on.same_as(off)
    return off, on


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("which", ["lookup", "both", "mixed"])
async def test_k1_on_equals_off(which: str, temperature: float) -> None:
    made = {"mixed": ReplayDrafter("mixed", VOCAB)} if which == "mixed" else drafters(which)
    async with harness(tiny.llama(), made, features="three") as h:
        spoken = []
        for kind, (text, _) in STRUCTURES.items():
            for seed in range(3 if which == "mixed" and temperature else 1):
                off, on = await pair(h, grammar=text, temperature=temperature, seed=seed)
                fits(kind, off)
                assert off.stats.draft_tokens == 0
                assert on.stats.accepted_tokens > 0
                spoken.append(on)
        assert_saw_everything(spoken)
        await h.idle()


@pytest.mark.parametrize("beside", [False, True], ids=["elsewhere", "beside"])
@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
async def test_k3_drafts_that_the_grammar_forbids_take_no_row(beside: bool, tree: bool) -> None:
    drafter = ReplayDrafter("wrong", VOCAB)
    here, there = ({"wrong": drafter}, {}) if beside else ({}, {"wrong": drafter})
    async with harness(tiny.llama(), there, beside=here) as h:
        text = grammar.of_choice(["the cat in the hat", "one"])
        for temperature in (0.0, 1.0):
            off, on = await pair(h, grammar=text, temperature=temperature, tree=tree, seed=4)
            # All that was not certain by itself was drafted wrongly, and is forbidden.
            assert on.stats.draft_tokens == on.stats.accepted_tokens
            assert off.text == "the cat in the hat" or off.text == "one"
        await h.idle()


async def test_what_must_follow_is_drafted_without_any_drafter() -> None:
    """Nobody drafts but the grammar: many tokens a round; with speculation off, none."""
    async with harness(tiny.llama(), {}, patient=False) as h:
        text = grammar.of_json_schema({"const": {"the cat": "in the hat", "and": "on the mat"}})
        off, on = await pair(h, grammar=text)
        assert json.loads(on.text) == {"the cat": "in the hat", "and": "on the mat"}
        assert on.stats.drafter == "grammar"
        assert on.stats.accepted_tokens == on.stats.draft_tokens > 20
        assert on.stats.rounds < off.stats.rounds / 5
        chain, narrow = await pair(h, grammar=text, tree=False, max_draft_tokens=2)
        assert narrow.stats.mean_accepted_length > 2.5
        assert chain.stats.drafter == ""
        await h.idle()


@pytest.mark.parametrize("verification", ["rejection", "block", "typical"])
async def test_other_rules_of_verification_keep_the_structure(verification: Any) -> None:
    made = drafters("both")
    async with harness(tiny.llama(), made, features="three", patient=False) as h:
        for kind, (text, _) in STRUCTURES.items():
            for seed in range(2):
                request = h.request(
                    PROMPT,
                    grammar=text,
                    temperature=1.0,
                    seed=seed,
                    max_tokens=300,
                    verification=verification,
                    tree=verification != "block",
                )
                fits(kind, await h.generate(request))
        await h.idle()


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": ((tokenizer.eos_token_id, 100.0),)},
        {"logit_bias": tuple((token, 100.0) for token in range(60, 70))},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.2},
        {"prompt_logprobs": 1, "logprobs": 3, "show_special_tokens": True},
        {"choice": 3},
    ],
    ids=str,
)
async def test_with_every_other_parameter(options: dict[str, Any]) -> None:
    made = {"mixed": ReplayDrafter("mixed", VOCAB)}
    async with harness(tiny.llama(), made) as h:
        for kind, (text, _) in STRUCTURES.items():
            off, _ = await pair(h, grammar=text, temperature=1.0, seed=2, **options)
            fits(kind, off)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", STRUCTURES)
async def test_k4_an_end_at_every_place(kind: str, temperature: float) -> None:
    made = {"true": ReplayDrafter("true", VOCAB)}
    async with harness(tiny.llama(), made, dtype="bfloat16", slow=0.0) as h:
        options: dict[str, Any] = {
            "grammar": STRUCTURES[kind][0],
            "temperature": temperature,
            "seed": 1,
        }
        whole, _ = await pair(h, **options)
        for end in range(1, min(len(whole.tokens), 24)):
            ends: list[dict[str, Any]] = [{"max_tokens": end}]
            token = whole.tokens[end - 1]
            if token not in whole.tokens[: end - 1]:
                ends.append({"stop_token_ids": [token]})
            for ended in ends:
                _, on = await pair(h, **options, **ended)
                assert on.tokens == whole.tokens[:end]
                assert on.finished is not None
                assert on.finished.reason == ("length" if "max_tokens" in ended else "stop")
        stop = whole.text[len(whole.text) // 2 :][:4]
        _, on = await pair(h, **options, stop=[stop])
        assert on.text == whole.text[: whole.text.index(stop)]
        await h.idle()


async def test_k6_company_changes_nothing() -> None:
    """Structures of every kind at once, and answers without; some go away in between."""
    async with harness(
        tiny.llama(), drafters("both"), features="three", max_num_batched_tokens=64, max_num_seqs=6
    ) as h:
        kinds = [{"grammar": text} for text, _ in STRUCTURES.values()]
        sampling = [
            {**kind, "temperature": temperature}
            for temperature in (0.0, 1.0)
            for kind in (*kinds, {}, {"grammar": ANYTHING})
        ]

        async def cancelled(after: int) -> None:
            request = h.request(PROMPT, grammar=ANYTHING, temperature=1.0, max_tokens=200)
            seen = 0
            async for piece in h.generation(request).pieces():
                seen += len(piece.tokens)
                if seen >= after:
                    break

        disturbers = [asyncio.create_task(cancelled(after)) for after in (1, 5, 9, 30)]
        prompts = [PROMPT[i:] for i in range(len(sampling))]
        await assert_company_changes_nothing(h, prompts, sampling)
        await asyncio.gather(*disturbers)
        await h.idle()


async def test_the_answer_goes_on_on_another_target() -> None:
    made = {"mixed": ReplayDrafter("mixed", VOCAB)}
    async with harness(tiny.llama(), made, others=[tiny.llama()]) as h:
        for kind in ("json", "regex"):
            text = STRUCTURES[kind][0]
            off, _ = await pair(h, grammar=text, temperature=1.0, seed=7)
            request = h.request(PROMPT, grammar=text, temperature=1.0, seed=7, max_tokens=300)
            for cut in (1, 6):
                generation = h.generation(request)
                tokens: list[int] = []
                said = ""
                async for piece in generation.pieces():
                    tokens += piece.tokens
                    said += piece.text
                    if len(tokens) >= cut and not generation.stats.faults["target_lost"]:
                        for connection in h.targets.connections():
                            await connection.close()
                assert tokens == off.tokens
                assert STRUCTURES[kind][1](said)
        assert sum(worker._counters.resumed for worker in h.targets.workers) >= 3
        await h.idle()


async def test_guesses_of_the_targets_own_rows() -> None:
    """Drafters that read what all rows say: those know nothing of the grammar, and harm nothing."""
    async with harness(tiny.llama(), {}, beside={"jacobi": JacobiDrafter(8)}) as h:
        for kind, (text, _) in STRUCTURES.items():
            off, on = await pair(h, grammar=text, temperature=1.0, seed=3)
            fits(kind, off)
            assert on.stats.draft_tokens > 0


async def test_a_grammar_that_does_not_compile_harms_nobody() -> None:
    """The front refuses it before; a target that gets one says what is wrong, and goes on."""
    async with harness(tiny.llama(), LookupDrafter()) as h:
        good = h.request(PROMPT, grammar=STRUCTURES["regex"][0])
        bad = h.request(PROMPT, grammar='start: "a" missing')
        results = await asyncio.gather(
            h.generate(good), h.generate(bad), h.generate(good), return_exceptions=True
        )
        assert isinstance(results[1], InvalidRequest)
        assert "missing" in str(results[1])
        assert isinstance(results[0], Answer)
        assert isinstance(results[2], Answer)
        fits("regex", results[0])
        results[0].same_as(results[2])
        much = h.request(PROMPT, grammar=grammar.of_text(AMBIGUOUS))
        with pytest.raises(InvalidRequest, match="too much to follow"):
            await h.generate(much)
        await h.idle()


async def test_an_answer_may_go_while_its_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with harness(tiny.llama(), LookupDrafter()) as h:
        grammars, started = h.target._grammars, asyncio.Event()
        event_loop = asyncio.get_running_loop()
        release, compiled = asyncio.Event(), grammars.start

        def slow(text: str) -> grammar.Grammar:
            event_loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(release.wait(), event_loop).result()
            return compiled(text)

        monkeypatch.setattr(grammars, "start", slow)
        request = h.request(PROMPT, grammar=STRUCTURES["regex"][0])
        leaving = asyncio.create_task(h.generate(request))
        await started.wait()
        # Others do not wait for it.
        await h.generate(h.request(PROMPT, max_tokens=5))
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        release.set()
        await h.idle()
