"""Clients that others wrote, before a real server: what they ask for in their own way is answered."""

import importlib
from typing import Any

import pytest

from tests.e2e.conftest import Server

pytestmark = pytest.mark.e2e

ASK = [{"role": "user", "content": "Say hello in French."}]
OPTIONS: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "seed": 1}


def expected(server: Server) -> str:
    answer = server.client.chat.completions.create(model=server.model, messages=ASK, **OPTIONS)
    text = answer.choices[0].message.content
    assert text
    return text


def test_litellm(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would fetch a list of prices.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = importlib.import_module("litellm")
    common = {
        "model": f"openai/{server.model}",
        "api_base": f"{server.http}/v1",
        "api_key": "none",
        "messages": ASK,
        **OPTIONS,
    }
    text = expected(server)
    whole = litellm.completion(**common)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens > 0
    chunks = litellm.completion(**common, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    predicted = litellm.completion(**common, prediction={"type": "content", "content": text})
    assert predicted.choices[0].message.content == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 0
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**common, "temperature": 9})


def test_langchain(server: Server) -> None:
    langchain = importlib.import_module("langchain_openai")
    chat = langchain.ChatOpenAI(
        model=server.model, base_url=f"{server.http}/v1", api_key="none", **OPTIONS
    )
    text = expected(server)
    said = chat.invoke(ASK)
    assert said.content == text
    assert said.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(ASK)) == text
    # What it has said goes back with the next question, in its own form.
    again = chat.invoke([*ASK, said, {"role": "user", "content": "And in German?"}])
    assert again.content
    both = chat.batch([ASK, ASK])
    assert [answer.content for answer in both] == [text, text]
