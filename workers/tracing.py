"""Spans of answers, by OpenTelemetry's API alone: what becomes of them the process around decides.

Between processes a span is known by its W3C traceparent; an empty one means that nobody records.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_HEADER: Final = "traceparent"
# It finds the process's provider when it is used.
_TRACER: Final = trace.get_tracer("slipstream")

Attributes = Mapping[str, Any]


def traceparent(span: Span) -> str:
    """What another process needs to make spans below this one."""
    if not span.is_recording():
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier[_HEADER]


class Stages:
    """A span that is one process's part of an answer, and the stages of it, one after the other."""

    def __init__(
        self,
        name: str,
        attributes: Attributes,
        parent: str | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        """Begin it below another process's span, below this context's if `parent` is None."""
        self.span: Span = INVALID_SPAN
        self._since = 0
        if parent == "":
            return
        context = None if parent is None else _PROPAGATOR.extract({_HEADER: parent}, Context())
        self._since = time.time_ns()
        self.span = _TRACER.start_span(name, context, kind, attributes, start_time=self._since)

    @property
    def recording(self) -> bool:
        """Whether anybody looks."""
        return self.span.is_recording()

    def stage(self, name: str, attributes: Attributes) -> None:
        """A stage is over that began when the one before it was."""
        if self.recording:
            now = time.time_ns()
            context = trace.set_span_in_context(self.span)
            _TRACER.start_span(name, context, attributes=attributes, start_time=self._since).end(
                now
            )
            self._since = now

    def skip(self) -> None:
        """A stage is over that nobody wants to see."""
        if self.recording:
            self._since = time.time_ns()

    def end(self, attributes: Attributes) -> None:
        """The whole is over."""
        self.span.set_attributes(attributes)
        self.span.end()
