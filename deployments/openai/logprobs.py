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
    entries: Sequence[m.TokenLogprobs | None],
    offset: int,
) -> dict[str, Any]:
    """The `logprobs` of a completion choice; `offset` counts the characters before.

    The entry of a prompt's first token is None: nothing predicted it.
    """
    texts = [tokenizer.text_of(token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
        "top_logprobs": [
            None
            if entry is None
            else {tokenizer.text_of(token): logprob for token, logprob in entry.top}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: PromptTokenizer, tokens: Sequence[int], entries: Sequence[m.TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """VLLM's `prompt_logprobs`: by token id, the prompt's token and its likeliest alternatives."""
    shown: list[dict[str, Any] | None] = [None]
    for token, entry in zip(tokens[1:], entries, strict=True):
        ranked = {other: (logprob, rank) for rank, (other, logprob) in enumerate(entry.top, 1)}
        ranked[token] = (entry.logprob, entry.rank)
        shown.append(
            {
                str(other): {
                    "logprob": logprob,
                    "rank": rank,
                    "decoded_token": tokenizer.text_of(other),
                }
                for other, (logprob, rank) in ranked.items()
            }
        )
    return shown
