"""API keys and their limits."""

import hashlib
from pathlib import Path

import pytest
import yaml

from deployments.keys import FORGET_SECONDS, Gate, Key, Limits
from workers.rpc.errors import RateLimited, Unauthenticated

SECRET = "sk-secret"


def key(**limits: int) -> Key:
    return Key(id="team", sha256=hashlib.sha256(SECRET.encode()).hexdigest(), **limits)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_answers_at_once_are_counted_over_all_coordinators() -> None:
    limits = Limits()
    team = key(max_concurrent=3)
    assert await limits.enter("a", team, 2) == ""
    assert await limits.enter("b", team, 1) == ""
    assert "3 answers run and this request wants 1" in await limits.enter("b", team, 1)
    await limits.leave("a", team.id, 2)
    assert "wants 3" in await limits.enter("b", team, 3)
    assert await limits.enter("b", team, 2) == ""


async def test_a_coordinator_that_is_gone_has_taken_its_answers_with_it() -> None:
    clock = Clock()
    limits = Limits(clock)
    team = key(max_concurrent=1)
    assert await limits.enter("a", team, 1) == ""
    clock.now += FORGET_SECONDS - 1
    assert await limits.enter("b", team, 1)
    clock.now += 2
    assert await limits.enter("b", team, 1) == ""


async def test_reports_mend_what_an_actor_forgot() -> None:
    limits = Limits()
    team = key(max_concurrent=2)
    await limits.report("a", {team.id: 2})
    assert await limits.enter("b", team, 1)
    await limits.report("a", {})
    assert await limits.enter("b", team, 1) == ""


async def test_requests_a_minute_are_refilled() -> None:
    clock = Clock()
    limits = Limits(clock)
    team = key(requests_per_minute=6)
    assert [await limits.enter("a", team, 1) for _ in range(6)] == [""] * 6
    assert "6 requests a minute" in await limits.enter("a", team, 1)
    clock.now += 10
    assert await limits.enter("a", team, 1) == ""
    assert await limits.enter("a", team, 1)


def key_file(path: Path, **limits: int) -> str:
    path.write_text(yaml.safe_dump({"keys": [key(**limits).model_dump()]}))
    return str(path)


async def test_the_gate(tmp_path: Path) -> None:
    gate = Gate(Limits(), "a")
    assert gate.identify(None) is None
    gate.read(key_file(tmp_path / "keys.yaml", max_concurrent=1))
    assert gate.guarded
    for wrong in (None, "", "sk-other", SECRET + "x"):
        with pytest.raises(Unauthenticated, match="no valid API key"):
            gate.identify(wrong)
    team = gate.identify(SECRET)
    async with gate.admit(team, 1):
        with pytest.raises(RateLimited, match="'team'"):
            async with gate.admit(team, 1):
                pass
    async with gate.admit(team, 1):
        pass


@pytest.mark.parametrize(
    "content",
    [
        "keys: []",
        "keys: [{id: a}]",
        "keys: [{id: a, sha256: abc}]",
        "- 1",
        "keys: [{id: 'a b', sha256: x}]",
    ],
)
def test_a_file_that_is_unusable_leaves_the_old_keys(tmp_path: Path, content: str) -> None:
    gate = Gate(Limits(), "a")
    gate.read(key_file(tmp_path / "keys.yaml"))
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(ValueError, match="validation error"):
        gate.read(str(tmp_path / "bad.yaml"))
    assert gate.identify(SECRET) is not None
    with pytest.raises(OSError, match="No such file"):
        gate.read(str(tmp_path / "missing.yaml"))
    assert gate.guarded
