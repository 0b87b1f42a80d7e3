"""Requests of every shape that the OpenAPI document allows, and many that it does not: each is answered."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.e2e.conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]


def statuses(operation: Any, mode: GenerationMode) -> set[int]:
    """Ask many things of an operation; the statuses that came."""
    seen: set[int] = set()

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            # What is valid is answered to its end: short.
            if case.body.get("max_tokens") is None and not case.body.get("max_completion_tokens"):
                case.body["max_tokens"] = 4
            for name in ("max_tokens", "max_completion_tokens", "n"):
                if isinstance(case.body.get(name), int):
                    case.body[name] = min(case.body[name], 4)
        answer = case.call(timeout=60)
        seen.add(answer.status_code)
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    ask()
    return seen


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_request_hangs_and_none_breaks_the_server(
    server: Server, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.http}/openapi.json")
    assert 400 in statuses(schema[path]["POST"], mode)
