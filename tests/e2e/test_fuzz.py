"""Requests of every shape that the OpenAPI document allows, and many that it does not: each is answered."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.e2e.conftest import Server

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

schema = schemathesis.pytest.from_fixture("document")


@pytest.fixture
def document(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.http}/openapi.json")


@schema.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_hangs_and_none_breaks_the_server(case: Any) -> None:
    if isinstance(case.body, dict):
        # What is valid is answered to its end: short.
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], 4)
    answer = case.call(timeout=60)
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
