"""An answer outlives its target, and messages that come twice, late, garbled or not at all."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from deployments import drafting, lease
from deployments.config import CoordinatorThresholds
from deployments.round import GenerationRequest, Piece
from deployments.stats import Fault
from loadtest.inside.faults import Faults
from loadtest.inside.workers import LocalPool
from tests import tiny
from tests.harness import Answer, Harness, ReplayDrafter, harness
from workers.draft.config import EagleConfig
from workers.draft.drafters.lookup import LookupDrafter
from workers.request import StopRules
from workers.rpc import messages as m
from workers.rpc.connection import DRAFT, TARGET
from workers.rpc.errors import InvalidRequest, Unavailable
from workers.tree import TokenTree

tokenizer = tiny.byte_level_tokenizer()
VOCAB = len(tokenizer)
PROMPT = tokenizer("hello world, this is a test").input_ids

SURFACE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5, "logprobs": 2},
    "sampled, narrowed": {"temperature": 0.8, "seed": 6, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 1.0,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "prompt log-probabilities": {"prompt_logprobs": 1, "logprobs": 0},
    "special tokens shown": {"temperature": 1.0, "seed": 8, "show_special_tokens": True},
}


async def cut_after(h: Harness, request: GenerationRequest, cuts: list[int]) -> Answer:
    """The answer, while its target's connection is cut after so many tokens."""
    generation = h.generation(request)
    answer = Answer(stats=generation.stats)
    cuts = list(cuts)
    async for piece in generation.pieces():
        answer.tokens += piece.tokens
        answer.text += piece.text
        answer.logprobs += piece.logprobs
        answer.prompt_logprobs += piece.prompt_logprobs
        answer.finished = piece.finished
        if cuts and len(answer.tokens) >= cuts[0]:
            del cuts[0]
            await _cut(h)
    answer.check_stats()
    return answer


async def _cut(h: Harness) -> None:
    for connection in h.targets.connections():
        await connection.close()


def resumed(h: Harness) -> int:
    return sum(worker._counters.resumed for worker in h.targets.workers)


@pytest.mark.parametrize("surface", SURFACE)
@pytest.mark.parametrize("speculate", [False, True])
async def test_the_answer_goes_on_on_another_target(surface: str, speculate: bool) -> None:
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), drafter, others=[tiny.llama()]) as h:
        request = h.request(PROMPT, max_tokens=60, **SURFACE[surface])
        off = await h.generate(request, speculate=False)
        drafter.learn(request, off)
        asked = (
            request
            if speculate
            else h.request(PROMPT, max_tokens=60, max_draft_tokens=0, **SURFACE[surface])
        )
        lost = 0
        for cuts in ([1], [2], [7, 20], [33], [11, 12, 13, 14, 40]):
            answer = await cut_after(h, asked, cuts)
            answer.same_as(off)
            lost += answer.stats.faults["target_lost"]
        assert lost >= 8
        assert resumed(h) >= lost - 1
        if speculate:
            assert answer.stats.accepted_tokens > 5
        await h.idle()


async def test_stops_are_found_where_the_cut_goes_through_them() -> None:
    """K4 with a cut at every offset: the text that was held back, and characters that were half there."""
    two = {"others": [tiny.llama()], "patient": False, "slow": 0.001}
    async with harness(tiny.llama(), LookupDrafter(), **two) as h:
        whole = await h.generate(
            h.request(PROMPT, max_tokens=50, temperature=1.0, seed=3), speculate=False
        )
        assert len(whole.text.encode()) != len(whole.text)
        stop = whole.text[20:27]
        for options in (
            {"stop": [stop]},
            {"stop": [stop], "min_tokens": 12},
            {"stop": ["none such"]},
        ):
            request = h.request(PROMPT, max_tokens=50, temperature=1.0, seed=3, **options)
            off = await h.generate(request, speculate=False)
            for after in range(1, len(off.tokens)):
                (await cut_after(h, request, [after])).same_as(off)
        await h.idle()


async def test_a_target_that_stops_is_replaced_by_another() -> None:
    async with harness(tiny.llama(), LookupDrafter(), others=[tiny.llama()]) as h:
        request = h.request(PROMPT, max_tokens=200)
        off = await h.generate(request, speculate=False)
        answers = [asyncio.create_task(h.generate(request)) for _ in range(6)]
        while not all(len(worker._scheduler.running) for worker in h.targets.workers):
            await asyncio.sleep(0.005)
        await h.targets.workers[1].stop()
        for answer in await asyncio.gather(*answers):
            answer.same_as(off)
        assert h.targets.workers[0]._counters.resumed > 0
        (await h.generate(request)).same_as(off)


@pytest.mark.parametrize("place", ["draft", "target"])
async def test_features_flow_again_from_another_target(place: str) -> None:
    head = EagleConfig(
        "test",
        str(tiny.trained_head("eagle3")),
        "float32",
        "cpu",
        64,
        4,
        3,
        0.0,
        4096,
        num_threads=0,
    )
    options: dict[str, Any] = {"drafters": (head,)} if place == "target" else {}
    drafter = head if place == "draft" else {}
    folder = tiny.llama()
    async with harness(folder, drafter, others=[folder], features="three", **options) as h:
        h.drafters = {"test": None}
        request = h.request(tokenizer("hello").input_ids, max_tokens=64)
        off = await h.generate(request, speculate=False)
        whole = await h.generate(request)
        cut = await cut_after(h, request, [4])
        for answer in (whole, cut):
            answer.same_as(off)
            assert answer.stats.accepted_tokens > 8
        assert cut.stats.faults["target_lost"] == 1
        await h.idle()


async def _rest(pieces: AsyncGenerator[Piece]) -> None:
    async for piece in pieces:
        assert piece.finished is None


async def test_without_another_target_of_the_same_weights_it_is_an_error() -> None:
    """Never a false stop, and never other weights."""
    async with harness(tiny.llama(), LookupDrafter(), others=[tiny.llama(seed=1)]) as h:
        h.thresholds = CoordinatorThresholds(failover_wait_s=0.4)
        generation = h.generation(h.request(PROMPT, max_tokens=400))
        pieces = generation.pieces()
        first = await anext(pieces)
        await h.targets.workers[0].stop()
        began = time.monotonic()
        rest = asyncio.create_task(_rest(pieces))
        with pytest.raises(
            Unavailable, match=r"no other with the same weights took over in 0\.4 s"
        ):
            await rest
        assert time.monotonic() - began < 5
        assert first.tokens
        assert generation.stats.finish_reason == "unavailable"


async def test_an_answer_that_loses_every_target_is_given_up() -> None:
    never = Faults(drop=1.0, hit=frozenset(["committed"]))
    async with harness(tiny.llama(), LookupDrafter(), patient=False, target_faults=never) as h:
        with pytest.raises(Unavailable, match="5 targets in a row"):
            await h.generate(h.request(PROMPT))
        await h.idle()


async def test_an_answer_that_is_complete_is_not_gone_on_with() -> None:
    async with harness(tiny.llama(), LookupDrafter()) as h:
        off = await h.generate(h.request(PROMPT, max_tokens=20), speculate=False)

        async def open_with(tokens: list[int]) -> list[Any]:
            heard: list[Any] = []
            over = asyncio.Event()

            class Listens:
                def receive(self, message: Any) -> None:
                    heard.append(message)
                    if isinstance(message, m.Finished | m.Failed):
                        over.set()

                def disconnected(self, error: Exception) -> None:
                    over.set()

            async with h.targets.lease() as lease:
                opened = m.OpenTarget(
                    lease.lease_id,
                    (*PROMPT, *tokens),
                    len(PROMPT),
                    h.request(PROMPT).sampling,
                    StopRules(20),
                )
                lease.connection.open(opened, lambda channel: Listens())
                await asyncio.wait_for(over.wait(), 5)
            return heard

        assert await open_with(off.tokens) == [off.finished]
        refused = (await open_with([*off.tokens, 7]))[0]
        assert refused.code == InvalidRequest.code.name
        assert "ends after" in refused.message
        await h.idle()


KINDS = ("drop", "duplicate", "swap", "corrupt", "delay")


async def same_through_faults(
    h: Harness, drafter: ReplayDrafter, fault: str
) -> tuple[set[str], Counter[Fault]]:
    """Many answers over faulty links, each as it is over a clean one: the messages hit, and what was seen."""
    h.targets.workers[0].leases._claim_seconds = h.drafts.workers[0].leases._claim_seconds = 0.3
    link = h.links[0]
    faults, link.faults = link.faults, Faults()
    requests = [
        h.request(PROMPT[n:], max_tokens=60, temperature=n % 2, seed=n, logprobs=1)
        for n in range(6)
    ]
    plain = [await h.generate(request, speculate=False) for request in requests]
    for request, answer in zip(requests, plain, strict=True):
        drafter.learn(request, answer)
    link.faults = faults
    seen: Counter[Fault] = Counter()
    accepted = 0
    async with asyncio.timeout(60):
        for _ in range(4):
            answers = await asyncio.gather(*(h.generate(request) for request in requests))
            for answer, off in zip(answers, plain, strict=True):
                answer.same_as(off)
                seen += answer.stats.faults
                accepted += answer.stats.accepted_tokens
    assert accepted > 50
    await h.idle(2.0)
    return {kind for done, kind in link.done if done == fault}, seen


@pytest.mark.parametrize("fault", KINDS)
async def test_faults_on_the_way_to_a_target_change_no_token(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1 to R3 between coordinator and target."""
    monkeypatch.setattr(lease, "LAST_WORDS_SECONDS", 0.25)
    drafter = ReplayDrafter("mixed", VOCAB)
    faults = Faults(**{fault: 0.02}, delay_s=0.03)
    async with harness(tiny.llama(), drafter, patient=False, target_faults=faults) as h:
        struck, seen = await same_through_faults(h, drafter, fault)
        assert "committed" in struck
        assert seen["duplicate" if fault == "duplicate" else "target_lost"] > 0


@pytest.mark.parametrize("fault", KINDS)
async def test_faults_on_the_way_to_a_drafter_change_no_token(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R1 to R3 and R9 between coordinator and drafter."""
    monkeypatch.setattr(lease, "LAST_WORDS_SECONDS", 0.25)
    monkeypatch.setattr(drafting, "RETRY_SECONDS", 0.02)
    drafter = ReplayDrafter("mixed", VOCAB)
    faults = Faults(**{fault: 0.05}, delay_s=0.03)
    async with harness(tiny.llama(), drafter, patient=False, draft_faults=faults) as h:
        struck, seen = await same_through_faults(h, drafter, fault)
        assert struck >= {"commit", "proposal"}
        if fault in ("drop", "corrupt"):
            assert seen["draft_lost"] > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_loop_that_dies_hands_its_answers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with harness(tiny.llama(), LookupDrafter(), others=[tiny.llama()]) as h:
        request = h.request(PROMPT, max_tokens=120)
        off = await h.generate(request, speculate=False)
        answers = [asyncio.create_task(h.generate(request)) for _ in range(4)]
        dying = h.targets.workers[1]
        while len(dying._scheduler.running) < 2:
            await asyncio.sleep(0.002)
        monkeypatch.setattr(dying._scheduler, "plan", lambda: 1 / 0)
        for answer in await asyncio.gather(*answers):
            answer.same_as(off)
        assert h.targets.workers[0]._counters.resumed >= 1
        with pytest.raises(RuntimeError, match="loop thread is dead"):
            dying.check_health()
        (await h.generate(request)).same_as(off)


async def test_two_coordinators_share_workers_and_their_sessions_do_not_meet() -> None:
    """R8: the same session numbers on two connections."""
    drafter = ReplayDrafter("mixed", VOCAB)
    async with harness(tiny.llama(), drafter) as h:
        other = Harness(
            LocalPool(TARGET, *h.targets.workers),
            LocalPool(DRAFT, *h.drafts.workers),
            h.drafters,
            (),
        )
        requests = [h.request(PROMPT[n:], max_tokens=50, temperature=1.0, seed=n) for n in range(4)]
        plain = [await h.generate(request, speculate=False) for request in requests]
        for request, answer in zip(requests, plain, strict=True):
            drafter.learn(request, answer)
        made = await asyncio.gather(
            *(at.generate(request) for request in requests for at in (h, other))
        )
        for number, answer in enumerate(made):
            answer.same_as(plain[number // 2])
            assert answer.stats.accepted_tokens > 5
        await other.targets.close()
        await other.drafts.close()
        await h.idle()


async def test_a_hostile_draft_worker_speaks_for_itself_only() -> None:
    """Proposals in the name of a drafter of another pool are not heard."""
    async with harness(tiny.llama(), ReplayDrafter("true", VOCAB)) as h:
        request = h.request(PROMPT, max_tokens=30)
        generation = h.generation(request)
        (seat,) = generation._seats
        heard: list[str] = []
        generation.proposed = lambda proposal: heard.append(proposal.drafter)  # type: ignore[method-assign]
        seat.drafters = frozenset(["test"])
        for name in ("test", "other"):
            seat.proposed(m.Proposal(len(PROMPT), TokenTree(), name))
        assert heard == ["test"]


@pytest.mark.slow
async def test_hundreds_of_answers_that_are_given_up_leave_nothing_on_the_drafter() -> None:
    """R7."""
    async with harness(tiny.llama(), ReplayDrafter("mixed", VOCAB), patient=False) as h:
        rng = random.Random(0)
        for _ in range(50):
            tasks = [
                asyncio.create_task(h.generate(h.request(PROMPT, max_tokens=400)))
                for _ in range(10)
            ]
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await h.idle()
