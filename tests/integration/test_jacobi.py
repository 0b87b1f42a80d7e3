"""Parallel decoding: guesses that the target's own passes refine, until they are what it takes."""

import pytest

from tests import tiny
from tests.harness import harness
from tests.oracles import assert_wanders
from workers.draft.config import JacobiConfig
from workers.draft.drafter import Ask
from workers.draft.drafters.jacobi import JacobiDrafter
from workers.request import SamplingParams
from workers.rpc.messages import Verified
from workers.tree import TokenTree

tokenizer = tiny.byte_level_tokenizer()
PROMPTS = [tokenizer(t).input_ids for t in ("the cat in the hat", "hello", "0123456789 " * 8)]
SAMPLING = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 30}]
DTYPES = ["float32", "bfloat16"]
BESIDE = [JacobiConfig("jacobi", block=8)]


def test_guesses_are_what_the_last_pass_said_behind_them() -> None:
    """By hand: of four guesses one is right; behind the wrong one the pass has said something new."""
    drafter = JacobiDrafter(4)
    drafter.open(1, [1, 2, 3, 4, 5], SamplingParams())
    ask = Ask(1, 8, 8, chain=True)
    (tree,) = drafter.propose([ask])
    assert tree == TokenTree.chain([2, 3, 4, 5], tree.scores)
    drafter.verified(1, Verified(5, tree, (2, 7, 8, 9, 6)))
    drafter.observe(1, [2, 7], [])
    (tree,) = drafter.propose([ask])
    # Said behind the wrong 3 and behind 4; what is missing is copied from the end of the text.
    assert tree.tokens[:2] == (8, 9)
    assert tree.tokens[2:] == (2, 7)
    # A guess that is said again is more likely than one that has moved.
    drafter.verified(1, Verified(7, tree, (5, 9, 1, None, 3)))
    drafter.observe(1, [5], [])
    (again,) = drafter.propose([ask])
    assert again.tokens == (9, 1, 7, 5)
    edges = [b / a for a, b in zip((1.0, *again.scores), again.scores, strict=False)]
    assert edges[0] > edges[1] > edges[2]


def test_rows_that_were_not_verified_leave_their_guesses() -> None:
    drafter = JacobiDrafter(4)
    drafter.open(1, [1, 2, 3, 4], SamplingParams())
    (tree,) = drafter.propose([Ask(1, 8, 8, chain=True)])
    drafter.verified(1, Verified(4, tree.cut(1, 8), (9, 6)))
    drafter.observe(1, [9], [])
    assert drafter.propose([Ask(1, 8, 8, chain=True)])[0].tokens == (6, 3, 4, 9)
    # What is said about another place of the answer is of no use.
    drafter.verified(1, Verified(3, tree, (5,) * 5))
    assert drafter.propose([Ask(1, 8, 2, chain=True)])[0].tokens == (6, 3)
    drafter.close(1)


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
@pytest.mark.parametrize("dtype", DTYPES)
async def test_at_temperature_1_the_noise_makes_guesses_converge(dtype: str, tree: bool) -> None:
    async with harness(tiny.flat_llama(), {}, beside=BESIDE, dtype=dtype) as h:
        request = h.request(PROMPTS[0], max_tokens=100, seed=3, temperature=1.0, tree=tree)
        off = await h.generate(request, speculate=False)
        assert_wanders(off)
        on = await h.generate(request)
        on.same_as(off)
        assert on.stats.mean_accepted_length > 2.0
        await h.idle()


async def test_a_penalised_answer_is_the_same() -> None:
    """Processors with a memory are guessed at for rows that nobody visits."""
    async with harness(tiny.flat_llama(), {}, beside=BESIDE, dtype="float32") as h:
        request = h.request(
            PROMPTS[0], max_tokens=60, seed=1, temperature=1.0, repetition_penalty=1.3, logprobs=1
        )
        off = await h.generate(request, speculate=False)
        on = await h.generate(request)
        on.same_as(off)
        assert on.stats.accepted_tokens > 10
