"""Traces of a client's request in this router, for metrics and spans; both come from the request's `Timeline`.

RequestTrace   one HTTP or gRPC request        span `{operation} {model}`
PromptTrace    one of its prompts              spans `tokenize`, `route`
AttemptTrace   one placement of a prompt       span `attempt`, the parent of the workers' spans
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pdserve.common import clock
from pdserve.common import timeline as moments
from pdserve.common.errors import Cancelled, DeadlineExceeded, InternalError, NeedsPrefill, PdServeError
from pdserve.common.request.cached_tokens import NOTHING_CACHED, CachedTokens
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.trace_headers import TRACEPARENT
from pdserve.common.timeline import Timeline, now_unix_ns
from pdserve.router.attempts.attempt_failure import AttemptFailed, PrefillNeeded
from pdserve.router.attempts.migration import Migrated
from pdserve.router.placement.placement import Placement
from pdserve.router.placement.routing_decision import RouteAttribute
from pdserve.router.telemetry.router_metrics import RouterMetrics

if TYPE_CHECKING:
    from pdserve.common.telemetry.tracing import Attribute, OpenSpan

_SHOWN_ATTEMPTS = 64
"""Attempts of a prompt that get spans; each step of a beam search is one for every beam."""
_ADMISSION_SHOWN_NS = 1_000_000
_COUNTED_AT_ONCE = 128
_LEFT = Cancelled("the client left")
_TOO_LATE = DeadlineExceeded("the request's deadline passed")


@dataclass(eq=False)
class RequestTrace:
    """Trace of one client request, from its arrival to its end."""

    metrics: RouterMetrics
    started_unix_ns: int
    span: OpenSpan | None
    """None if the request is not traced."""
    headers: dict[str, str]
    """The trace context for workers."""
    _on_end: Callable[[RequestTrace], None] = lambda record: None
    """Called once, after the request."""
    is_recorded: bool = False
    """True if prompts keep the hashes of their blocks, for `TrafficRecord`."""
    runs: list[PromptTrace] = field(default_factory=list, init=False)
    """Traces of the request's prompts."""
    _ended: bool = field(default=False, init=False)

    @property
    def traceparent(self) -> str | None:
        """The request's span, as W3C's header; None if this router traces nothing."""
        return None if self.span is None else self.span.headers[TRACEPARENT]

    def run(self, timeline: Timeline) -> PromptTrace:
        """Begin the trace of a prompt, which `arrived` with the request."""
        timeline.moments_unix_ns[moments.ARRIVED] = self.started_unix_ns
        run = PromptTrace(self, timeline)
        self.runs.append(run)
        return run

    def abort(self, error: PdServeError) -> None:
        """End all open traces with this cause; the first cause counts."""
        for run in self.runs:
            run.error = run.error or error

    def end(self) -> None:
        """End the trace, once, after all its tasks have ended."""
        if self._ended:
            return
        self._ended = True
        now = now_unix_ns()
        self._count(0, now)
        if self.span is not None:
            self._end_span(self.span, now)
        self._on_end(self)

    def _count(self, first: int, now: int) -> None:
        """Record the metrics of the inputs with pauses for other tasks; thousands of inputs take 0.1 s."""
        for run in self.runs[first : first + _COUNTED_AT_ONCE]:
            run.count(now)
        if first + _COUNTED_AT_ONCE < len(self.runs):
            asyncio.get_running_loop().call_soon(self._count, first + _COUNTED_AT_ONCE, now)

    def _end_span(self, span: OpenSpan, now: int) -> None:
        errors = [run.cause for run in self.runs if run.cause is not None]
        end = max((run.end_unix_ns(now) for run in self.runs), default=now)
        cached = CachedTokens.sum(run.cached_tokens for run in self.runs)
        attributes: dict[str, Attribute] = {
            "gen_ai.usage.input_tokens": sum(run.num_prompt_tokens for run in self.runs),
            "gen_ai.usage.output_tokens": sum(run.num_output_tokens for run in self.runs),
            "gen_ai.usage.cache_read.input_tokens": cached.total,
            "gen_ai.response.finish_reasons": [run.finish_reason or "error" for run in self.runs],
        }
        attributes |= cached.span_attributes
        if self.runs:
            timeline = self.runs[0].timeline
            if timeline.ttft_s is not None:
                attributes["gen_ai.latency.time_to_first_token"] = timeline.ttft_s
            for phase, seconds in timeline.critical_path(end).items():
                attributes[f"pdserve.phase.{phase}_s"] = seconds
        span.end(end, attributes, error=errors[0] if errors else None)


class PromptTrace:
    """One prompt, from its arrival to its last token."""

    def __init__(self, request: RequestTrace, timeline: Timeline) -> None:
        self.timeline = timeline
        self.error: PdServeError | None = None
        self.deadline: asyncio.Timeout | None = None
        """The timeout that aborts the prompt; its expiry is the reason of an abort without another cause."""
        self.finish_reason: str | None = None
        self.num_prompt_tokens = 0
        self.cached_tokens = NOTHING_CACHED
        """At most `num_prompt_tokens`, whatever a worker says."""
        self.num_output_tokens = 0
        self.num_attempts = 0
        self.prefill = ""
        self.decode = ""
        """Ids of the last attempt's workers; empty for a role without a call."""
        self.priority = 0
        self.service_tier: str | None = None
        """As `ClientRequest` has them."""
        self.block_size = 0
        """Tokens of a block where the prompt was placed; 0 before that, and where nothing is recorded."""
        self.block_hashes = b""
        """Placement hashes of the prompt's full blocks, 8 bytes each, together."""
        self.is_recorded = request.is_recorded
        """True if `hashed` has an effect."""
        self._metrics = request.metrics
        self._span = request.span
        self._headers = request.headers
        self._tokens_at: dict[int, float] = {}
        """Sequence -> `clock.monotonic()` seconds at which its last tokens were sent to the client."""

    @property
    def cause(self) -> PdServeError | None:
        """The reason for which it was aborted; None if it ended regularly."""
        return None if self.finish_reason is not None else self.abort_reason

    @property
    def outcome(self) -> str:
        """A finish reason, or the code of the error that ended it."""
        return self.finish_reason or (self.cause or _LEFT).code

    @property
    def abort_reason(self) -> PdServeError:
        """The reason of an abort, None without one; also set while the attempts are still ending."""
        late = self.deadline is not None and self.deadline.expired()
        return self.error or (_TOO_LATE if late else _LEFT)

    def end_unix_ns(self, now: int) -> int:
        """Time of the last token, or now if it was aborted."""
        return self.timeline.moments_unix_ns.get(moments.FINISHED, now)

    def tokenized(self, num_prompt_tokens: int) -> None:
        """Record the number of prompt tokens; `arrived` and `tokenized` are marked."""
        self.num_prompt_tokens = num_prompt_tokens
        seen = self.timeline.moments_unix_ns
        if self._span is not None:
            self._span.add(
                "tokenize",
                seen[moments.ARRIVED],
                seen[moments.TOKENIZED],
                {"gen_ai.usage.input_tokens": num_prompt_tokens},
            )

    def admitted(self) -> None:
        """Record admission; makes a span only if the prompt had to wait."""
        seen = self.timeline.moments_unix_ns
        start, end = seen[moments.TOKENIZED], seen[moments.ADMITTED]
        if self._span is not None and end - start >= _ADMISSION_SHOWN_NS:
            self._span.add("admission", start, end)

    def routed(
        self,
        started_unix_ns: int,
        policy: str,
        placement: Placement,
        attributes: Callable[[], Mapping[str, RouteAttribute]],
    ) -> None:
        """Record a placement. attributes: returns attributes of the decision; called only for a span.

        started_unix_ns: start of the choice; the first attempt uses the moments `admitted` and `placed` instead.
        """
        self._metrics.placements.labels(policy, placement.kind).inc()
        for role, worker in (("prefill", placement.prefill), ("decode", placement.decode)):
            if worker is not None:
                self._metrics.placed_calls.add(role, worker)
        if self._span is not None and self._span.sampled and self.num_attempts < _SHOWN_ATTEMPTS:
            seen = self.timeline.moments_unix_ns
            if moments.ATTEMPTED in seen:
                start, end = started_unix_ns, now_unix_ns()
            else:
                start, end = seen[moments.ADMITTED], seen[moments.PLACED]
            self._span.add("route", start, end, attributes())

    def attempt(self, number: int, placement: Placement, num_resumed: int = 0) -> AttemptTrace:
        """A trace to enter around an attempt. num_resumed: tokens that the client already has."""
        started = now_unix_ns()
        if placement.source is None:
            self.timeline.begin_attempt()
            started = self.timeline.moments_unix_ns[moments.ATTEMPTED]
        self.num_attempts += 1
        self.prefill, self.decode = (
            worker.identity.worker_id if worker is not None else "" for worker in (placement.prefill, placement.decode)
        )
        span = None
        if self._span is not None and self.num_attempts <= _SHOWN_ATTEMPTS:
            attributes: dict[str, Attribute] = {
                "pdserve.attempt.number": number,
                "pdserve.attempt.kind": placement.kind,
                "pdserve.attempt.resumed_tokens": num_resumed,
            }
            for role, worker in (("prefill", placement.prefill), ("decode", placement.decode)):
                if worker is not None:
                    attributes[f"pdserve.attempt.{role}"] = worker.identity.worker_id
            span = self._span.start("attempt", started, attributes)
        return AttemptTrace(self, span, self._headers if span is None else span.headers, self._metrics)

    def sampled_by_other(self) -> None:
        """Count an attempt that continues a sampled text with another sampler version."""
        self._metrics.resumes_with_other_sampler.inc()

    def migrated(self, pause_s: float | None) -> None:
        """Count a sequence that another worker was to continue. pause_s: until its first token there; None: there was none."""
        self._metrics.migrated(pause_s)

    def relayed(self, index: int, num_tokens: int, cached_tokens: CachedTokens) -> None:
        """Record new tokens of a sequence that were sent to the client."""
        now = clock.monotonic()
        if not self.num_output_tokens:
            self.cached_tokens = cached_tokens.first(self.num_prompt_tokens)
        if num_tokens and (before := self._tokens_at.get(index)) is not None:
            self._metrics.itl_seconds.observe((now - before) / num_tokens, num_tokens)
        self._tokens_at[index] = now
        self.num_output_tokens += num_tokens

    def hashed(self, placement_hashes: Sequence[bytes], block_size: int) -> None:
        """Keep the hashes of the prompt's full blocks, of `block_size` tokens, if they are recorded."""
        if self.is_recorded and not self.block_size:
            self.block_size = block_size
            self.block_hashes = b"".join(placement_hashes)

    @property
    def num_sequences(self) -> int:
        """Sequences that have output; at least 1."""
        return max(1, len(self._tokens_at))

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first. Several sequences are decoded in parallel, so their mean length counts."""
        return self.timeline.tpot_s(self.num_output_tokens // self.num_sequences)

    def embedded(self, cached_tokens: CachedTokens) -> None:
        """Record the prompt's embedding, which ends it without a token."""
        self.cached_tokens = cached_tokens.first(self.num_prompt_tokens)
        self.finish_reason = str(FinishReason.STOP)

    def count(self, now: int) -> None:
        """Record the metrics of an ended prompt."""
        metrics, cause = self._metrics, self.cause
        metrics.requests.labels(self.outcome).inc()
        metrics.output_tokens.inc(self.num_output_tokens)
        if self.num_output_tokens or cause is None:
            metrics.prompt_tokens.inc(self.num_prompt_tokens)
            for source, num_tokens in self.cached_tokens.by_source().items():
                metrics.cached_tokens[source].inc(num_tokens)
        if (ttft_s := self.timeline.ttft_s) is not None:
            metrics.ttft_seconds.observe(ttft_s)
        if cause is not None:
            metrics.failed(cause)
            return
        end = self.end_unix_ns(now)
        metrics.request_seconds.observe((end - self.timeline.moments_unix_ns[moments.ARRIVED]) / 1e9)
        if (tpot_s := self.tpot_s) is not None:
            metrics.tpot_seconds.observe(tpot_s)
        for phase, seconds in self.timeline.critical_path(end).items():
            metrics.phase_seconds.labels(phase).observe(seconds)


@dataclass(eq=False)
class AttemptTrace:
    """Trace of one attempt; its span is the parent of the workers' spans."""

    _run: PromptTrace
    _span: OpenSpan | None
    headers: dict[str, str]
    """This attempt's trace context."""
    _metrics: RouterMetrics

    def with_trace_headers(self, request: GenerationRequest) -> GenerationRequest:
        """The request with this attempt's trace context."""
        if request.trace_headers == self.headers:
            return request
        return msgspec.structs.replace(request, trace_headers=self.headers)

    def __enter__(self) -> AttemptTrace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        cause = None if self._run.finish_reason is not None else _cause_of(error, self._run)
        outcome = "migrated" if isinstance(error, Migrated) else "ok"
        self._metrics.attempts.labels(outcome if cause is None else cause.code).inc()
        if self._span is not None:
            now = now_unix_ns()
            self._span.end(min(now, self._run.end_unix_ns(now)), error=cause)


def _cause_of(error: BaseException | None, run: PromptTrace) -> PdServeError | None:
    """The cause of a failed attempt. error: the exception of the attempt."""
    match error:
        case None | Migrated():
            return None
        case AttemptFailed():
            return error.error
        case PrefillNeeded():
            return NeedsPrefill(error.uncached_tokens)
        case PdServeError():
            return error
        case asyncio.CancelledError():
            return run.abort_reason
        case _:
            return InternalError(f"the router failed: {type(error).__name__}")
