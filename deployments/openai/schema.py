"""Bodies of requests. What is not supported is refused by name; neutral values are accepted."""

from typing import Annotated, Any, Final, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from workers import limits
from workers.request import Mode, Verification


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair; no text has one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a surrogate pair, which is no character") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Tokens = Annotated[list[int], Field(min_length=1)]

# Parameters of OpenAI's and vLLM's APIs that do nothing here, with the values that ask for nothing.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "suffix": ("",),
    "spaces_between_special_tokens": (True,),
    "chat_template": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "verbosity": ("medium",),
}


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = Field(False, description="end with a chunk that holds the usage")
    continuous_usage_stats: bool = Field(
        False,
        description="with include_usage: every chunk of an answer holds that answer's usage so far",
    )


class SpeculationBody(BaseModel):
    """Per-request control of speculation. None of it changes the answer."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    drafter: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        "auto", description='a drafter\'s name, several, or "auto"'
    )
    max_draft_tokens: int | None = Field(
        None, ge=0, le=limits.MAX_TREE_NODES, description="drafted tokens per round; 0 is off"
    )
    tree: bool = Field(True, description="false drafts chains only")
    verification: Verification = Field(
        "coupled",
        description="how drafted tokens are tested: coupled gives the answer that there would be without "
        "drafts, rejection and block (chains only) another one of the same law, typical changes the law",
    )
    lossy: bool = Field(
        False, description="consents to answers of another law than the model's; typical needs it"
    )
    mode: Mode | None = Field(
        None,
        description="what drafters on draft workers do while the target verifies; left out: the "
        "server's default",
    )
    stats: bool = Field(False, description="add a `speculation` object to the answer")
    rounds: bool = Field(
        False,
        description="add `rounds` to every choice: what each drafted, by whom, and what was accepted",
    )


class GenerationBody(BaseModel):
    """What both kinds of request share."""

    model_config = ConfigDict(extra="forbid")

    model: Text | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=limits.MAX_TOP_K, description="-1 and 0 keep all")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=limits.MIN_SEED, le=limits.MAX_SEED)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=limits.MAX_REPETITION_PENALTY)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    n: int | None = Field(None, ge=1, le=limits.MAX_CHOICES)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        description="keep this many last tokens of the prompt; -1: what the model takes",
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=limits.MAX_TOP_LOGPROBS)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="smaller goes first")
    stop: Text | list[Text] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationBody = SpeculationBody()
    return_token_ids: bool | None = Field(None, description="add prompt and answer as token ids")
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in cls.model_fields or name not in _NEUTRAL:
                kept[name] = value
            elif value is not None and value not in _NEUTRAL[name]:
                accepted = ", ".join(["null", *(repr(v) for v in _NEUTRAL[name])])
                raise ValueError(f"{name} is not supported; only {accepted} can be given")
        if kept.get("speculation") is None:
            kept.pop("speculation", None)
        return kept

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1")
        return self


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    def rendered(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=limits.MAX_TOP_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    max_tokens: int | None = Field(None, ge=0, description="0 only with echo; default 16")
    logprobs: int | None = Field(None, ge=0, le=limits.MAX_TOP_LOGPROBS)
    echo: bool | None = Field(None, description="begin the answer with the prompt")

    @model_validator(mode="after")
    def _check_max_tokens(self) -> "CompletionBody":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 with echo: true")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Every prompt of the request."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt):
            return [cast(list[int], self.prompt)]
        return list(cast(list[str] | list[list[int]], self.prompt))
