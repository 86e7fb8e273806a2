"""`Tracing`: makes spans from recorded timestamps when a call has ended; the only file that uses OpenTelemetry's API.

Imported only by a process that traces (see `telemetry.py`). `docs/observability.md` shows the tree of spans; `gen_ai.*` and
`error.type` are OpenTelemetry's semantic conventions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from pdserve.common.errors import InvalidRequest, PdServeError
from pdserve.common.request.trace_headers import TRACEPARENT, TRACESTATE, valid_trace_headers

Attribute = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, Attribute]
CLIENT_TRACE_ID = "pdserve.client_trace.id"
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER}


class Event(NamedTuple):
    """Something that happened within a span."""

    name: str
    unix_ns: int
    attributes: Attributes = MappingProxyType({})


class OpenSpan:
    """A span that has begun here, or the place of a peer's span under which ours hang."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._context: Context | None = None

    @property
    def sampled(self) -> bool:
        """True if anything below it will be exported."""
        return self._span.get_span_context().trace_flags.sampled

    @property
    def headers(self) -> dict[str, str]:
        """Headers with which a peer makes its spans below this one."""
        context = self._span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        state = context.trace_state.to_header()
        return {TRACEPARENT: parent, TRACESTATE: state} if state else {TRACEPARENT: parent}

    def start(self, name: str, start_unix_ns: int, attributes: Attributes | None = None) -> OpenSpan:
        """A child that ends later."""
        if self._context is None:
            self._context = set_span_in_context(self._span, Context())
        return self._tracing.start(name, self._context, start_unix_ns, attributes)

    def add(
        self,
        name: str,
        start_unix_ns: int,
        end_unix_ns: int,
        attributes: Attributes | None = None,
        events: Sequence[Event] = (),
        error: PdServeError | None = None,
    ) -> None:
        """A child that is over already."""
        if self.sampled:
            self.start(name, start_unix_ns, attributes).end(max(start_unix_ns, end_unix_ns), events=events, error=error)

    def end(
        self,
        end_unix_ns: int,
        attributes: Attributes | None = None,
        events: Sequence[Event] = (),
        error: PdServeError | None = None,
    ) -> None:
        """Called once. error: becomes the span's status and `error.type`; a success has no status."""
        span = self._span
        if span.is_recording():
            if attributes:
                span.set_attributes(attributes)
            for event in events:
                span.add_event(event.name, event.attributes, event.unix_ns)
            if error is not None:
                span.set_attribute("error.type", error.code)
                span.set_status(Status(StatusCode.ERROR, _status_text(error)))
        span.end(end_unix_ns)


def _status_text(error: PdServeError) -> str:
    """Status text of a failed span: of a bad request only its field, since the message repeats the client's input."""
    return f"{error.code}: {(error.field or '') if isinstance(error, InvalidRequest) else error.message}"


class Tracing:
    """The tracer of one process. `close` it."""

    def __init__(self, resource: Resource, processor: SpanProcessor, sampler: Sampler | None = None) -> None:
        """sampler: by default that of `OTEL_TRACES_SAMPLER`."""
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("pdserve")

    def close(self) -> None:
        """Export what is left; bounded, and blocking."""
        self._provider.shutdown()

    def root(
        self, name: str, caller_headers: Mapping[str, str], start_unix_ns: int, attributes: Attributes
    ) -> OpenSpan:
        """A server's span: a child of the caller's, or the first of a new trace when there is none."""
        parent = _peer_context(caller_headers)
        context = Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())
        return self.start(name, context, start_unix_ns, attributes, kind="server")

    def linked_root(
        self, name: str, stranger_headers: Mapping[str, str], start_unix_ns: int, attributes: Attributes
    ) -> OpenSpan:
        """A server's span, the first of a new trace; this service decides whether it is sampled.

        If the client sent a context of its own, the span has a link to it and its trace as an attribute.
        """
        stranger = _peer_context(stranger_headers)
        links: tuple[Link, ...] = ()
        if stranger is not None:
            links = (Link(stranger),)
            attributes = {**attributes, CLIENT_TRACE_ID: f"{stranger.trace_id:032x}"}
        return self.start(name, Context(), start_unix_ns, attributes, kind="server", links=links)

    def below(self, headers: Mapping[str, str]) -> OpenSpan | None:
        """The peer's span that `headers` name; None when they name none, or one that is not sampled."""
        parent = _peer_context(headers)
        if parent is None or not parent.trace_flags.sampled:
            return None
        return OpenSpan(self, NonRecordingSpan(parent))

    def start(
        self,
        name: str,
        context: Context,
        start_unix_ns: int,
        attributes: Attributes | None = None,
        kind: Literal["internal", "server"] = "internal",
        links: Sequence[Link] = (),
    ) -> OpenSpan:
        """A span below what `context` holds. A process needs it only through `OpenSpan`."""
        span = self._tracer.start_span(
            name,
            context,
            kind=_KINDS[kind],
            attributes=attributes,
            links=links,
            start_time=start_unix_ns,
            record_exception=False,
        )
        return OpenSpan(self, span)


def _peer_context(headers: Mapping[str, str]) -> SpanContext | None:
    valid = valid_trace_headers(headers)
    if not valid:
        return None
    _, trace_id, span_id, flags, *_ = valid[TRACEPARENT].split("-")
    state = TraceState.from_header([valid[TRACESTATE]]) if TRACESTATE in valid else None
    return SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16) & 1), state)
