"""`PushedDecode`: a decode call that passes the engine's outputs to the router's stream without a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdserve.common import timeline
from pdserve.common.address.peer_address import verify_worker_id
from pdserve.common.errors import InternalError, NeedsPrefill, PdServeError
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest
from pdserve.common.request.wire.decode_wire import (
    admitted_event,
    landed_event,
    migrated_event,
    migrating_event,
    needs_prefill_event,
    output_events,
    outputs_event,
    prefilling_locally_event,
    receiving_event,
)
from pdserve.decode.decode_moments import LOCAL_MOMENTS, REMOTE_MOMENTS
from pdserve.engine.output_stream import engine_error
from pdserve.kv_transfer.control.receiver_transfer import SourceRef
from pdserve.kv_transfer.control.source_transfer import PeerId, TransferTarget
from pdserve.v1 import step_stream_pb2
from pdserve.worker.engine_client import EngineClient, Landing, RequestStream, SourceEnd
from pdserve.worker.source_reader import verify_transfer_id
from pdserve.worker.step_stream.step_call import StepCall
from pdserve.worker.telemetry.call_stats import CallStats


class PushedDecode:
    """One decode call. Ends with the last output of its last sequence, or with the transfer of its blocks if another worker
    continues it; with an error; or with the router's cancellation."""

    def __init__(
        self, call: StepCall, engine: EngineClient, request: EngineCoreRequest, record: CallStats, block_bytes: int
    ) -> None:
        """block_bytes: of a KV block."""
        self._call = call
        self._engine = engine
        self._request = request
        self._record = record
        self._block_bytes = block_bytes
        self._names = REMOTE_MOMENTS if request.remote_prefill else LOCAL_MOMENTS
        self._num_open = request.n
        self._stream: RequestStream | None = None
        self._early: list[EngineCoreOutput] = []
        """Outputs that arrived while the request was being submitted: a refusal."""
        self._has_begun = False
        """True after the first output, which reports more than tokens."""
        self._has_ended = False

    def begin(self, stream_interval: int, source: SourceRef | None) -> None:
        """Submit the request; a refusal ends the call."""
        try:
            self._stream = self._engine.submit(
                self._request, self._record.take, stream_interval, source, on_output=self._take
            )
        except PdServeError as error:
            self._end(error)
            return
        self._call.on_cancel = self._cancel
        self._call.on_ended_sequences = self._end_sequences
        self._call.on_migrate = self._migrate
        self._stream.on_migrated = self._migrated
        moment = timeline.PREFILL_QUEUED if source is None else timeline.DECODE_QUEUED
        self._call.event(admitted_event(moment, self._request.arrival_time))
        if source is not None:
            self._stream.on_receiving = self._receiving
            self._stream.on_landed = self._landed
        for output in self._early:
            self._take(output)

    def _take(self, output: EngineCoreOutput) -> None:
        if self._stream is None:
            self._early.append(output)
            return
        if self._has_ended:
            return
        try:
            self._send(output)
        except Exception as error:
            self._end(InternalError(f"the service failed: {type(error).__name__}"))
            self._call.fail(error)

    def _send(self, output: EngineCoreOutput) -> None:
        if (
            self._has_begun
            and output.finish_reason is None
            and output.new_logprobs is None
            and not output.moments
            and not output.error_code
            and output.migration is None
        ):
            self._call.tokens(output.index, output.first_position, output.new_token_ids)
            return
        if output.error_code:
            self._end(engine_error(output))
            return
        if output.prefills_locally and not self._has_begun:
            self._call.event(prefilling_locally_event())
            self._names = LOCAL_MOMENTS
        if output.new_token_ids or output.finish_reason is not None:
            self._has_begun = True
            if output.prompt_logprobs is not None:
                self._call.events(output_events(output, self._names))
            else:
                self._call.event(outputs_event(output, self._names))
        if output.migration is not None:
            self._call.event(migrating_event(output, output.migration))
        if output.finish_reason is not None:
            self._sequence_ended()

    def _sequence_ended(self) -> None:
        self._num_open -= 1
        if self._num_open <= 0:
            self._end(None)

    def _receiving(self, awaits_source: bool) -> None:
        if not self._has_ended:
            self._call.event(receiving_event(awaits_source))

    def _landed(self, landing: Landing) -> None:
        if not self._has_ended:
            self._call.event(landed_event(landing.num_blocks, self._block_bytes, landing.connector))

    def _end_sequences(self, indexes: Sequence[int], turn: int | None) -> None:
        for index in indexes:
            self._engine.end_sequence(self._request.request_id, index)

    def _migrate(self, migrate: step_stream_pb2.Migrate) -> None:
        """Raises: InvalidRequest for a transfer that cannot be one."""
        verify_transfer_id("migrate.transfer_id", migrate.transfer_id)
        verify_worker_id("migrate.receiver.worker_id", migrate.receiver.worker_id)
        receiver = PeerId(migrate.receiver.worker_id, migrate.receiver.epoch)
        target = TransferTarget(migrate.transfer_id, receiver, self._request.remaining_s)
        without = migrate.receiver.without_draft_head
        self._engine.migrate_sequence(self._request.request_id, migrate.index, target, without_draft_head=without)

    def _migrated(self, index: int, end: SourceEnd) -> None:
        if not self._has_ended:
            self._call.event(migrated_event(index, end.state.name, end.cause))
            self._sequence_ended()

    def _cancel(self) -> None:
        self._end(asyncio.CancelledError())

    def _end(self, error: BaseException | None) -> None:
        """End the call at the engine and at the router; the first end counts."""
        if self._has_ended:
            return
        self._has_ended = True
        self._record.left(error)
        self._engine.release(self._stream, self._record.close)
        if isinstance(error, NeedsPrefill):
            self._call.event(needs_prefill_event(error.uncached_tokens))
            error = None
        self._call.end(error if isinstance(error, PdServeError) else None)
