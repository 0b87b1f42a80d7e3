"""Answers in OpenAI's shapes: whole ones and streams of chunks, for both kinds of request."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from deployments.openai.rounds import shown_round
from deployments.openai.tools import Calls
from deployments.round import Piece
from deployments.stats import RequestStats
from deployments.tokenizer import PromptTokenizer
from workers.prediction import Alignment
from workers.rpc import messages as m


@dataclass(slots=True)
class Choice:
    """One answer as far as it has come; `prompt_index` tells which prompt of the request it answers.

    `predicted` is it beside what the request expects, if it says so.
    """

    prompt: Sequence[int]
    prompt_index: int = 0
    predicted: Alignment | None = None
    tokens: list[int] = field(default_factory=list)
    text_offset: int = 0
    begun: bool = False
    calls: Calls = field(default_factory=Calls)
    stats: RequestStats = field(default_factory=RequestStats)

    def came(self, tokens: Sequence[int]) -> None:
        """So it goes on."""
        self.tokens += tokens
        if self.predicted is not None:
            self.predicted.observe(tokens)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the request wants to see besides text."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    rounds: bool = False
    echo: bool = False


class AnswerFormat(ABC):
    """How an endpoint writes answers. `id`, `created` and `model` are the same in all its chunks."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(self, model: str, tokenizer: PromptTokenizer, wanted: Wanted) -> None:
        self.tokenizer = tokenizer
        self.wanted = wanted
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def request_id(self) -> str:
        """Identifies the request in logs."""
        return str(self._head["id"])

    @abstractmethod
    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream begins with, if anything."""

    @abstractmethod
    def content(self, choice: Choice, text: str) -> dict[str, Any]:
        """The part of a whole choice that holds its text."""

    @abstractmethod
    def delta(self, choice: Choice, text: str, last: bool) -> dict[str, Any]:
        """The part of a chunk's choice that holds its text; the `last` chunk holds all that is left."""

    @abstractmethod
    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The `logprobs` of a choice or chunk."""

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One chunk of a stream."""
        return {**self._head, "object": self.chunk_object, "choices": choices, **more}

    def piece_chunk(self, index: int, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The chunk of one piece of an answer."""
        text = self._text(choice, piece)
        delta = self.delta(choice, text, piece.finished is not None)
        made = self.chunk([self._choice(index, choice, piece, delta)])
        choice.begun = True
        return made

    def whole(self, choices: Sequence[Choice], pieces: Sequence[Piece]) -> dict[str, Any]:
        """A whole answer; `pieces` are the choices' merged pieces."""
        return {
            **self._head,
            "object": self.object,
            "choices": [
                self._choice(index, choice, piece, self.content(choice, self._text(choice, piece)))
                for index, (choice, piece) in enumerate(zip(choices, pieces, strict=True))
            ],
            "usage": usage(choices),
        }

    def _text(self, choice: Choice, piece: Piece) -> str:
        """The text of a piece, behind the prompt's where it is echoed."""
        if self.wanted.echo and not choice.begun:
            return self.tokenizer.decode(choice.prompt) + piece.text
        return piece.text

    def _choice(
        self, index: int, choice: Choice, piece: Piece, content: dict[str, Any]
    ) -> dict[str, Any]:
        finished = piece.finished
        made = {
            "index": index,
            **content,
            "logprobs": self.logprobs(choice, piece) if self.wanted.logprobs else None,
            "finish_reason": None if finished is None else _reason(choice, finished),
        }
        if finished is not None:
            made["stop_reason"] = finished.stop_string or finished.stop_token
        if self.wanted.token_ids:
            made["token_ids"] = piece.tokens
            made["prompt_token_ids"] = list(choice.prompt)
        if self.wanted.rounds:
            made["rounds"] = [shown_round(self.tokenizer, each) for each in piece.rounds]
        if self.wanted.prompt_logprobs and not choice.begun:
            made["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, choice.prompt, piece.prompt_logprobs
            )
        return made


class ChatFormat(AnswerFormat):
    """/v1/chat/completions."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return self.chunk([{"index": index, "delta": delta, "finish_reason": None}])

    finds_calls = False
    """Whether what looks like a call of a tool is one."""

    def content(self, choice: Choice, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.finds_calls:
            found = choice.calls.add(text, last=True)
            message["content"] = found.content or (None if found.calls else "")
            if found.calls:
                message["tool_calls"] = [
                    {name: value for name, value in call.items() if name != "index"}
                    for call in found.calls
                ]
        return {"message": message}

    def delta(self, choice: Choice, text: str, last: bool) -> dict[str, Any]:
        if not self.finds_calls:
            return {"delta": {"content": text}}
        found = choice.calls.add(text, last)
        content = {"content": found.content} if found.content else {}
        calls = {"tool_calls": found.calls} if found.calls else {}
        return {"delta": {**content, **calls}}

    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return chat_logprobs(self.tokenizer, piece.tokens, piece.logprobs)


class CompletionFormat(AnswerFormat):
    """/v1/completions."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        return None

    def content(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, choice: Choice, text: str, last: bool) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        tokens = list(piece.tokens)
        entries: list[m.TokenLogprobs | None] = list(piece.logprobs)
        if self.wanted.echo and not choice.begun:
            tokens = [*choice.prompt, *tokens]
            entries = [None, *piece.prompt_logprobs, *entries]
        made = completion_logprobs(self.tokenizer, tokens, entries, choice.text_offset)
        choice.text_offset += sum(map(len, made["tokens"]))
        return made


def _reason(choice: Choice, finished: m.Finished) -> str:
    """An answer that ends by itself with calls waits for what the tools say."""
    return "tool_calls" if choice.calls.count and finished.reason == "stop" else finished.reason


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of a request: each prompt once, all its answers.

    Of a prediction, those tokens that an answer holds are accepted and the others rejected, whoever drafted.
    """
    prompts = {choice.prompt_index: len(choice.prompt) for choice in choices}
    prompt = sum(prompts.values())
    completion = sum(len(choice.tokens) for choice in choices)
    made: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    predicted = [choice.predicted for choice in choices if choice.predicted is not None]
    if predicted:
        accepted = sum(alignment.accepted for alignment in predicted)
        made["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(len(a.tokens) for a in predicted) - accepted,
        }
    return made


def speculation(choices: Sequence[Choice]) -> dict[str, Any]:
    """Speculation statistics of a request; counts of several choices are added."""
    total = RequestStats()
    for choice in choices:
        total.add(choice.stats)
    return {
        "drafter": total.drafter,
        "rounds": total.rounds,
        "draft_tokens": total.draft_tokens,
        "accepted_tokens": total.accepted_tokens,
        "mean_accepted_length": total.mean_accepted_length,
        "acceptance_by_depth": total.acceptance_by_depth,
        "hit_rate": total.hit_rate,
    }
