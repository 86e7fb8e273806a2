"""`EngineClient`: the engine for the asyncio thread: submit a request, iterate over its outputs, abort."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pdserve.common.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    WorkerLost,
)
from pdserve.common.request.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
    StreamingUpdate,
)
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.engine_thread import ENGINE_FAILED, EngineThread, in_event_loop
from pdserve.engine.output_stream import OutputStream, failed_output
from pdserve.engine.request import Request
from pdserve.engine.scheduler.kv_messages import IntoEngine
from pdserve.engine.stats.stat_recorder import StatRecorder
from pdserve.worker.kv_event_publisher import KvEventPublisher
from pdserve.worker.prefill_rate import PrefillRate
from pdserve.worker.step_totals import StepTotals

OnEnded = Callable[[Request | None], None]
"""Called with the aborted request, or None when it had ended by itself; the engine no longer uses it."""


class EngineClient:
    """Used in the asyncio thread."""

    def __init__(
        self,
        core: EngineCore,
        num_threads: int = 1,
        cpu_core: int | None = None,
        max_waiting: int | None = None,
        max_sessions: int = 0,
        recorder: StatRecorder | None = None,
    ) -> None:
        """max_waiting: requests that may wait in the engine; None: no limit. max_sessions: most sessions open at a time.

        recorder: None without stat loggers.
        """
        self._core = core
        self._streams: dict[str, OutputStream] = {}
        self._sequence_ids: dict[str, tuple[str, ...]] = {}
        """Request id -> what the engine calls its sequences, until it has nothing of the request any more."""
        self._taken: set[str] = set()
        """All of these."""
        self._thread = EngineThread(
            core, in_event_loop(asyncio.get_running_loop()), self._dispatch, self._engine_died, num_threads, cpu_core
        )
        self.stats = SchedulerStats(num_blocks_total=core.config.num_blocks, num_blocks_free=core.config.num_blocks)
        self.step_totals = StepTotals()
        self._recorder = recorder
        self._prefill_rate = PrefillRate()
        self.max_waiting = max_waiting
        self._num_submitted = 0
        self.num_sessions = 0
        """Streaming sessions that are open, also between turns; counted by `DecodeServicer`."""
        self.max_sessions = max_sessions
        self.died = asyncio.Event()
        self.draining = False
        self._on_output: Callable[[EngineCoreOutput], None] | None = None
        self.cached_blocks = KvEventPublisher()
        self._leaving: dict[str, OnEnded | None] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}

    def subscribe(self, on_output: Callable[[EngineCoreOutput], None]) -> None:
        """Call `on_output` with every output, after its stream got it. One subscriber."""
        self._on_output = on_output

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and what compiles and holds grammars; waits."""
        self._thread.stop()
        if self._recorder is not None:
            self._recorder.log()
        self._core.scheduler.grammars.close()

    @property
    def tick(self) -> int:
        return self._core.heartbeat.tick

    @property
    def tick_age_s(self) -> float:
        """Seconds since the engine's loop last made progress."""
        return max(0.0, time.monotonic() - self._core.heartbeat.ticked_at)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Recent prefill rate; 0 if it is unknown."""
        return self._prefill_rate.tokens_per_s

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place in a step or for remote KV, including those on their way to the engine."""
        stats = self.stats
        return stats.num_waiting_reqs + stats.num_remote_kv_reqs + self._num_submitted - stats.num_added_reqs

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def core(self) -> EngineCore:
        """For what may be read from any thread: config, vocabulary, tick, `verify`."""
        return self._core

    def verify(self, request: EngineCoreRequest) -> None:
        """Raises: InvalidRequest for what the engine cannot serve, and when a sequence of that name is here already."""
        self._core.verify(request)
        for sequence_id in _sequence_ids(request):
            if sequence_id in self._taken:
                raise InvalidRequest(f"request {sequence_id} is here already", "request_id")

    def submit(
        self,
        request: EngineCoreRequest,
        observer: Callable[[EngineCoreOutput], None] | None = None,
        stream_interval: int = 1,
    ) -> OutputStream:
        """Queue a request that `verify` has passed. Its stream raises DeadlineExceeded when its deadline passes, whatever the
        router does.

        stream_interval: `OutputStream`'s. Raises: Draining, WorkerLost; Overloaded when `max_waiting` requests wait.
        """
        if self.draining:
            raise Draining("the worker is draining")
        if self.died.is_set():
            raise WorkerLost("the engine has failed")
        if self.max_waiting is not None and (num_waiting := self.num_waiting) >= self.max_waiting:
            raise Overloaded(
                f"{num_waiting} requests wait on this worker, at most {self.max_waiting} may (max_waiting)"
            )
        stream = OutputStream(request.request_id, observer, num_sequences=request.n, interval=stream_interval)
        self._streams[request.request_id] = stream
        self._sequence_ids[request.request_id] = _sequence_ids(request)
        self._taken.update(_sequence_ids(request))
        if request.deadline:
            left_s = max(0.0, request.deadline - time.monotonic())
            self._deadlines[request.request_id] = asyncio.get_running_loop().call_later(left_s, self._expire, stream)
        self._add(request)
        return stream

    def _expire(self, stream: OutputStream) -> None:
        """The deadline has passed: end the request here and report that to its reader."""
        stream.put(failed_output(stream.request_id, DeadlineExceeded("the request's deadline passed at the worker")))
        self.abort(stream.request_id)

    def _forget_deadline(self, request_id: str) -> None:
        if (timer := self._deadlines.pop(request_id, None)) is not None:
            timer.cancel()

    def resume(self, update: StreamingUpdate) -> None:
        """Queue a session's next turn; its outputs continue in the session's stream. Raises: InvalidRequest, Draining."""
        if self.draining:
            raise Draining("the worker is draining")
        self._core.verify_update(update)
        if self._recorder is not None:
            self._recorder.resume_request(update)
        self._thread.post(lambda core: core.resume_request(update))

    def submit_quietly(self, request: EngineCoreRequest) -> None:
        """Queue a request without a stream: only the subscriber gets its outputs."""
        self._add(request)

    def _add(self, request: EngineCoreRequest) -> None:
        self._num_submitted += 1
        if self._recorder is not None:
            self._recorder.add_request(request)
        self._thread.post(lambda core: core.add_request(request))

    def release(self, stream: OutputStream | None, on_ended: OnEnded | None = None) -> None:
        """The reader has left: abort the request, unless it has ended. Harmless when called again.

        stream: None if the request was not submitted. on_ended: called once, in the asyncio thread, when the engine has nothing of
        the request any more.
        """
        if stream is None:
            if on_ended is not None:
                on_ended(None)
            return
        if self._streams.pop(stream.request_id, None) is None:
            return
        self._forget_deadline(stream.request_id)
        self._leaving[stream.request_id] = on_ended
        if self.died.is_set():
            self._left(stream.request_id, None)
        else:
            self._thread.post(lambda core: self._abort_and_tell(core, stream.request_id))

    def _abort_and_tell(self, core: EngineCore, request_id: str) -> None:
        request = core.abort_request(request_id)
        self._thread.call_after_step(lambda: self._left(request_id, request))

    def _left(self, request_id: str, request: Request | None) -> None:
        # only now: until here the engine's last outputs may arrive, which another request of that name must not get
        self._taken.difference_update(self._sequence_ids.pop(request_id, ()))
        if (on_ended := self._leaving.pop(request_id, None)) is not None:
            on_ended(request)

    def abort(self, request_id: str) -> None:
        self._thread.post(lambda core: core.abort_request(request_id))

    def end_sequence(self, request_id: str, index: int, turn: int | None = None) -> None:
        """One of its sequences, or this turn of a session, has ended where its text is made. Harmless when it had ended."""
        self._thread.post(lambda core: core.end_sequence(request_id, index, turn))

    def apply(self, event: IntoEngine) -> None:
        """Pass an event of the transfer side on."""
        self._thread.post(lambda core: core.apply(event))

    def call(self, command: Callable[[EngineCore], object]) -> None:
        """Run something in the engine thread."""
        self._thread.post(command)

    def _dispatch(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.awaits_input:
                    self._forget_deadline(output.request_id)  # it was that of the session's turn
            if self._on_output is not None:
                self._on_output(output)
        if outputs.model_runner_stats is not None:
            self.step_totals.add(outputs.model_runner_stats)
        if self._recorder is not None:
            self._recorder.record(outputs)
        if outputs.blocks_stored or outputs.blocks_removed:
            self.cached_blocks.apply(outputs.blocks_stored, outputs.blocks_removed)
        if outputs.scheduler_stats is not None:
            self._measure(outputs.scheduler_stats)
            self.stats = outputs.scheduler_stats

    def _measure(self, stats: SchedulerStats) -> None:
        self._prefill_rate.add(
            stats.num_computed_prompt_tokens - self.stats.num_computed_prompt_tokens,
            stats.prefill_s - self.stats.prefill_s,
        )

    def _engine_died(self, error: Exception) -> None:
        self.died.set()
        for stream in self._streams.values():
            if stream.awaits_more:  # it was on its way to the engine, which never took it in
                stream.put(failed_output(stream.request_id, WorkerLost(ENGINE_FAILED)))
        for request_id in list(self._leaving):
            self._left(request_id, None)


def _sequence_ids(request: EngineCoreRequest) -> tuple[str, ...]:
    """Ids of the request's sequences in the engine."""
    return tuple(request.sequence_id(index) for index in range(request.index, request.index + request.n))
