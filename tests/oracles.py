"""What an oracle run must have seen, or its silence means nothing."""

from collections.abc import Iterable

from tests.harness import Answer


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
