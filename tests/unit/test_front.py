"""The front door's parts: schema, tokenizer, statistics."""

from typing import Any

import pytest
from pydantic import ValidationError

from deployments.openai.schema import _NEUTRAL, ChatBody, CompletionBody
from deployments.stats import RequestStats
from deployments.tokenizer import PromptTokenizer
from protos import speculation_pb2 as pb
from tests import tiny
from workers.rpc import messages as m
from workers.rpc.errors import InvalidRequest

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("name", sorted(_NEUTRAL))
def test_what_is_not_supported_is_accepted_neutral_and_refused_else(name: str) -> None:
    for value in (None, *_NEUTRAL[name]):
        ChatBody.model_validate({**HELLO, name: value})
    with pytest.raises(ValidationError, match=name):
        ChatBody.model_validate({**HELLO, name: {"something": "else"}})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_every_form_of_prompt(prompt: Any, expected: list[Any]) -> None:
    assert CompletionBody.model_validate({"prompt": prompt}).prompts() == expected


@pytest.mark.parametrize("prompt", [None, [], [[]], [1.5], 3, ["a", 1], [[1], "b"], {"a": 1}])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"prompt": prompt})


def files(tokenizer: Any, **changes: Any) -> pb.Tokenizer:
    return pb.Tokenizer(
        **{
            "tokenizer_json": tokenizer.backend_tokenizer.to_str().encode(),
            "chat_template": tokenizer.chat_template,
            "special_tokens": {"bos_token": tiny.BOS, "eos_token": tiny.EOS},
            **changes,
        }
    )


async def test_chats_are_rendered_as_transformers_renders_them() -> None:
    tokenizer = tiny.byte_level_tokenizer()
    template = (
        "{{ bos_token }}{%- for message in messages %}\n"
        "    {%- if loop.first and message.role != 'system' %}[default]{% endif %}\n"
        "{{ message['role'] | upper }}: {{ message['content'] | trim | tojson }}\n"
        "    {%- if loop.last %}{% break %}{% endif %}\n"
        "{%- endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer.chat_template = template
    messages = [
        {"role": "user", "content": ' <b> "é" & </b> '},
        {"role": "assistant", "content": "yes"},
    ]
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert await PromptTokenizer(files(tokenizer)).encode_chat(messages) == expected


async def test_a_template_that_refuses_or_is_missing_is_a_clear_error() -> None:
    tokenizer = tiny.byte_level_tokenizer()
    refusing = files(tokenizer, chat_template="{{ raise_exception('only one message, please') }}")
    with pytest.raises(InvalidRequest, match="only one message, please"):
        await PromptTokenizer(refusing).encode_chat(HELLO["messages"])
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        await PromptTokenizer(files(tokenizer, chat_template="")).encode_chat([])
    escaping = files(tokenizer, chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest):
        await PromptTokenizer(escaping).encode_chat([])


@pytest.mark.parametrize("make", [tiny.byte_level_tokenizer, tiny.byte_fallback_tokenizer])
async def test_bytes_of_tokens_add_up_to_the_text(make: Any) -> None:
    tokenizer = PromptTokenizer(files(make()))
    text = "the hat é 👍"
    ids = await tokenizer.encode(text)
    joined = b"".join(tokenizer.bytes_of(token) for token in ids)
    assert joined.decode().strip() == text


def committed(accepted: int, tested: int, drafted: int, step_ms: float = 20.0) -> m.Committed:
    tokens = tuple(range(accepted + 1))
    timings = m.TargetTimings(0, int(step_ms * 1e6), 1)
    return m.Committed(9, tokens, accepted, drafted, tested, "", "", timings=timings)


def test_statistics_by_depth() -> None:
    stats = RequestStats()
    for accepted, tested in ((0, 1), (2, 3), (3, 3), (0, 0)):
        stats.committed(committed(accepted, tested, 4 if tested else 0))
    assert stats.rounds == 4
    assert stats.draft_tokens == 12
    assert stats.accepted_tokens == 5
    assert stats.mean_accepted_length == 9 / 4
    assert stats.acceptance_by_depth == [2 / 3, 1.0, 0.5]
    total = RequestStats()
    total.add(stats)
    total.add(stats)
    assert total.acceptance_by_depth == stats.acceptance_by_depth
    assert total.rounds == 8
