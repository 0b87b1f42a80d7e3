"""Rounds that overlap: what drafters do while the target verifies, and when they do nothing at all."""

import pytest

from tests import tiny
from tests.harness import ReplayDrafter, harness, http_client
from tests.integration.test_model_drafter import drafter
from workers.pricing import StepTimes
from workers.request import Mode

tokenizer = tiny.byte_level_tokenizer()
PROMPT = tokenizer("the cat in the hat").input_ids
# Seconds of a step during which a tree can grow, on a busy machine too.
LONG = 0.02
VOCAB = 264


@pytest.mark.parametrize("place", ["draft", "target"])
@pytest.mark.parametrize("mode", ["sequential", "pipelined", "multibranch"])
async def test_modes_change_when_is_drafted_and_no_token(mode: Mode, place: str) -> None:
    """A draft that is the target: what grew meanwhile is right, and is there before it is asked for."""
    made = {"test": drafter(tiny.llama(), steps=2)}
    there, here = (made, {}) if place == "draft" else ({}, made)
    async with harness(tiny.llama(), there, beside=here, slow=LONG) as h:
        for sampling in ({}, {"temperature": 1.0}):
            request = h.request(
                PROMPT, max_tokens=60, max_draft_tokens=6, seed=3, mode=mode, **sampling
            )
            off = await h.generate(request, speculate=False)
            on = await h.generate(request)
            on.same_as(off)
            assert on.stats.accepted_tokens > 20
            if mode == "multibranch" and place == "draft":
                assert on.stats.hits > 0
        group = h.target._beside if place == "target" else h.drafts.workers[0]._group
        counters = group.counters
        assert counters["proposals"] > 10
        # Beside the target nothing grows while it verifies: they take turns.
        grows = mode != "sequential" and place == "draft"
        assert (counters["growth_ns"] > 0) == grows
        assert (counters["proposals_again"] > 0) == grows
        await h.idle()


async def test_a_mode_that_grows_hits_more_often_than_one_that_does_not() -> None:
    async with harness(tiny.llama(), drafter(tiny.llama(), steps=1), slow=LONG) as h:
        # Time is dear: what is known is better than what would have to be drafted.
        h.target._scheduler.policy.price = lambda sessions: (0.0, 1e4)  # type: ignore[method-assign]
        rates = {}
        for mode in ("sequential", "multibranch"):
            request = h.request(PROMPT, max_tokens=120, max_draft_tokens=3, mode=mode)
            rates[mode] = (await h.generate(request)).stats.hit_rate
        assert rates["multibranch"] > 2 * rates["sequential"]


async def test_where_no_row_pays_no_draft_worker_hears_a_word() -> None:
    """A saturated target: off costs no message, and the price alone says so."""
    made = ReplayDrafter("true", VOCAB)
    async with harness(tiny.llama(), made, patient=False) as h:
        policy = h.target._scheduler.policy
        policy.times = StepTimes({(1, 0): 0.001, (64, 0): 0.064})
        request = h.request(PROMPT, max_tokens=80, auto=True)
        off = await h.generate(request, speculate=False)
        made.learn(request, off)
        heard = []
        observe = made.observe
        made.observe = lambda *news: (heard.append(news), observe(*news))[1]  # type: ignore[assignment]
        on = await h.generate(request)
        on.same_as(off)
        assert on.stats.rounds > 70
        # Behind a moment in which the target was idle, a row is cheaper.
        assert on.stats.draft_tokens < 10
        assert len(heard) < 5
        assert h.target._counters.waits < 5
        # The next answer knows it from the start: it takes no place on the draft worker at all.
        opened = []
        made.open = lambda *begun: opened.append(begun)  # type: ignore[method-assign]
        again = await h.generate(h.request(PROMPT, max_tokens=80, auto=True))
        again.same_as(off)
        assert not opened
        await h.idle()


async def test_where_no_row_pays_those_beside_the_target_hear_nothing_either() -> None:
    made = ReplayDrafter("true", VOCAB)
    async with harness(tiny.llama(), {}, patient=False, beside={"test": made}) as h:
        policy = h.target._scheduler.policy
        policy.times = StepTimes({(1, 0): 0.001, (64, 0): 0.064})
        request = h.request(PROMPT, max_tokens=80, auto=True)
        off = await h.generate(request, speculate=False)
        await h.generate(request)
        asked, proposals = made.propose, []
        made.propose = lambda asks: (proposals.append(asks), asked(asks))[1]  # type: ignore[assignment]
        on = await h.generate(request)
        on.same_as(off)
        # What it is opened with may be answered once; nothing after that.
        assert len(proposals) <= 1
        assert on.stats.draft_tokens == 0
        await h.idle()


async def test_what_one_step_has_no_room_for_the_next_one_verifies() -> None:
    """The drafter is asked once and far behind: what it has said serves several steps."""
    made = ReplayDrafter("true", VOCAB)
    async with harness(tiny.llama(), made) as h:
        request = h.request(PROMPT, max_tokens=60, max_draft_tokens=2)
        off = await h.generate(request, speculate=False)
        made.learn(request, off)
        on = await h.generate(request)
        on.same_as(off)
        assert on.stats.mean_accepted_length > 2.5
        assert on.stats.draft_tokens <= 2 * on.stats.rounds
        await h.idle()


@pytest.mark.parametrize("asked", [{"enabled": False}, {"max_draft_tokens": 0}, {}])
async def test_answers_without_drafts_say_nothing_of_drafting(asked: dict[str, object]) -> None:
    """Else the target compares plain steps with plain steps, and rests."""
    made = drafter(tiny.llama(), steps=2)
    async with harness(tiny.llama(), made, patient=False) as h, http_client(h) as client:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "speculation": asked}
        (await client.post("/v1/completions", json=body)).raise_for_status()
        learnt = h.target._scheduler.policy._trial()._plain is not None
        assert learnt == (asked == {})


async def test_workers_say_what_happened() -> None:
    made = drafter(tiny.llama(), steps=2)
    async with harness(tiny.llama(), made, slow=LONG) as h, http_client(h) as client:
        body = {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": 60,
            "temperature": 0,
            "speculation": {"mode": "multibranch", "stats": True},
        }
        stats = (await client.post("/v1/completions", json=body)).json()["speculation"]
        target = h.target.status()
        assert target.steps >= stats["rounds"]
        assert target.tokens_accepted == stats["accepted_tokens"] > 0
        assert target.tokens_committed == 60
        assert target.drift > 0
        steps = h.target.recent_steps()
        assert sum(rows for _, rows in steps) == target.rows
        assert sum(seconds for seconds, _ in steps) == pytest.approx(target.step_ns / 1e9)
        assert h.target.recent_steps() == []
        draft = h.drafts.workers[0].status()
        assert draft.proposals > 0
        assert draft.hits > 0
        assert draft.growth_ns > 0
