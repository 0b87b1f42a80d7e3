"""Bodies of requests. What is not supported is refused by name; neutral values are accepted."""

import json
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from deployments.structure import JSON_OBJECT
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
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "verbosity": ("medium",),
}

_STRUCTURES: Final = ("json", "regex", "choice", "grammar")


# As _NEUTRAL, in messages: what clients send back of an answer of OpenAI's.
_NEUTRAL_IN_MESSAGES: Final[dict[str, tuple[Any, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
}


def _without_neutral(
    given: Any, known: Container[str], neutral: Mapping[str, tuple[Any, ...]]
) -> Any:
    """What is given less what asks for nothing; raises ValueError for what is not supported."""
    if not isinstance(given, dict):
        return given
    kept = {}
    for name, value in given.items():
        if name in known or name not in neutral:
            kept[name] = value
        elif value is not None and value not in neutral[name]:
            accepted = ", ".join(["null", *(repr(v) for v in neutral[name])])
            raise ValueError(f"{name} is not supported; only {accepted} can be given")
    return kept


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


class JsonSchema(BaseModel):
    """OpenAI's `response_format.json_schema`; it is always strict."""

    model_config = ConfigDict(extra="forbid")

    name: Text | None = None
    description: Text | None = None
    # `schema` is a method of pydantic's.
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What the answer is."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, and to no other")
        return self


class StructuredOutputs(BaseModel):
    """What the answer may look like: exactly one of these."""

    model_config = ConfigDict(extra="forbid")

    # `json` is a method of pydantic's.
    json_schema: dict[str, Any] | Text | None = Field(
        None, alias="json", description="a JSON schema, also as text"
    )
    regex: Text | None = Field(None, description="matches the answer from end to end")
    choice: Annotated[list[Text], Field(min_length=1)] | None = Field(
        None, description="the answer is one of these"
    )
    grammar: Text | None = Field(None, description="in Lark's or llama.cpp's (GBNF) syntax")

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError(f"needs exactly one of {', '.join(_STRUCTURES)}")
        return self


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
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationBody = SpeculationBody()
    return_token_ids: bool | None = Field(None, description="add prompt and answer as token ids")
    user: str | None = None
    metadata: dict[str, str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, body: Any) -> Any:
        if isinstance(body, dict):
            body = dict(body)
            for name in [f"guided_{kind}" for kind in _STRUCTURES]:
                if body.pop(name, None) is not None:
                    new_name = name.removeprefix("guided_")
                    raise ValueError(f"{name} has become structured_outputs: {{{new_name}: …}}")
        kept = _without_neutral(body, cls.model_fields, _NEUTRAL)
        if isinstance(kept, dict) and kept.get("speculation") is None:
            kept.pop("speculation", None)
        return kept

    def structure(self) -> tuple[str, Any, str] | None:
        """What the answer may look like, if that is not anything: kind, value, and the field that says so."""
        if self.structured_outputs is not None:
            given = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            ((kind, value),) = given.items()
            return kind, value, f"structured_outputs.{kind}"
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.json_schema is None:
            return "json", JSON_OBJECT, "response_format"
        return "json", form.json_schema.json_schema, "response_format.json_schema.schema"

    @model_validator(mode="after")
    def _check_one_structure(self) -> "GenerationBody":
        named = self.response_format is not None and self.response_format.type != "text"
        if named and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs cannot both be given")
        return self

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

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"{kind} parts are not supported: this server reads text only")
        return part


class RefusalPart(BaseModel):
    """A part of an assistant's message, in which it refuses."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """What it says."""
        return self.refusal


# Names of the forms that a value may have, so that an error speaks of the one that was meant. They are no
# identifiers, which would look like fields.
def _form(content: Any) -> str:
    return "a list" if isinstance(content, list) else "a string"


def _form_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "a refusal" if kind == "refusal" else "a text"


_Part = Annotated[
    Annotated[TextPart, Tag("a text")] | Annotated[RefusalPart, Tag("a refusal")],
    Discriminator(_form_of_part),
]
Content = Annotated[
    Annotated[Text, Tag("a string")] | Annotated[list[TextPart], Tag("a list")],
    Discriminator(_form),
]
"""A text, whole or in parts."""

MessageContent = Annotated[
    Annotated[Text, Tag("a string")] | Annotated[list[_Part], Tag("a list")],
    Discriminator(_form),
]
"""A text, whole or in parts; an assistant's may refuse."""


def joined(content: str | Sequence[TextPart | RefusalPart]) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class CalledFunction(BaseModel):
    """The function of a call, and its arguments: a JSON object as text."""

    model_config = ConfigDict(extra="forbid")

    name: Text
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: str) -> str:
        try:
            given = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ValueError("must be a JSON object")
        return arguments


class ToolCall(BaseModel):
    """A call that an assistant has made."""

    model_config = ConfigDict(extra="forbid")

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """The call as chat templates expect it: its arguments are an object there."""
        arguments = json.loads(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent | None = None
    name: Text | None = Field(None, description="who speaks, for templates that tell the model")
    refusal: Text | None = Field(None, description="what an assistant said instead of a content")

    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = Field(None, description="the call that a tool's message answers")

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, message: Any) -> Any:
        return _without_neutral(message, cls.model_fields, _NEUTRAL_IN_MESSAGES)

    @model_validator(mode="after")
    def _check_speaker(self) -> "ChatMessage":
        if self.role == "assistant":
            return self
        if self.content is None:
            raise ValueError(
                f"a {self.role} message needs a content; only an assistant's may be null"
            )
        parts = self.content if isinstance(self.content, list) else []
        if self.refusal is not None or any(isinstance(part, RefusalPart) for part in parts):
            raise ValueError(f"a {self.role} message cannot refuse; only an assistant's can")
        return self

    @model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls belong to messages of the assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id belongs to messages of the role tool, which need it")
        return self

    def rendered(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        content = self.refusal or "" if self.content is None else joined(self.content)
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.rendered() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class Prediction(BaseModel):
    """Most of what the answer will probably say, such as a text that is to be edited."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The whole text."""
        return joined(self.content)


class FunctionDefinition(BaseModel):
    """A function that the answer may call."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments; left out: there are none"
    )
    strict: bool | None = Field(None, description="calls keep the schema without tool_choice, too")


class Tool(BaseModel):
    """A tool that the answer may call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    """A function by its name."""

    model_config = ConfigDict(extra="forbid")

    name: Text


class NamedTool(BaseModel):
    """The tool that the answer must call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    prediction: Prediction | None = Field(
        None,
        description="what the answer will probably say; it is drafted from, and changes nothing",
    )
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=limits.MAX_TOP_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="left out: auto where there are tools"
    )
    parallel_tool_calls: bool | None = Field(
        None, description="whether an answer may call several times; left out: it may"
    )

    @property
    def offered(self) -> list[Tool]:
        """The tools that the answer may call."""
        if self.tool_choice == "none" or not self.tools:
            return []
        if isinstance(self.tool_choice, NamedTool):
            return [t for t in self.tools if t.function.name == self.tool_choice.function.name]
        return self.tools

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError(f"tools: names must differ, got {', '.join(names)}")
        if self.tool_choice not in (None, "none", "auto") and not self.offered:
            known = ", ".join(names) or "none"
            raise ValueError(f"tool_choice names a tool that is not in tools: there is {known}")
        if self.offered and self.structure() is not None:
            raise ValueError(
                "an answer with a structure of its own cannot call tools: leave out response_format and "
                "structured_outputs, or set tool_choice: none"
            )
        return self

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


class TokenizeBody(BaseModel):
    """POST /tokenize: a prompt as completions take it, or messages as chats take them."""

    model_config = ConfigDict(extra="forbid")

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="around the text; left out: for a prompt, not for messages"
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(
        None, description="add the tokens as the vocabulary has them"
    )

    @model_validator(mode="after")
    def _check_what_is_given(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name) is not None:
                raise ValueError(f"{name} needs messages")
        return self


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid")

    model: Text | None = None
    tokens: list[int]
