"""What answers look like, for /openapi.json: a test holds real answers and streams against it.

Answers are made in answers.py, from parts, as fast as they come; nothing here runs for a request.
"""

from typing import Any, Final, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

REF: Final = "#/components/schemas/{model}"


class Documented(BaseModel):
    """There are no other fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Documented):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = Field(description="the field of the request that is wrong")
    code: str | None


class Error(Documented):
    """Every answer with a status from 400 on."""

    error: ErrorDetail


class Health(Documented):
    """All models have targets."""

    status: Literal["ok"]


class ModelCard(Documented):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    dtype: str
    row_invariant: bool = Field(description="answers are the same, bit for bit, in any batch")
    drafters: list[str]
    feature_bytes_per_token: int


class ModelList(Documented):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class PoolWorker(Documented):
    """A worker that a coordinator talks to."""

    worker_id: str
    host: str
    process_id: int
    max_sessions: int
    drafters: list[str]
    status: dict[str, float] | None = Field(description="its counters now; null: it did not answer")


class Pool(Documented):
    """The workers of one kind."""

    role: Literal["target", "draft"]
    models: list[str]
    health: str
    replicas: dict[str, int] = Field(description="by Serve's names of their states")
    workers: list[PoolWorker]


class Pools(Documented):
    """What the workers are doing."""

    object: Literal["list"]
    data: list[Pool]


class PredictionDetails(Documented):
    """What came of the request's prediction, in its tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Documented):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: PredictionDetails | None = Field(
        None, description="only where the request has a prediction"
    )


class Speculation(Documented):
    """What speculation did."""

    drafter: str
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    mean_accepted_length: float
    acceptance_by_depth: list[float]
    hit_rate: float


class PromptLogprob(Documented):
    """One candidate at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


class ChatToken(Documented):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprobs(ChatToken):
    """A token of the answer, and the likeliest in its place."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Documented):
    """Log-probabilities of a chat's answer."""

    content: list[ChatTokenLogprobs]


class CompletionLogprobs(Documented):
    """Log-probabilities of a completion; the lists are parallel, an entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class RoundToken(Documented):
    """A token that a round committed."""

    id: int
    token: str
    bytes: list[int]


class RoundNode(Documented):
    """A node of the tree that a round verified."""

    id: int
    token: str
    parent: int = Field(description="a node's index; -1: the last token that was there before")
    score: float = Field(description="how likely the path down to it was to be accepted")
    drafters: list[str]
    accepted: bool


class Round(Documented):
    """One pass of the target; the prompt's drafts nothing."""

    base_len: int
    tokens: list[RoundToken]
    accepted: int
    tested: int
    nodes: list[RoundNode]
    proposals: int
    hits: int
    price: float
    wait_ms: float
    step_ms: float
    step_rows: int


class Choice(Documented):
    """What all choices have."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None = Field(
        None, description="the stop string, or the token that ended it"
    )
    token_ids: list[int] | None = Field(None, description="with return_token_ids")
    prompt_token_ids: list[int] | None = Field(None, description="with return_token_ids")
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    rounds: list[Round] | None = Field(None, description="with speculation.rounds")


class Called(Documented):
    """The function of a call, and its arguments: a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Documented):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: Called


class Message(Documented):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = Field(None, description="with tools")


class CalledDelta(Documented):
    """What is new of a call's function."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Documented):
    """What is new of a call; its first part has all but the arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledDelta


class Delta(Documented):
    """What is new of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = Field(None, description="with tools")


class ChatChoice(Choice):
    """One answer."""

    message: Message
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Choice):
    """A part of an answer."""

    delta: Delta
    logprobs: ChatLogprobs | None = None


class CompletionChoice(Choice):
    """A continuation, or a part of it."""

    text: str
    logprobs: CompletionLogprobs | None


class Answer(Documented):
    """What all answers have."""

    id: str
    created: int
    model: str
    speculation: Speculation | None = Field(None, description="with speculation.stats")


class ChatCompletion(Answer):
    """The answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(Answer):
    """An event of a stream; `data: [DONE]` is the last, an Error ends it early."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Completion(Answer):
    """The continuations of prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Answer):
    """An event of a stream; `data: [DONE]` is the last, an Error ends it early."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Tokens(Documented):
    """A prompt in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="with return_token_strs")


class Detokenized(Documented):
    """The text of tokens."""

    prompt: str


_CHUNKS: Final = (ChatCompletionChunk, CompletionChunk)
ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "4XX": {"model": Error, "description": "The request is at fault"},
    "5XX": {"model": Error, "description": "The server cannot answer now"},
}


def streamed(whole: type[Documented], chunk: type[Documented]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers at once or, if asked to, in chunks."""
    schema = {"$ref": REF.format(model=chunk.__name__)}
    success = {
        "model": whole,
        "description": "The answer; with stream: true, its events",
        "content": {"text/event-stream": {"schema": schema}},
    }
    return {200: success, **ERRORS}


def install(app: FastAPI) -> None:
    """Let /openapi.json hold the events of streams, which FastAPI does not know of."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, chunks = models_json_schema(
                [(chunk, "serialization") for chunk in _CHUNKS], ref_template=REF
            )
            made["components"]["schemas"].update(chunks["$defs"])
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
