"""`EngineClient`: the engine for servicers: submit a request, iterate over its outputs, release it.

It reads an `EngineCoreClient`, and does not depend on the process in which the engine runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pdserve.common import clock
from pdserve.common.errors import (
    AdapterUnavailable,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    PdServeError,
    WorkerLost,
)
from pdserve.common.request.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
    StreamingUpdate,
)
from pdserve.common.request.known_adapters import NO_ADAPTERS
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.client.messages import AbortedRequest, EngineFailed, ForReader, Released, TransferEvent
from pdserve.engine.output_stream import OutputStream, failed_output
from pdserve.kv_transfer.control.transfer_view import TransfersPage
from pdserve.worker.kv_event_publisher import KvEventPublisher
from pdserve.worker.prefill_rate import PrefillRate
from pdserve.worker.step_totals import StepTotals
from pdserve.worker.transfers.transfer_messages import (
    BlocksLanded,
    ReceivedBlocks,
    Receiving,
    SourceEnded,
    TransferCounts,
    TransferNews,
    news_of,
    typed,
)

ANSWER_S = 5.0
"""Seconds for the engine to answer a question."""

if TYPE_CHECKING:
    from pdserve.kv_transfer.control.receiver_transfer import SourceRef
    from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, TransferTarget
    from pdserve.kv_transfer.control.transfer_state import SourceState


class RequestEnd(NamedTuple):
    """The engine has nothing more of a released request."""

    aborted: AbortedRequest | None = None
    """None if the request had ended by itself."""
    received: ReceivedBlocks | None = None
    """None without a transfer to this worker."""


NOTHING_MORE = RequestEnd()
"""The end of a request of which the engine has nothing to add."""
OnEnded = Callable[[RequestEnd], None]
"""Called when the engine no longer uses the request."""


class Landing(NamedTuple):
    """A transfer to this worker that has ended well."""

    num_blocks: int
    connector: str


class SourceEnd(NamedTuple):
    """The end of a transfer from this worker."""

    state: SourceState
    cause: PdServeError | None
    """The error that ended it before its receiver had all blocks."""


class RequestStream(OutputStream):
    """The outputs of a request, and what becomes of the transfer of its blocks."""

    def __init__(
        self,
        request: EngineCoreRequest,
        observer: Callable[[EngineCoreOutput], None] | None,
        interval: int,
        on_output: Callable[[EngineCoreOutput], None] | None = None,
    ) -> None:
        super().__init__(request.request_id, observer, num_sequences=request.n, interval=interval, on_output=on_output)
        loop = asyncio.get_running_loop()
        self.on_receiving: Callable[[bool], None] | None = None
        """Called while a transfer to this worker takes long; True: it waits for its source."""
        self.on_landed: Callable[[Landing], None] | None = None
        """Called when all blocks of a transfer to this worker have landed, before the first output."""
        self.on_migrated: Callable[[int, SourceEnd], None] | None = None
        """Called when the transfer of a sequence that has migrated has ended."""
        self.source_ended: asyncio.Future[SourceEnd] = loop.create_future()
        """Done when a transfer from this worker has ended. Raises: WorkerLost when the engine has died."""

    def on_news(self, news: TransferNews) -> None:
        """Take news of the transfer."""
        match news:
            case Receiving(awaits_source):
                if self.on_receiving is not None:
                    self.on_receiving(awaits_source)
            case BlocksLanded(num_blocks, connector):
                if self.on_landed is not None:
                    self.on_landed(Landing(num_blocks, connector))
            case SourceEnded(state, cause, index):
                end = SourceEnd(state, None if cause is None else cause.error())
                if index is None:
                    if not self.source_ended.done():
                        self.source_ended.set_result(end)
                elif self.on_migrated is not None:
                    self.on_migrated(index, end)


class EngineClient:
    """Used in the asyncio thread."""

    def __init__(
        self,
        core: EngineCoreClient,
        max_waiting: int | None = None,
        max_sessions: int = 0,
    ) -> None:
        """max_waiting: requests that may wait in the engine; None: no limit. max_sessions: most sessions open at a time."""
        self.core = core
        self._streams: dict[str, RequestStream] = {}
        self._sequence_ids: dict[str, tuple[str, ...]] = {}
        """Request id -> engine sequence ids; removed once the engine has dropped the request."""
        self._taken: set[str] = set()
        """All of these."""
        self.stats = core.stats
        self.step_totals = StepTotals()
        self._prefill_rate = PrefillRate()
        self.max_waiting = max_waiting
        self._num_submitted = 0
        self.num_sessions = 0
        """Streaming sessions that are open, also between turns; counted by `DecodeSession`."""
        self.max_sessions = max_sessions
        self.known_adapters = NO_ADAPTERS
        """Adapters that requests may name."""
        self.died = asyncio.Event()
        self.draining = False
        self.cached_blocks = KvEventPublisher()
        self._leaving: dict[str, OnEnded | None] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._is_closing = False
        core.subscribe(self._on_message)

    async def close(self) -> None:
        """End the engine with its transfers; waits."""
        self._is_closing = True
        await self.core.shutdown()

    @property
    def tick(self) -> int:
        return self.core.tick

    @property
    def tick_age_s(self) -> float:
        """Seconds since the engine's loop last made progress."""
        return max(0.0, clock.monotonic() - self.core.ticked_at)

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
    def transfer_counts(self) -> TransferCounts:
        return typed(self.core.transfer_state or TransferCounts(), TransferCounts)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def verify(self, request: EngineCoreRequest) -> None:
        """Raises: InvalidRequest for what the engine cannot serve, and when a sequence of that name is here already;
        AdapterUnavailable."""
        self._verify_adapter(request)
        self.core.verifier.verify(request)
        self._verify_unused(_sequence_ids(request))

    def _verify_unused(self, sequence_ids: tuple[str, ...]) -> None:
        for sequence_id in sequence_ids:
            if sequence_id in self._taken:
                raise InvalidRequest(f"request {sequence_id} is here already", "request_id")

    def _verify_adapter(self, request: EngineCoreRequest) -> None:
        name, fingerprint = request.lora_name, request.lora_fingerprint
        if name and self.known_adapters.get(name) != fingerprint:
            here = self.known_adapters.get(name)
            found = f"it has the fingerprint {here} here" if here else "it is not offered here"
            raise AdapterUnavailable(
                f"the request is for the adapter {name!r} with the fingerprint {fingerprint}: {found}"
            )

    def verify_update(self, update: StreamingUpdate) -> None:
        """Raises: InvalidRequest for a turn of a session that the engine cannot serve."""
        self.core.verifier.verify_update(update)

    def submit(
        self,
        request: EngineCoreRequest,
        observer: Callable[[EngineCoreOutput], None] | None = None,
        stream_interval: int = 1,
        transfer: ExpectedTransfer | SourceRef | None = None,
        on_output: Callable[[EngineCoreOutput], None] | None = None,
    ) -> RequestStream:
        """Queue a request that `verify` has passed. Its stream raises DeadlineExceeded when its deadline passes, whatever the
        router does.

        stream_interval: `OutputStream`'s. transfer: where the request's blocks go, or come from; one that cannot begin ends the
        request with InvalidRequest or TransferFailed. on_output: `OutputStream`'s; it may be called before this returns.
        Raises: Draining, WorkerLost; Overloaded when `max_waiting` requests wait; InvalidRequest when a sequence of that name has
        come since `verify`.
        """
        if self.draining:
            raise Draining("the worker is draining")
        if self.died.is_set():
            raise WorkerLost("the engine has failed")
        if self.max_waiting is not None and (num_waiting := self.num_waiting) >= self.max_waiting:
            raise Overloaded(
                f"{num_waiting} requests wait on this worker, at most {self.max_waiting} may (max_waiting)"
            )
        # other submissions may have come since `verify`, and of two sequences of a name the engine would lose one's blocks
        sequence_ids = _sequence_ids(request)
        self._verify_unused(sequence_ids)
        stream = RequestStream(request, observer, stream_interval, on_output)
        self._streams[request.request_id] = stream
        self._sequence_ids[request.request_id] = sequence_ids
        self._taken.update(sequence_ids)
        if request.deadline:
            left_s = max(0.0, request.deadline - clock.monotonic())
            self._deadlines[request.request_id] = asyncio.get_running_loop().call_later(left_s, self._expire, stream)
        self._num_submitted += 1
        self.core.add_request(request, transfer, is_verified=True)
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
        self.verify_update(update)
        self.core.resume_request(update, is_verified=True)

    def release(self, stream: RequestStream | None, on_ended: OnEnded | None = None) -> None:
        """The reader has left: abort the request and its transfer, unless they have ended. Harmless when called again.

        stream: None if the request was not submitted. on_ended: called once, when the engine has nothing of the request any more.
        """
        if stream is None:
            if on_ended is not None:
                on_ended(NOTHING_MORE)
            return
        if self._streams.pop(stream.request_id, None) is None:
            return
        self._forget_deadline(stream.request_id)
        self._leaving[stream.request_id] = on_ended
        if self.died.is_set():
            self._released(stream.request_id, NOTHING_MORE)
        else:
            self.core.release_request(stream.request_id)

    def abort(self, request_id: str) -> None:
        self.core.abort_requests([request_id])

    def migrate_sequence(
        self, request_id: str, index: int, target: TransferTarget, *, without_draft_head: bool
    ) -> None:
        """Another worker continues a sequence after its next token: see `EngineCoreClient.migrate_sequence`."""
        self.core.migrate_sequence(request_id, index, target, without_draft_head=without_draft_head)

    def end_sequence(self, request_id: str, index: int, turn: int | None = None) -> None:
        """One of its sequences, or this turn of a session, has ended where its text is made. Harmless when it had ended."""
        self.core.end_sequence(request_id, index, turn)

    def meet(self, worker_id: str, epoch: int, address: str) -> None:
        """A peer has started. address: one that this worker may connect to."""
        self.core.call_utility("meet", worker_id, epoch, address)

    async def transfers(self) -> TransfersPage:
        """Transfers under way, and those that ended recently. Raises: WorkerLost when the engine does not answer."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return typed(await self.core.utility_async("get_transfers"), TransfersPage)
        except TimeoutError:
            raise WorkerLost(f"the engine has not answered for {ANSWER_S:g} s") from None

    def revoke_transfers(self, cause: PdServeError) -> None:
        """End all transfers as source."""
        self.core.call_utility("revoke_transfers", cause.code, cause.message)

    # ---- out of the engine

    def _on_message(self, message: ForReader) -> None:
        match message:
            case EngineCoreOutputs():
                self._on_outputs(message)
            case Released(request_id, aborted, received):
                end = RequestEnd(aborted, None if received is None else typed(received, ReceivedBlocks))
                self._released(request_id, end)
            case TransferEvent(request_id, event):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.on_news(news_of(event))
            case EngineFailed(failure):
                if not self._is_closing:
                    self._died_with(failure.error())

    def _released(self, request_id: str, end: RequestEnd) -> None:
        # only now: until here the engine's last outputs may arrive, which another request of that name must not get
        self._taken.difference_update(self._sequence_ids.pop(request_id, ()))
        if (on_ended := self._leaving.pop(request_id, None)) is not None:
            on_ended(end)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
                if output.awaits_input:
                    self._forget_deadline(output.request_id)  # it was that of the session's turn
        if outputs.model_runner_stats is not None:
            self.step_totals.add(outputs.model_runner_stats)
        self.core.recorded(outputs)
        if outputs.blocks_stored or outputs.blocks_removed:
            self.cached_blocks.apply(outputs.blocks_stored, outputs.blocks_removed)
        if outputs.scheduler_stats is not None:
            self._measure(outputs.scheduler_stats)
            self.stats = outputs.scheduler_stats

    def _died_with(self, cause: PdServeError) -> None:
        self.died.set()
        for stream in list(self._streams.values()):
            if stream.awaits_more:  # it was on its way to the engine, which never took it in
                stream.put(failed_output(stream.request_id, cause))
            if not stream.source_ended.done():
                stream.source_ended.set_exception(cause)
                stream.source_ended.exception()  # not every call awaits it
        for request_id in list(self._leaving):
            self._released(request_id, NOTHING_MORE)

    def _measure(self, stats: SchedulerStats) -> None:
        self._prefill_rate.add(
            stats.num_computed_prompt_tokens - self.stats.num_computed_prompt_tokens,
            stats.prefill_s - self.stats.prefill_s,
        )


def _sequence_ids(request: EngineCoreRequest) -> tuple[str, ...]:
    """Ids of the request's sequences in the engine."""
    return tuple(request.sequence_id(index) for index in range(request.index, request.index + request.n))
