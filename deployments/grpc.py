"""The gRPC front door: `slipstream.v1.Inference` in terms of the coordinator."""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, get_args

from ray.serve.grpc_util import RayServegRPCContext

from deployments.coordinator import Coordinator, Options, ServedModel, SpeculationOptions
from deployments.keys import Gate, Key, bearer
from deployments.round import Piece
from deployments.stats import RequestStats
from deployments.structure import grammar_of
from protos import inference_pb2 as pb
from workers import limits
from workers.request import Mode, Verification
from workers.rpc import messages as m
from workers.rpc.errors import InvalidRequest, PermissionDenied, ServiceError

_REASONS: Final = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
_ROLES: Final = ("system", "user", "assistant")
_LOOPBACK: Final = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")


async def generate(
    coordinator: Coordinator, request: pb.GenerateRequest, context: RayServegRPCContext
) -> AsyncGenerator[pb.GenerateResponse]:
    """Inference.Generate."""
    request_id = f"gen-{secrets.token_hex(12)}"
    try:
        key = _identify(coordinator.gate, context)
        model = await coordinator.model(request.model)
        prompt = await _prompt(model, request)
        options = await _options(request_id, request)
        asked = model.requests(prompt, options, "" if key is None else key.id)[0]
        if asked.prompt_only:
            raise InvalidRequest("max_tokens must be at least 1, not 0", "max_tokens")
        generation = model.generation(asked)
        tokens = 0
        async with coordinator.gate.admit(key, 1):
            async for piece in generation.pieces():
                tokens += len(piece.tokens)
                response = _response(request_id, piece)
                if piece.finished is not None:
                    response.finish_reason = _REASONS[piece.finished.reason]
                    response.usage.prompt_tokens = len(prompt)
                    response.usage.completion_tokens = tokens
                    if request.speculation.stats:
                        response.speculation.CopyFrom(_stats(generation.stats))
                yield response
    except ServiceError as error:
        raise _with_status(context, error) from error


async def info(
    coordinator: Coordinator, request: pb.InfoRequest, context: RayServegRPCContext
) -> pb.InfoResponse:
    """Inference.Info."""
    try:
        _identify(coordinator.gate, context)
        model = await coordinator.model(request.model)
        workers = await coordinator.workers()
    except ServiceError as error:
        raise _with_status(context, error) from error
    here = pb.Process(
        role="coordinator",
        process_id=os.getpid(),
        host=socket.gethostname(),
        worker_id=coordinator.worker_id,
    )
    return pb.InfoResponse(
        model=model.model_id,
        max_model_len=model.info.max_model_len,
        dtype=model.info.dtype,
        drafters=model.drafter_names,
        feature_bytes_per_token=model.info.feature_bytes_per_token,
        processes=[
            here,
            *(
                pb.Process(
                    role=worker.role,
                    process_id=worker.info.process_id,
                    host=worker.info.host,
                    worker_id=worker.info.worker_id,
                    running_sessions=worker.status.running_sessions,
                    waiting_sessions=worker.status.waiting_sessions,
                    kv_slots=worker.status.kv_slots,
                    kv_free_slots=worker.status.kv_free_slots,
                )
                for worker in workers
                if worker.status is not None
            ),
        ],
    )


def _identify(gate: Gate, context: RayServegRPCContext) -> Key | None:
    """The caller's key. Serve's gRPC proxy listens everywhere: without keys only this host may call."""
    if gate.guarded:
        metadata = dict(context.invocation_metadata() or ())
        return gate.identify(bearer(str(metadata.get("authorization", ""))))
    if not context.peer().startswith(_LOOPBACK):
        raise PermissionDenied(
            "without API keys the gRPC port answers this host only: set api_keys_file on the server"
        )
    return None


def _with_status(context: RayServegRPCContext, error: ServiceError) -> Exception:
    """The error to raise after its code and details were set on the call."""
    context.set_code(error.code)
    context.set_details(str(error))
    return error


async def _prompt(model: ServedModel, request: pb.GenerateRequest) -> list[int]:
    tokenizer = model.tokenizer
    match request.WhichOneof("prompt"):
        case "text":
            return await tokenizer.encode(request.text)
        case "token_ids":
            return list(request.token_ids.ids)
        case "conversation":
            messages = [
                {"role": message.role, "content": message.content}
                for message in request.conversation.messages
            ]
            if not messages or any(message["role"] not in _ROLES for message in messages):
                raise InvalidRequest(
                    f"conversation needs messages with the roles {', '.join(_ROLES)}",
                    "conversation",
                )
            return await tokenizer.encode_chat(messages)
        case _:
            raise InvalidRequest("set one of text, token_ids and conversation", "prompt")


async def _structure(request: pb.GenerateRequest) -> str:
    """The grammar of the answer; empty if it may be anything."""
    if not request.HasField("structure"):
        return ""
    kind = request.structure.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("structure needs one of json, regex, choice and grammar", "structure")
    value: Any = getattr(request.structure, kind)
    if kind == "choice":
        value = list(value.texts)
        if not value:
            raise InvalidRequest("structure.choice needs at least one text", "structure.choice")
    return await asyncio.to_thread(grammar_of, kind, value, f"structure.{kind}")


async def _options(request_id: str, request: pb.GenerateRequest) -> Options:
    sampling, stopping, speculation = request.sampling, request.stopping, request.speculation
    if request.HasField("logprobs") and request.logprobs > limits.MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"logprobs must be from 0 to {limits.MAX_TOP_LOGPROBS}, not {request.logprobs}",
            "logprobs",
        )
    # Every field of Sampling has the name of the one in SamplingParams.
    given = {field.name: value for field, value in sampling.ListFields()}
    chat = request.WhichOneof("prompt") == "conversation"
    return Options(
        request_id=request_id,
        operation="chat" if chat else "text_completion",
        sampling=given,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens,
        stop=tuple(stopping.stop),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        include_stop=stopping.include_stop_str_in_output,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        speculation=SpeculationOptions(
            enabled=speculation.enabled if speculation.HasField("enabled") else True,
            drafters=tuple(speculation.drafters),
            max_draft_tokens=speculation.max_draft_tokens
            if speculation.HasField("max_draft_tokens")
            else None,
            tree=speculation.tree if speculation.HasField("tree") else True,
            mode=_one_of("mode", get_args(Mode), speculation.mode),
            verification=_one_of("verification", get_args(Verification), speculation.verification)
            or "coupled",
            lossy=speculation.lossy,
        ),
        grammar=await _structure(request),
        timeout_s=request.timeout_ms / 1000 or None,
    )


def _one_of(field: str, names: Sequence[str], name: str) -> Any:
    """The name, if it is one of them; None if it is left out."""
    if name and name not in names:
        raise InvalidRequest(
            f"{field} must be one of {', '.join(names)}, not {name!r}", f"speculation.{field}"
        )
    return name or None


def _response(request_id: str, piece: Piece) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        id=request_id,
        text=piece.text,
        token_ids=piece.tokens,
        logprobs=[_logprobs(entry) for entry in piece.logprobs],
    )


def _logprobs(entry: m.TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=entry.logprob,
        top=[pb.TopLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top],
    )


def _stats(stats: RequestStats) -> pb.SpeculationStats:
    return pb.SpeculationStats(
        drafter=stats.drafter,
        rounds=stats.rounds,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        mean_accepted_length=stats.mean_accepted_length,
        acceptance_by_depth=stats.acceptance_by_depth,
        hit_rate=stats.hit_rate,
    )
