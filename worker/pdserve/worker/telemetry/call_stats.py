"""`CallStats`: the stages and outcome of one call of a router, from moments that the engine recorded.

Spans and metrics are made from it after the engine has removed the request, since the end of an aborted request is known only then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, NamedTuple

from pdserve.common import clock
from pdserve.common.errors import Cancelled, InternalError, PdServeError
from pdserve.common.request.cached_tokens import NOTHING_CACHED
from pdserve.common.request.engine_types import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
)
from pdserve.worker.engine_client import NOTHING_MORE, RequestEnd
from pdserve.worker.transfers.transfer_messages import ReceivedBlocks

Call = Literal["prefill", "decode"]


class Stage(NamedTuple):
    """A stage of a call between two moments of the engine; also the name of a span and of a metric."""

    name: str
    start: str
    end: str


PREFILL_STAGES = (
    Stage("prefill.queue", "queued", "scheduled"),
    Stage("prefill.compute", "scheduled", "first_token"),
)
LOCAL_STAGES = (*PREFILL_STAGES, Stage("decode.generate", "first_token", "finished"))
REMOTE_STAGES = (
    Stage("decode.reserve", "queued", "kv_reserved"),
    Stage("kv.transfer", "kv_reserved", "kv_landed"),
    Stage("decode.queue", "kv_landed", "scheduled"),
    Stage("decode.generate", "scheduled", "finished"),
)


class PassedSpan(NamedTuple):
    """Times of one stage, `clock.monotonic()` seconds."""

    name: str
    start: float
    end: float
    cause: PdServeError | None
    """The error that ended the stage early; None if it completed."""


class CallStats:
    """Record of one call. Enter it around the call; `close` it when the engine has removed the request."""

    def __init__(self, call: Call, request: EngineCoreRequest, on_closed: Callable[[CallStats], None]) -> None:
        """on_closed: called once with these stats after `close`."""
        self.call = call
        self.request = request
        self.transfer: ReceivedBlocks | None = None
        """The transfer of a call whose KV, or a part of it, comes from another worker, once it is closed; else None."""
        self.moments: dict[str, float] = {"queued": request.arrival_time}
        self.prefill_chunks: list[tuple[float, int]] = []
        self.num_output_tokens = 0
        self.cached_tokens = NOTHING_CACHED
        self.num_preemptions = 0
        self._drafted: dict[int, tuple[int, int]] = {}
        """Sequence -> its drafts so far, and those that were accepted."""
        self.preempted_at: list[float] = []
        """`clock.monotonic()` seconds."""
        self.prefills_locally = not request.remote_prefill
        self.cause: PdServeError | None = None
        self.lease_lost: PdServeError | None = None
        """The reason why the transfer of a prefill call ended before its receiver had all blocks; not a failure of a stage."""
        self.ended_at = 0.0
        """When the call ended, `clock.monotonic()` seconds."""
        self._on_closed = on_closed

    def __enter__(self) -> CallStats:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.left(error)

    def left(self, error: BaseException | None) -> None:
        """Note the end of the call, with what ended it early."""
        self.ended_at = clock.monotonic()
        if isinstance(error, PdServeError):
            self.cause = error
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.cause = Cancelled("the router ended the call")
        elif error is not None:
            self.cause = InternalError(f"the service failed: {type(error).__name__}")

    def take(self, output: EngineCoreOutput) -> None:
        """Record an output that was sent to the router, and its outcome."""
        self.num_output_tokens += len(output.new_token_ids)
        if output.moments:
            self.moments.update(output.moments)
        if output.prefill_chunks:
            self.prefill_chunks = output.prefill_chunks
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.num_preemptions > self.num_preemptions:
            self.num_preemptions = output.num_preemptions
        if output.num_draft_tokens:
            self._drafted[output.index] = output.num_draft_tokens, output.num_accepted_tokens
        if output.prefills_locally:
            self.prefills_locally = True
        if output.events:
            self._note(output.events)

    def close(self, end: RequestEnd = NOTHING_MORE) -> None:
        """Complete the record after the engine has removed the request."""
        self.transfer = end.received
        if (aborted := end.aborted) is not None:
            self.moments.update(aborted.moments)
            self.moments.pop("finished", None)
            self.prefill_chunks = aborted.prefill_chunks
            self.num_preemptions = aborted.num_preemptions
            self._note(aborted.events)
        self._on_closed(self)

    def _note(self, events: list[EngineCoreEvent]) -> None:
        self.preempted_at += [event.timestamp for event in events if event.type is EngineCoreEventType.PREEMPTED]

    @property
    def num_draft_tokens(self) -> int:
        return sum(drafted for drafted, _ in self._drafted.values())

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that equalled the sampled token."""
        return sum(accepted for _, accepted in self._drafted.values())

    @property
    def was_stopped(self) -> bool:
        """True if the router may have ended the call because of a stop string, which is no failure."""
        return (
            isinstance(self.cause, Cancelled)
            and bool(self.request.sampling_params.stop)
            and "first_token" in (self.moments)
        )

    @property
    def outcome(self) -> str:
        """`ok`, or an error's code."""
        if self.was_stopped:
            return "ok"
        cause = self.cause or self.lease_lost
        return "ok" if cause is None else cause.code

    def stages(self) -> list[PassedSpan]:
        """The stages that were entered, in order; the last one has the cause of an early end."""
        if self.call == "prefill":
            plan: tuple[Stage, ...] = PREFILL_STAGES
        else:
            plan = LOCAL_STAGES if self.prefills_locally else REMOTE_STAGES
        cause = None if self.was_stopped else self.cause
        passed: list[PassedSpan] = []
        for stage in plan:
            start, end = self.moments.get(stage.start), self.moments.get(stage.end)
            if start is None:
                break
            if end is None:
                # the end of the call, or of the engine's work, for example if the first token was the last
                end = max(start, self.moments.get("finished", self.ended_at))
                passed.append(PassedSpan(stage.name, start, end, cause))
                return passed
            passed.append(PassedSpan(stage.name, start, end, None))
        if cause is not None and not isinstance(cause, Cancelled) and passed:
            passed[-1] = passed[-1]._replace(cause=cause)
        return passed
