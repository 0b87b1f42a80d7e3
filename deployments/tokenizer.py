"""The served model's tokenizer, as its target hands it over: no model file is needed here.

Rendering follows transformers' `apply_chat_template`: a sandboxed Jinja environment with the same
extensions and helpers, so that templates written for it work.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from protos import speculation_pb2 as pb
from workers.rpc.errors import InvalidRequest
from workers.text import TokenBytes


class PromptTokenizer:
    """Prompts to ids, and ids to what stands for them in log-probabilities.

    `sampling_defaults` are the model's own, by parameter.
    """

    def __init__(self, files: pb.Tokenizer) -> None:
        self._tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
        self._special_tokens = dict(files.special_tokens)
        self.sampling_defaults = dict(files.sampling_defaults)
        self._template = _compile(files.chat_template) if files.chat_template else None
        self._tools_refused = _tools_refused(files)
        self._bytes = TokenBytes(self._tokenizer)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of plain text, with the tokenizer's own special tokens around it unless told not to."""
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Ids of a conversation, rendered for the assistant to answer, who may call tools.

        With `continue_final_message` the last message is left open, to be gone on with. Raises
        InvalidRequest if the model has no template, or none with tools, or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", "messages")
        if tools and self._tools_refused:
            raise InvalidRequest(f"tools cannot be offered: {self._tools_refused}", "tools")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt: false: the last message is either "
                "gone on with or answered",
                "continue_final_message",
            )
        try:
            text = self._template.render(
                **{
                    **self._special_tokens,
                    **(template_kwargs or {}),
                    **({"tools": tools} if tools else {}),
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses: {error}", "messages") from error
        if continue_final_message:
            text = _open_end(text, str(messages[-1]["content"]))
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Long texts take a while, and the event loop carries everyone's rounds.
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def name_of(self, token: int) -> str:
        """A token as the vocabulary has it; empty for ids between its own that stand for nothing."""
        return self._tokenizer.id_to_token(token) or ""

    def text_of(self, token: int) -> str:
        """The text of one token alone; U+FFFD where it is part of a character."""
        return self.bytes_of(token).decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes that one token stands for, also where they are part of a character."""
        return self._bytes.of(token)


def _open_end(text: str, last: str) -> str:
    """Rendered text up to the end of its last message's content."""
    trimmed = last.strip()
    at = text.rfind(trimmed)
    if at < 0:
        raise InvalidRequest(
            "the chat template changes the last message, so it cannot be gone on with",
            "continue_final_message",
        )
    # Some templates trim the content; where this one does not, neither is it trimmed here.
    tail = last[len(last.rstrip()) :]
    end = at + len(trimmed)
    return text[: end + len(tail)] if text.startswith(tail, end) else text[:end]


def _tools_refused(files: pb.Tokenizer) -> str:
    """Why this model's template cannot offer tools; empty if it can."""
    if "tools" not in find_undeclared_variables(template_environment().parse(files.chat_template)):
        return "the model's chat template has none; set target.chat_template to one that has"
    if not files.tool_call_parser:
        return "it is not known how the model writes calls; set target.tool_call_parser"
    return ""


def _compile(template: str) -> jinja2.Template:
    return template_environment().from_string(template)


def template_environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are compiled and rendered by."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **options
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
