"""The routes of the HTTP front door."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from deployments.coordinator import Coordinator, Options, SpeculationOptions, sampling_params
from deployments.openai import errors
from deployments.openai.answers import (
    AnswerFormat,
    ChatFormat,
    Choice,
    CompletionFormat,
    speculation,
    usage,
)
from deployments.openai.body_limit import BodyLimit
from deployments.openai.disconnect import until_disconnect
from deployments.openai.schema import ChatBody, CompletionBody, GenerationBody
from deployments.round import GenerationRequest, Piece
from workers.rpc.errors import ServiceError

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499


def make_app(coordinator: Callable[[], Coordinator]) -> FastAPI:
    """The HTTP application; `coordinator` is called per request."""
    app = FastAPI(title="Slipstream", docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=lambda: coordinator().thresholds.max_body_bytes)
    errors.install(app)
    Service = Annotated[Coordinator, Depends(coordinator)]  # noqa: N806

    @app.get("/health")
    async def health(service: Service) -> dict[str, str]:
        """200 once a target has introduced itself, 503 before."""
        return {"status": "ok", "model": service.model.info.model_id}

    @app.get("/v1/models")
    async def models(service: Service) -> dict[str, Any]:
        """The served model."""
        info = service.model.info
        return {
            "object": "list",
            "data": [
                {
                    "id": service.config.model_id,
                    "object": "model",
                    "created": 0,
                    "owned_by": "slipstream",
                    "max_model_len": info.max_model_len,
                    "dtype": info.dtype,
                    "row_invariant": info.row_invariant,
                    "drafters": list(service.drafter_names),
                }
            ],
        }

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request, service: Service) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        messages = [message.rendered() for message in body.messages]
        prompt = await service.model.tokenizer.encode_chat(messages)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        options = _options(body, body.max_completion_tokens or body.max_tokens, logprobs)
        form = ChatFormat(
            service.config.model_id,
            service.model.tokenizer,
            logprobs is not None,
            bool(body.return_token_ids),
        )
        return await _answer(service, request, body, form, [service.request(prompt, options)])

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request, service: Service) -> Response:
        """Continue one prompt or several."""
        service.check_model(body.model)
        # OpenAI's default; a chat's is what the model's length allows.
        options = _options(body, body.max_tokens or 16, body.logprobs)
        encode = service.model.tokenizer.encode
        prompts = [
            await encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts()
        ]
        form = CompletionFormat(
            service.config.model_id,
            service.model.tokenizer,
            body.logprobs is not None,
            bool(body.return_token_ids),
        )
        requests = [service.request(prompt, options) for prompt in prompts]
        return await _answer(service, request, body, form, requests)

    return app


def _options(body: GenerationBody, max_tokens: int | None, logprobs: int | None) -> Options:
    drafter = body.speculation.drafter
    return Options(
        sampling=sampling_params(body.temperature, body.top_k, body.top_p, body.min_p, body.seed),
        max_tokens=max_tokens,
        stop=tuple([body.stop] if isinstance(body.stop, str) else body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logprobs=logprobs,
        speculation=SpeculationOptions(
            enabled=body.speculation.enabled,
            drafters=(drafter,) if isinstance(drafter, str) else tuple(drafter),
            max_draft_tokens=body.speculation.max_draft_tokens,
            tree=body.speculation.tree,
        ),
    )


async def _answer(
    service: Coordinator,
    request: Request,
    body: GenerationBody,
    form: AnswerFormat,
    requests: Sequence[GenerationRequest],
) -> Response:
    choices = [Choice(generation.prompt) for generation in requests]
    pieces = until_disconnect(request, _generate(service, requests, choices))
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
            choices[index].tokens += piece.tokens
    except ClientDisconnect:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    answer = form.whole(choices, whole)
    if body.speculation.stats:
        answer["speculation"] = speculation(choices)
    return JSONResponse(answer)


async def _generate(
    service: Coordinator, requests: Sequence[GenerationRequest], choices: Sequence[Choice]
) -> AsyncGenerator[tuple[int, Piece]]:
    """Run all choices at once; yields (choice, piece) as they come."""
    news: asyncio.Queue[tuple[int, Piece] | ServiceError | None] = asyncio.Queue(maxsize=1)

    async def run(index: int, request: GenerationRequest) -> None:
        generation = service.generation(request)
        choices[index].stats = generation.stats
        try:
            async with contextlib.aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    await news.put((index, piece))
            await news.put(None)
        except ServiceError as error:
            await news.put(error)

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
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    unfinished = len(choices)
    last: dict[str, Any] = {"speculation": None} if body.speculation.stats else {}
    try:
        for index in range(len(choices)):
            opening = form.first_chunk(index)
            if opening is not None:
                yield _event(opening)
        async for index, piece in _chain(first, rest):
            chunk = form.piece_chunk(index, choices[index], piece)
            choices[index].tokens += piece.tokens
            choices[index].text_length += len(piece.text)
            unfinished -= piece.finished is not None
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
    whole.finished = piece.finished


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
