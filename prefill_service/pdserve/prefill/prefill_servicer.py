"""`PrefillServicer`: the prefill call of an attempt; embeddings and classes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from pdserve.common import timeline
from pdserve.common.address.peer_address import verify_worker_id
from pdserve.common.errors import InternalError, InvalidRequest
from pdserve.common.kv_layout import KvLayout
from pdserve.common.method_handler import Context
from pdserve.common.net.rpc import metadata_of
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest
from pdserve.common.request.wire import moments_to_wire, outputs_to_wire, prompt_logprobs_to_wire
from pdserve.common.transfer_order import TransferOrder
from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, PeerId
from pdserve.kv_transfer.control.source_transfers import TRANSFER_ID_BYTES
from pdserve.kv_transfer.control.transfer_state import SourceState
from pdserve.v1 import prefill_pb2, prefill_pb2_grpc, request_pb2
from pdserve.worker.engine_client import EngineClient
from pdserve.worker.request_reader import RequestReader
from pdserve.worker.step_stream.step_call import StepCall
from pdserve.worker.telemetry.worker_telemetry import WorkerTelemetry

_MOMENTS = {
    "queued": timeline.PREFILL_QUEUED,
    "scheduled": timeline.PREFILL_STARTED,
    "first_token": timeline.PREFILL_COMPUTED,
}
_POOLING_MOMENTS = _MOMENTS | {"finished": timeline.PREFILL_COMPUTED}
_ENDED = {
    SourceState.RELEASED: prefill_pb2.Ended.RELEASED,
    SourceState.REVOKED: prefill_pb2.Ended.REVOKED,
    SourceState.EXPIRED: prefill_pb2.Ended.EXPIRED,
}


@dataclass(frozen=True, eq=False)
class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves `PrefillService`. The call is open as long as its transfer; the end of the call ends the transfer."""

    reader: RequestReader
    engine: EngineClient
    telemetry: WorkerTelemetry
    layout: KvLayout
    """Layout of the worker's KV blocks."""

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        async with contextlib.aclosing(self._prefill(request, metadata_of(context))) as events:
            async for event in events:
                yield event

    def begin_prefill(self, request: prefill_pb2.PrefillRequest, call: StepCall) -> None:
        """Serve `Prefill` as a call of a step stream."""
        call.serve(self._prefill(request, {}))

    async def _prefill(
        self, request: prefill_pb2.PrefillRequest, metadata: Mapping[str, str]
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        engine_request = self.reader.request(request, request.attempt.number, transfer_source=bool(request.transfer_id))
        if engine_request.pooling_params is not None:
            raise InvalidRequest("request.pooling is given: embeddings are asked for with Embed", "pooling")
        if len(request.transfer_id) not in (0, TRANSFER_ID_BYTES):
            raise InvalidRequest(
                f"transfer_id has {len(request.transfer_id)} bytes, not {TRANSFER_ID_BYTES}", "transfer_id"
            )
        if request.transfer_id:
            verify_worker_id("receiver.worker_id", request.receiver.worker_id)
        self.engine.verify(engine_request)
        record = self.telemetry.call("prefill", engine_request, metadata)
        transfer = self._expected(request, engine_request) if request.transfer_id else None
        stream = None
        try:
            with record:
                stream = self.engine.submit(engine_request, record.take, transfer=transfer)
                yield prefill_pb2.PrefillEvent(admitted=_admitted(engine_request))
                outputs = [await stream.get() for _ in range(engine_request.n)]
                for piece in prompt_logprobs_to_wire(outputs[0].prompt_logprobs):
                    yield prefill_pb2.PrefillEvent(prompt_logprobs=piece)
                if outputs[0].new_token_ids:
                    yield prefill_pb2.PrefillEvent(computed=_computed(engine_request, outputs))
                if transfer is not None:
                    state, cause = await stream.source_ended
                    if cause is not None and state not in _ENDED:
                        raise cause
                    record.lease_lost = cause
                    how = _ENDED.get(state, prefill_pb2.Ended.HOW_UNSPECIFIED)
                    told = cause.message if cause is not None else ""
                    yield prefill_pb2.PrefillEvent(ended=prefill_pb2.Ended(how=how, cause=told))
        finally:
            self.engine.release(stream, record.close)

    async def Embed(self, request: prefill_pb2.PoolingRequest, context: Context) -> prefill_pb2.PoolingResponse:
        engine_request = self.reader.request(request, request.attempt.number, prefill_here=True)
        if engine_request.pooling_params is None:
            raise InvalidRequest("request.pooling is missing: it says which embedding is wanted", "pooling")
        self.engine.verify(engine_request)
        record = self.telemetry.call("prefill", engine_request, metadata_of(context))
        stream = None
        try:
            with record:
                stream = self.engine.submit(engine_request, record.take)
                output = await stream.get()
                if output.pooling_output is None:
                    raise InternalError(f"the engine ended a pooling request without a vector: {output.finish_reason}")
                return prefill_pb2.PoolingResponse(
                    values=output.pooling_output,
                    num_cached_tokens=output.num_cached_tokens,
                    moments=_moments(output, _POOLING_MOMENTS),
                )
        finally:
            self.engine.release(stream, record.close)

    def _expected(self, request: prefill_pb2.PrefillRequest, engine_request: EngineCoreRequest) -> ExpectedTransfer:
        num_tokens = len(engine_request.given_token_ids)
        order = TransferOrder.of(self.layout.group_windows, num_tokens, self.layout.block_size)
        return ExpectedTransfer(
            transfer_id=request.transfer_id,
            request_id=engine_request.request_id,
            receiver=PeerId(request.receiver.worker_id, request.receiver.epoch),
            request_digest=engine_request.request_digest,
            lease_s=engine_request.remaining_s,
            num_blocks=len(order),
        )


def _admitted(request: EngineCoreRequest) -> prefill_pb2.Admitted:
    return prefill_pb2.Admitted(moments=moments_to_wire({timeline.PREFILL_QUEUED: request.arrival_time}))


def _computed(request: EngineCoreRequest, outputs: Sequence[EngineCoreOutput]) -> prefill_pb2.Computed:
    return prefill_pb2.Computed(
        num_tokens=request.num_sent_tokens,
        request_digest=request.request_digest,
        first_outputs=[outputs_to_wire(output, {}) for output in outputs],
        moments=_moments(outputs[0], _MOMENTS),
    )


def _moments(output: EngineCoreOutput, names: Mapping[str, str]) -> list[request_pb2.Moment]:
    return moments_to_wire({names[name]: at for name, at in output.moments.items() if name in names})
