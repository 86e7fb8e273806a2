"""`PrefillServicer`: begins the calls of a prefill worker.

The life of a request here:

1. A router's `Submission` arrives in its step stream. `RequestReader` decodes and checks it, and computes block hashes and digest.
2. `EngineClient.verify` refuses requests that the engine cannot serve. The call of a refused request ends with the error.
3. The request is submitted to the engine together with the transfer of its blocks. From then on a receiver can attach to the
   transfer; one that came earlier has waited for it.
4. The engine computes the prompt in chunks, and publishes each full block that the receiver wants as soon as it is computed.
5. `Computed` has the first token of each sequence, after the prompt's log-probabilities if these were requested.
6. The engine keeps the wanted blocks until the receiver releases the transfer, its lease expires, or the worker drains; `Ended`
   says which. Without a transfer the call ends with `Computed`.
7. If the router cancels the call, or its stream ends, the request and its transfer end in any state. When reads of the blocks are
   fenced, the engine drops the request, and the call's statistics are closed.

An embedding takes steps 1, 2 and 4; its call ends with one `PoolingResult`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from pdserve.common import timeline
from pdserve.common.address.peer_address import verify_worker_id
from pdserve.common.errors import InternalError, InvalidRequest
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest
from pdserve.common.request.wire.messages import (
    block_source_from_wire,
    cached_tokens_to_wire,
    ended_to_wire,
    moments_to_wire,
    outputs_to_wire,
    prompt_logprobs_to_wire,
)
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, PeerId, TransferTarget
from pdserve.v1 import prefill_pb2, request_pb2
from pdserve.v1.step_stream_pb2 import Submission
from pdserve.worker.engine_client import EngineClient
from pdserve.worker.request_reader import RequestReader
from pdserve.worker.source_reader import SourceReader, verify_transfer_id
from pdserve.worker.step_stream.step_call import StepCall
from pdserve.worker.step_stream.step_stream_servicer import BeginCall
from pdserve.worker.telemetry.worker_telemetry import WorkerTelemetry
from pdserve.worker.worker import Worker

_MOMENTS = {
    "queued": timeline.PREFILL_QUEUED,
    "kv_reserved": timeline.BLOCKS_RESERVED,
    "kv_landed": timeline.BLOCKS_LANDED,
    "scheduled": timeline.PREFILL_STARTED,
    "first_token": timeline.PREFILL_COMPUTED,
}
_POOLING_MOMENTS = _MOMENTS | {"finished": timeline.PREFILL_COMPUTED}


@dataclass(frozen=True, eq=False)
class PrefillServicer:
    """Serves `Submission.prefill` and `Submission.embed`."""

    reader: RequestReader
    sources: SourceReader
    engine: EngineClient
    telemetry: WorkerTelemetry
    layout: KvLayout
    """Layout of the worker's KV blocks."""

    def begin_prefill(self, submission: Submission, call: StepCall) -> None:
        """Raises: as `RequestReader.request` and `EngineClient.verify`; InvalidRequest for a transfer that cannot be one."""
        prefill = submission.prefill
        request = self.reader.request(
            submission.request,
            submission.attempt,
            transfer_source=bool(prefill.transfer_id),
            without_draft_head=prefill.receiver.without_draft_head,
            block_source=self.sources.block_source(block_source_from_wire(submission)),
        )
        if request.pooling_params is not None:
            raise InvalidRequest(
                "request.pooling_params is given: embeddings are requested with `embed`", "pooling_params"
            )
        if prefill.transfer_id:
            verify_transfer_id("transfer_id", prefill.transfer_id)
            verify_worker_id("receiver.worker_id", prefill.receiver.worker_id)
        self.engine.verify(request)
        call.serve(self._prefill(request, self._expected(prefill, request) if prefill.transfer_id else None))

    async def _prefill(
        self, request: EngineCoreRequest, transfer: ExpectedTransfer | None
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        record = self.telemetry.call("prefill", request)
        stream = None
        try:
            with record:
                stream = self.engine.submit(request, record.take, transfer=transfer)
                yield prefill_pb2.PrefillEvent(admitted=_admitted(request))
                outputs = [await stream.get() for _ in range(request.n)]
                for piece in prompt_logprobs_to_wire(outputs[0].prompt_logprobs):
                    yield prefill_pb2.PrefillEvent(prompt_logprobs=piece)
                if outputs[0].new_token_ids:
                    yield prefill_pb2.PrefillEvent(computed=_computed(request, outputs))
                if transfer is not None:
                    end = await stream.source_ended
                    ended = ended_to_wire(end.state.name, end.cause)
                    if end.cause is not None and not ended.how:
                        raise end.cause
                    record.lease_lost = end.cause
                    yield prefill_pb2.PrefillEvent(ended=ended)
        finally:
            self.engine.release(stream, record.close)

    def begin_embed(self, submission: Submission, call: StepCall) -> None:
        """Raises: as `RequestReader.request` and `EngineClient.verify`."""
        source = self.sources.block_source(block_source_from_wire(submission))
        request = self.reader.request(submission.request, submission.attempt, prefill_here=True, block_source=source)
        if request.pooling_params is None:
            raise InvalidRequest(
                "request.pooling_params is missing: it says which embedding is requested", "pooling_params"
            )
        self.engine.verify(request)
        call.serve(self._embed(request))

    async def _embed(self, request: EngineCoreRequest) -> AsyncGenerator[prefill_pb2.PoolingResult, None]:
        record = self.telemetry.call("prefill", request)
        stream = None
        try:
            with record:
                stream = self.engine.submit(request, record.take)
                output = await stream.get()
                if output.pooling_output is None:
                    raise InternalError(f"the engine ended a pooling request without a vector: {output.finish_reason}")
                yield prefill_pb2.PoolingResult(
                    values=output.pooling_output,
                    cached_tokens=cached_tokens_to_wire(output.cached_tokens),
                    moments=_moments(output, _POOLING_MOMENTS),
                )
        finally:
            self.engine.release(stream, record.close)

    def _expected(self, prefill: prefill_pb2.Prefill, request: EngineCoreRequest) -> ExpectedTransfer:
        receiver = PeerId(prefill.receiver.worker_id, prefill.receiver.epoch)
        return ExpectedTransfer.of_tokens(
            TransferTarget(prefill.transfer_id, receiver, request.remaining_s),
            request.request_id,
            request.request_digest,
            self.layout,
            len(request.given_token_ids),
            without_draft_head=request.without_draft_head,
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


def prefill_calls(worker: Worker, settings: WorkerSettings) -> Mapping[str, BeginCall]:
    """The calls that routers make at a prefill worker."""
    servicer = PrefillServicer(worker.reader, worker.sources, worker.engine, worker.telemetry, worker.identity.layout)
    return {"prefill": servicer.begin_prefill, "embed": servicer.begin_embed}
