"""Log-probabilities in the two shapes of OpenAI's API."""

from collections.abc import Sequence
from typing import Any

from deployments.tokenizer import PromptTokenizer
from workers.rpc import messages as m


def chat_logprobs(
    tokenizer: PromptTokenizer, tokens: Sequence[int], entries: Sequence[m.TokenLogprobs]
) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.text_of(token),
            "logprob": logprob,
            "bytes": list(tokenizer.bytes_of(token)),
        }

    return {
        "content": [
            {
                **shown(token, entry.logprob),
                "top_logprobs": [shown(other, logprob) for other, logprob in entry.top],
            }
            for token, entry in zip(tokens, entries, strict=True)
        ]
    }


def completion_logprobs(
    tokenizer: PromptTokenizer,
    tokens: Sequence[int],
    entries: Sequence[m.TokenLogprobs],
    offset: int,
) -> dict[str, Any]:
    """The `logprobs` of a completion choice; `offset` counts the characters before."""
    texts = [tokenizer.text_of(token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {tokenizer.text_of(token): logprob for token, logprob in entry.top} for entry in entries
        ],
        "text_offset": offsets,
    }
