"""Where spans go, and what a coordinator tells of an answer.

Serve makes the provider. RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH=deployments.tracing:exporters turns tracing
on, RAY_SERVE_TRACING_SAMPLING_RATIO says for how many requests, and OpenTelemetry's own variables where to:
OTEL_TRACES_EXPORTER (otlp or console), OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME and others.

Names are those of OpenTelemetry's conventions for generative AI where there is one, and `slipstream.*` else.
Prompts and answers are in no span.
"""

import os
from typing import Final

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
)
from opentelemetry.trace import StatusCode

from deployments.stats import RequestStats
from workers.request import SamplingParams, StopRules
from workers.rpc import messages as m
from workers.tracing import Stages, traceparent

ROUNDS_PER_SPAN: Final = 16
"""Of so many rounds of an answer, one has a span."""


def exporters() -> list[SpanProcessor]:
    """What Serve calls in every process: see the module's docstring.

    Raises ValueError for an exporter of another name, ImportError with the package to install without OTLP's.
    """
    name = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
    if name == "console":
        return [SimpleSpanProcessor(ConsoleSpanExporter())]
    if name != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER is {name!r}; it can be otlp or console")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ImportError(
            "OTEL_TRACES_EXPORTER=otlp needs the package opentelemetry-exporter-otlp-proto-grpc "
            "(pip install 'slipstream[otlp]')"
        ) from error
    return [BatchSpanProcessor(OTLPSpanExporter())]


class AnswerTrace:
    """The span of an answer at its coordinator: lease, prefill, and some of its rounds.

    `traceparent` is for the workers; empty if nobody records.
    """

    def __init__(
        self,
        operation: str,
        model_id: str,
        request_id: str,
        sampling: SamplingParams,
        stopping: StopRules,
    ) -> None:
        self._stages = Stages(
            f"{operation} {model_id}",
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "slipstream",
                "gen_ai.request.model": model_id,
                "gen_ai.request.max_tokens": stopping.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.seed": sampling.seed,
                "gen_ai.response.id": request_id,
            },
        )
        self.traceparent = traceparent(self._stages.span)
        self._hits = 0

    def leased(self, worker_id: str) -> None:
        """The answer has a place on a target."""
        self._stages.stage("lease", {"slipstream.worker": worker_id})

    def prefilled(self, prompt_tokens: int) -> None:
        """The first token has come."""
        self._stages.stage("prefill", {"gen_ai.usage.input_tokens": prompt_tokens})

    def round(self, committed: m.Committed, stats: RequestStats) -> None:
        """A round is over, and counted."""
        hit, self._hits = stats.hits > self._hits, stats.hits
        if stats.rounds % ROUNDS_PER_SPAN != 1:
            self._stages.skip()
            return
        self._stages.stage(
            "round",
            {
                "slipstream.round": stats.rounds,
                "slipstream.base_len": committed.base_len,
                "slipstream.drafted": committed.drafted,
                "slipstream.accepted": committed.accepted,
                "slipstream.hit": hit,
                "slipstream.price": committed.price,
            },
        )

    def ended(self, stats: RequestStats, prompt_tokens: int) -> None:
        """The answer is over, whatever ended it."""
        if not self._stages.recording:
            return
        if stats.finish_reason not in ("stop", "length", "abort"):
            self._stages.span.set_attribute("error.type", stats.finish_reason)
            self._stages.span.set_status(StatusCode.ERROR)
        first = stats.first_token_s
        self._stages.end(
            {
                "gen_ai.response.finish_reasons": [stats.finish_reason],
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": stats.tokens,
                **({} if first is None else {"gen_ai.response.time_to_first_chunk": first}),
                "slipstream.drafter": stats.drafter,
                "slipstream.rounds": stats.rounds,
                "slipstream.drafted": stats.draft_tokens,
                "slipstream.accepted": stats.accepted_tokens,
                "slipstream.accepted_length": stats.mean_accepted_length,
                "slipstream.hit_rate": stats.hit_rate,
            }
        )
