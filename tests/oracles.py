"""What an oracle run must have seen, or its silence means nothing."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deployments.round import GenerationRequest
from tests.harness import Answer, Harness


async def assert_company_changes_nothing(
    h: Harness, prompts: Sequence[Sequence[int]], sampling: Sequence[Mapping[str, Any]]
) -> list[Answer]:
    """Answers alone and without speculation, and all at once with it: the same (oracles K1 and K6).

    Returns the latter.
    """
    requests, alone = [], []
    for seed, prompt in enumerate(prompts):
        request = h.request(
            prompt, max_tokens=40, seed=seed, logprobs=1, **sampling[seed % len(sampling)]
        )
        requests.append(request)
        alone.append(await h.generate(request, speculate=False))
    together = await asyncio.gather(*(h.generate(request) for request in requests))
    for answer, expected in zip(together, alone, strict=True):
        answer.same_as(expected)
    assert_saw_everything(together)
    return together


async def assert_always_right(h: Harness, request: GenerationRequest, least: int) -> Answer:
    """A draft that is the target is never rejected on the right path (oracle K2); the drafted answer."""
    off = await h.generate(request, speculate=False)
    on = await h.generate(request)
    on.same_as(off)
    assert all(rate == 1.0 for rate in on.stats.acceptance_by_depth)
    assert on.stats.accepted_tokens > least
    return on


async def assert_drafts_until_full(h: Harness, request: GenerationRequest, room: int) -> None:
    """A draft whose cache or context ends drafts until then, and the answer goes on."""
    off = await h.generate(request, speculate=False)
    on = await h.generate(request)
    on.same_as(off)
    assert 0 < on.stats.accepted_tokens < room
    await h.idle()


def assert_saw_everything(answers: Iterable[Answer]) -> None:
    """Accepted, rejected and bonus tokens, and a path of depth 3 or more."""
    answers = list(answers)
    accepted = sum(answer.stats.accepted_tokens for answer in answers)
    drafted = sum(answer.stats.draft_tokens for answer in answers)
    rounds = sum(answer.stats.rounds for answer in answers)
    committed = sum(answer.stats.committed_tokens for answer in answers)
    assert accepted > 0
    assert drafted > accepted
    assert committed > accepted
    assert rounds < committed
    assert any(len(rates) >= 3 and rates[2] > 0 for rates in map(_rates, answers))


def assert_wanders(answer: Answer) -> None:
    """An answer that repeats itself would hide faults."""
    assert len(set(answer.tokens)) >= min(20, len(answer.tokens) // 2)


def _rates(answer: Answer) -> list[float]:
    return answer.stats.acceptance_by_depth
