"""Several drafters for one answer: trees merged, one failing, and the choice left to the server."""

import pytest

from tests import tiny
from tests.harness import Harness, ReplayDrafter, harness

tokenizer = tiny.byte_level_tokenizer()
VOCAB = len(tokenizer)
PROMPT = tokenizer("hello world, this is a test").input_ids


class HalfDrafter(ReplayDrafter):
    """Knows every second stretch of the answer, and elsewhere what will not come."""

    def __init__(self, odd: bool) -> None:
        super().__init__("true", VOCAB)
        self._odd = odd

    def _tree(self, ask):
        known = self._sessions[ask.session][0]
        self.style = "true" if len(known) // 6 % 2 == self._odd else "wrong"
        return super()._tree(ask)


async def learn(h: Harness, **options):
    # Long, so that the drafters have come before it is over.
    request = h.request(PROMPT, max_tokens=300, temperature=1.0, seed=9, **options)
    answer = await h.generate(request, speculate=False)
    for drafter in h.drafters.values():
        assert isinstance(drafter, ReplayDrafter)
        drafter.learn(request, answer)
    return request, answer


@pytest.mark.parametrize("beside", [(), ("even",), ("even", "odd")], ids=str)
async def test_trees_of_several_drafters_are_verified_as_one(beside: tuple[str, ...]) -> None:
    """Of two drafters that each know half, every round finds one that knows, wherever they are."""
    made = {"even": HalfDrafter(False), "odd": HalfDrafter(True)}
    here = {name: drafter for name, drafter in made.items() if name in beside}
    there = {name: drafter for name, drafter in made.items() if name not in beside}
    async with harness(tiny.llama(), there, beside=here) as h:
        request, off = await learn(h, max_draft_tokens=16)
        both = await h.generate(request)
        both.same_as(off)
        assert both.stats.drafter == "even+odd"
        # Only the first rounds are without drafts, and only one of two trees is right.
        assert all(rate == 1.0 for rate in both.stats.acceptance_by_depth)
        assert both.stats.accepted_tokens > 200
        # Their rows are verified together: five true ones and a wrong tree beside them.
        assert both.stats.draft_tokens > 2 * both.stats.accepted_tokens
        await h.idle()
    async with harness(tiny.llama(), {"even": HalfDrafter(False)}) as h:
        request, off = await learn(h, max_draft_tokens=16)
        alone = await h.generate(request)
        alone.same_as(off)
        assert alone.stats.rounds > both.stats.rounds
        await h.idle()


async def test_equal_paths_of_two_drafters_take_no_rows_twice() -> None:
    made = {"one": ReplayDrafter("true", VOCAB), "two": ReplayDrafter("true", VOCAB)}
    async with harness(tiny.llama(), made) as h:
        request, off = await learn(h)
        answer = await h.generate(request)
        answer.same_as(off)
        assert answer.stats.draft_tokens == answer.stats.accepted_tokens
        await h.idle()


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("auto", [False, True])
async def test_of_several_drafters_one_may_fail(auto: bool, beside: bool) -> None:
    made = {"good": ReplayDrafter("true", VOCAB), "bad": ReplayDrafter("true", VOCAB)}
    here, there = ({}, made) if beside else (made, {})
    async with harness(tiny.llama(), there, beside=here) as h:
        request, off = await learn(h, auto=auto)
        made["bad"].fail = True
        answer = await h.generate(request)
        answer.same_as(off)
        assert answer.stats.accepted_tokens > 150
        await h.idle()


@pytest.mark.parametrize("beside", [False, True])
async def test_a_drafter_that_can_neither_open_nor_close_costs_its_drafts_only(
    beside: bool,
) -> None:
    """Beside the target it has its turn on the target's own thread."""
    made = {"good": ReplayDrafter("true", VOCAB), "bad": ReplayDrafter("true", VOCAB)}
    here, there = ({}, made) if not beside else (made, {})
    async with harness(tiny.llama(), there, beside=here) as h:
        request, off = await learn(h)

        def fail(*arguments: object) -> None:
            raise RuntimeError("told to fail")

        made["bad"].open = made["bad"].close = fail  # type: ignore[method-assign]
        for _ in range(2):
            answer = await h.generate(request)
            answer.same_as(off)
            assert answer.stats.accepted_tokens > 150
        await h.idle()


@pytest.mark.parametrize("beside", [False, True])
async def test_the_server_leaves_out_what_is_slow_and_useless(beside: bool) -> None:
    made = {"good": ReplayDrafter("true", VOCAB), "slow": ReplayDrafter("wrong", VOCAB)}
    made["slow"].delay_s = 0.05
    slow = {"slow": made["slow"]}
    good = {"good": made["good"]}
    async with harness(tiny.llama(), good if beside else made, beside=slow if beside else {}) as h:
        request, off = await learn(h, auto=True)
        first = await h.generate(request)
        first.same_as(off)
        asked = 0
        original = made["slow"].propose

        def counting(asks):
            nonlocal asked
            asked += 1
            return original(asks)

        made["slow"].propose = counting  # type: ignore[method-assign]
        rounds = 0
        for _ in range(4):
            answer = await h.generate(request)
            answer.same_as(off)
            rounds += answer.stats.rounds
        # At the start of an answer, and then seldom.
        assert 1 <= asked < rounds / 2
        assert answer.stats.accepted_tokens > 150
        await h.idle()


async def test_an_answer_that_nobody_drafts_well_is_decoded_plainly() -> None:
    drafter = ReplayDrafter("wrong", VOCAB)
    drafter.delay_s = 0.02
    async with harness(tiny.llama(), drafter, patient=False) as h:
        request = h.request(PROMPT, max_tokens=300, seed=9, auto=True)
        off = await h.generate(request, speculate=False)
        drafter.learn(request, off)
        on = await h.generate(request)
        on.same_as(off)
        assert on.stats.proposals < on.stats.rounds / 2
        await h.idle()


class Early(ReplayDrafter):
    """Remembers how much of the answer it knew when it was to propose."""

    def __init__(self) -> None:
        super().__init__("true", VOCAB)
        self.known: list[int] = []

    def _tree(self, ask):
        tokens, prompt_len, _ = self._sessions[ask.session]
        self.known.append(len(tokens) - prompt_len)
        return super()._tree(ask)


@pytest.mark.parametrize("beside", [False, True])
async def test_beside_the_target_nobody_drafts_before_the_first_token(beside: bool) -> None:
    """They take turns with it, and whoever reads the prompt first would hold it up."""
    made = Early()
    here, there = ({"test": made}, {}) if beside else ({}, {"test": made})
    async with harness(tiny.llama(), there, beside=here) as h:
        request, off = await learn(h)
        on = await h.generate(request)
        on.same_as(off)
        assert on.stats.accepted_tokens > 100
        assert (0 in made.known) == (not beside)
        await h.idle()
