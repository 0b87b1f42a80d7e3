"""The routes of the HTTP front door."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from deployments.coordinator import (
    Coordinator,
    Options,
    PoolState,
    ServedModel,
    SpeculationOptions,
)
from deployments.exposition import CONTENT_TYPE
from deployments.keys import Key
from deployments.openai import documented, errors
from deployments.openai.answers import (
    AnswerFormat,
    ChatFormat,
    Choice,
    CompletionFormat,
    Wanted,
    speculation,
    usage,
)
from deployments.openai.body_limit import BodyLimit
from deployments.openai.cors import Cors
from deployments.openai.disconnect import until_disconnect
from deployments.openai.key_check import KeyCheck
from deployments.openai.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    NamedTool,
    StreamOptions,
    TokenizeBody,
)
from deployments.openai.served_by import ServedBy
from deployments.openai.tools import NO_ARGUMENTS, Function, calls_grammar
from deployments.page import routes as page
from deployments.round import GenerationRequest, Piece
from deployments.structure import grammar_of
from protos import speculation_pb2 as pb
from workers import limits
from workers.prediction import Alignment
from workers.request import SamplingParams
from workers.rpc.errors import InvalidRequest, ServiceError, Unavailable

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499

# The bodies' fields that are SamplingParams' own, under the same names.
_SAMPLING = {field.name for field in fields(SamplingParams)} & set(GenerationBody.model_fields)


def make_app(
    coordinator: Callable[[], Coordinator], exposition: Callable[[], Awaitable[str]]
) -> FastAPI:
    """The HTTP application; `coordinator` is called per request, `exposition` for /metrics."""
    app = FastAPI(title="Slipstream", docs_url=None, redoc_url=None)
    documented.install(app)
    app.add_middleware(BodyLimit, max_bytes=lambda: coordinator().thresholds.max_body_bytes)
    app.add_middleware(KeyCheck, gate=lambda: coordinator().gate)
    app.add_middleware(Cors, origins=lambda: coordinator().thresholds.allowed_origins)
    app.add_middleware(ServedBy, worker_id=lambda: coordinator().worker_id)
    errors.install(app)
    page.install(app)
    Service = Annotated[Coordinator, Depends(coordinator)]  # noqa: N806

    @app.get("/health", response_model=documented.Health, responses=documented.ERRORS)
    async def health(service: Service) -> dict[str, str]:
        """200 once a target of every model has introduced itself, 503 before."""
        missing = [name for name, model in service.models.items() if not model.introduced.is_set()]
        if missing:
            raise Unavailable(f"no target worker of {', '.join(missing)} has introduced itself yet")
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus's text format: what all coordinators' answers took, and what the workers did."""
        return Response(await exposition(), media_type=CONTENT_TYPE)

    @app.get("/v1/models", response_model=documented.ModelList, responses=documented.ERRORS)
    async def models(service: Service) -> dict[str, Any]:
        """The models whose targets have introduced themselves."""
        served = [model for model in service.models.values() if model.introduced.is_set()]
        return {"object": "list", "data": [_card(model) for model in served]}

    @app.get("/v1/pools", response_model=documented.Pools, responses=documented.ERRORS)
    async def pools(service: Service) -> dict[str, Any]:
        """What the workers behind this coordinator are doing now, by pool."""
        found = await service.pools()
        return {"object": "list", "data": [_shown_pool(pool) for pool in found]}

    @app.post("/tokenize", response_model=documented.Tokens, responses=documented.ERRORS)
    async def tokenize(body: TokenizeBody, service: Service) -> dict[str, Any]:
        """The tokens of a prompt, or of a conversation as it is rendered."""
        model = await service.model(body.model)
        if body.messages is not None:
            tokens = await _rendered(model, body, body.messages)
        else:
            tokens = await model.tokenizer.encode(
                body.prompt or "", body.add_special_tokens is not False
            )
        return {
            "count": len(tokens),
            "max_model_len": model.info.max_model_len,
            "tokens": tokens,
            "token_strs": [model.tokenizer.name_of(token) for token in tokens]
            if body.return_token_strs
            else None,
        }

    @app.post("/detokenize", response_model=documented.Detokenized, responses=documented.ERRORS)
    async def detokenize(body: DetokenizeBody, service: Service) -> dict[str, str]:
        """The text of tokens, special ones included."""
        model = await service.model(body.model)
        model.check_ids("tokens", body.tokens)
        return {"prompt": model.tokenizer.decode(body.tokens)}

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses=documented.streamed(documented.ChatCompletion, documented.ChatCompletionChunk),
    )
    async def chat_completions(body: ChatBody, request: Request, service: Service) -> Response:
        """Answer a conversation."""
        model = await service.model(body.model)
        tools = [tool.model_dump(exclude_none=True) for tool in body.offered]
        prompt = await _rendered(model, body, body.messages, tools)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        max_tokens = body.max_completion_tokens or body.max_tokens
        form = ChatFormat(model.model_id, model.tokenizer, _wanted(body, logprobs))
        options = await _options(form.request_id, "chat", body, max_tokens, logprobs)
        if body.prediction is not None:
            expected = await model.tokenizer.encode(body.prediction.text, add_special_tokens=False)
            options = replace(options, prediction=tuple(expected))
        if body.offered:
            form.finds_calls = True
            options = replace(options, grammar=await asyncio.to_thread(_calls_grammar, body))
        return await _answer(service, model, request, body, form, [prompt], options)

    @app.post(
        "/v1/completions",
        response_model=None,
        responses=documented.streamed(documented.Completion, documented.CompletionChunk),
    )
    async def completions(body: CompletionBody, request: Request, service: Service) -> Response:
        """Continue one prompt or several."""
        model = await service.model(body.model)
        tokenizer = model.tokenizer
        prompts = [
            await tokenizer.encode(prompt, body.add_special_tokens is not False)
            if isinstance(prompt, str)
            else prompt
            for prompt in body.prompts()
        ]
        # OpenAI's default; a chat's is what the model's length allows.
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        wanted = replace(_wanted(body, body.logprobs), echo=bool(body.echo))
        form = CompletionFormat(model.model_id, tokenizer, wanted)
        options = await _options(
            form.request_id, "text_completion", body, max_tokens, body.logprobs
        )
        if body.echo and body.logprobs is not None:
            counts = (body.logprobs, body.prompt_logprobs or 0)
            options = replace(options, prompt_logprobs=max(counts))
        return await _answer(service, model, request, body, form, prompts, options)

    return app


async def _rendered(
    model: ServedModel,
    body: ChatBody | TokenizeBody,
    messages: Sequence[ChatMessage],
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """The tokens of a conversation."""
    return await model.tokenizer.encode_chat(
        [message.rendered() for message in messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs,
        tools=tools,
    )


def _card(model: ServedModel) -> dict[str, Any]:
    info = model.info
    return {
        "id": model.model_id,
        "object": "model",
        "created": 0,
        "owned_by": "slipstream",
        "max_model_len": info.max_model_len,
        "dtype": info.dtype,
        "row_invariant": info.row_invariant,
        "drafters": list(model.drafter_names),
        "feature_bytes_per_token": info.feature_bytes_per_token,
    }


def _calls_grammar(body: ChatBody) -> str:
    """The grammar of an answer that may call tools; empty if nothing is asked of it."""
    several = body.parallel_tool_calls is not False
    strict = any(tool.function.strict for tool in body.offered)
    forced = body.tool_choice not in (None, "auto")
    if several and not strict and not forced:
        return ""
    functions = [
        Function(tool.function.name, tool.function.parameters or NO_ARGUMENTS)
        for tool in body.offered
    ]
    several = several and not isinstance(body.tool_choice, NamedTool)
    return calls_grammar(functions, several, forced)


def _shown_pool(pool: PoolState) -> dict[str, Any]:
    return {
        "role": pool.role,
        "models": list(pool.models),
        "health": pool.health,
        "replicas": dict(pool.replicas),
        "workers": [
            {
                "worker_id": worker.info.worker_id,
                "host": worker.info.host,
                "process_id": worker.info.process_id,
                "max_sessions": worker.info.max_sessions,
                "drafters": [drafter.name for drafter in worker.info.drafters],
                "status": None if worker.status is None else _shown_status(worker.status),
            }
            for worker in pool.workers
        ],
    }


def _shown_status(status: pb.WorkerStatus) -> dict[str, Any]:
    return {field.name: getattr(status, field.name) for field in status.DESCRIPTOR.fields}


def _wanted(body: GenerationBody, logprobs: int | None) -> Wanted:
    return Wanted(
        logprobs=logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        rounds=body.speculation.rounds,
    )


async def _options(
    request_id: str,
    operation: Literal["chat", "text_completion"],
    body: GenerationBody,
    max_tokens: int | None,
    logprobs: int | None,
) -> Options:
    drafter = body.speculation.drafter
    structure = body.structure()
    # It may take long, and the event loop carries everyone's rounds.
    grammar = "" if structure is None else await asyncio.to_thread(grammar_of, *structure)
    return Options(
        request_id=request_id,
        operation=operation,
        sampling=body.model_dump(include=_SAMPLING),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=tuple([body.stop] if isinstance(body.stop, str) else body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        show_special_tokens=body.skip_special_tokens is False,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        rounds=body.speculation.rounds,
        priority=body.priority or 0,
        grammar=grammar,
        speculation=SpeculationOptions(
            enabled=body.speculation.enabled,
            drafters=(drafter,) if isinstance(drafter, str) else tuple(drafter),
            max_draft_tokens=body.speculation.max_draft_tokens,
            tree=body.speculation.tree,
            mode=body.speculation.mode,
            verification=body.speculation.verification,
            lossy=body.speculation.lossy,
        ),
    )


async def _answer(
    service: Coordinator,
    model: ServedModel,
    request: Request,
    body: GenerationBody,
    form: AnswerFormat,
    prompts: Sequence[Sequence[int]],
    options: Options,
) -> Response:
    number = body.n or 1
    if len(prompts) * number > limits.MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n {number} are more than {limits.MAX_CHOICES} answers",
            "n",
        )
    key: Key | None = request.state.key
    requests: list[GenerationRequest] = []
    choices: list[Choice] = []
    for index, prompt in enumerate(prompts):
        for asked in model.requests(prompt, options, "" if key is None else key.id, number):
            requests.append(asked)
            predicted = None if options.prediction is None else Alignment(options.prediction)
            choices.append(Choice(asked.prompt, index, predicted))
    admitted = service.gate.admit(key, len(choices))
    pieces = until_disconnect(request, _generate(admitted, model, requests, choices))
    if body.stream:
        # An error before the first token is still a plain HTTP error.
        try:
            first = await anext(pieces)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return StreamingResponse(
            _events(body, form, choices, first, pieces), media_type="text/event-stream"
        )
    whole = [Piece() for _ in choices]
    try:
        async for index, piece in pieces:
            _append(whole[index], piece)
            choices[index].came(piece.tokens)
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    answer = form.whole(choices, whole)
    if body.speculation.stats:
        answer["speculation"] = speculation(choices)
    return JSONResponse(answer)


async def _generate(
    admitted: AbstractAsyncContextManager[None],
    model: ServedModel,
    requests: Sequence[GenerationRequest],
    choices: Sequence[Choice],
) -> AsyncGenerator[tuple[int, Piece]]:
    """Run all choices at once, if they are admitted; yields (choice, piece) as they come."""
    news: asyncio.Queue[tuple[int, Piece] | ServiceError | None] = asyncio.Queue(maxsize=1)

    async def run(index: int, request: GenerationRequest) -> None:
        generation = model.generation(request)
        choices[index].stats = generation.stats
        try:
            async with contextlib.aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    await news.put((index, piece))
            await news.put(None)
        except ServiceError as error:
            await news.put(error)

    async with admitted:
        tasks = [asyncio.create_task(run(i, request)) for i, request in enumerate(requests)]
        try:
            running = len(tasks)
            while running:
                item = await news.get()
                if isinstance(item, ServiceError):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _events(
    body: GenerationBody,
    form: AnswerFormat,
    choices: Sequence[Choice],
    first: tuple[int, Piece],
    rest: AsyncGenerator[tuple[int, Piece]],
) -> AsyncIterator[str]:
    """The stream of an answer as server-sent events."""
    stream_options = body.stream_options or StreamOptions()
    include_usage = stream_options.include_usage
    continuous = include_usage and stream_options.continuous_usage_stats
    unfinished = len(choices)
    try:
        for index in range(len(choices)):
            opening = form.first_chunk(index)
            if opening is not None:
                if continuous:
                    opening["usage"] = usage([choices[index]])
                yield _event(opening)
        async for index, piece in _chain(first, rest):
            chunk = form.piece_chunk(index, choices[index], piece)
            choices[index].came(piece.tokens)
            unfinished -= piece.finished is not None
            if continuous:
                chunk["usage"] = usage([choices[index]])
            if body.speculation.stats and not (unfinished or include_usage):
                chunk["speculation"] = speculation(choices)
            yield _event(chunk)
        if include_usage:
            last = {"speculation": speculation(choices)} if body.speculation.stats else {}
            yield _event(form.chunk([], usage=usage(choices), **last))
        yield "data: [DONE]\n\n"
    except ServiceError as error:
        yield _event(errors.service_error_body(error))
    except ClientDisconnect:
        logger.info("%s: the client left", form.request_id)
    finally:
        await rest.aclose()


async def _chain(
    first: tuple[int, Piece], rest: AsyncIterator[tuple[int, Piece]]
) -> AsyncIterator[tuple[int, Piece]]:
    yield first
    async for item in rest:
        yield item


def _append(whole: Piece, piece: Piece) -> None:
    whole.tokens += piece.tokens
    whole.text += piece.text
    whole.logprobs += piece.logprobs
    whole.prompt_logprobs += piece.prompt_logprobs
    whole.rounds += piece.rounds
    whole.finished = piece.finished


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
