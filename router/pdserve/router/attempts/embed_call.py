"""One embedding, or the classes of one input, as a call to a prefill worker."""

from __future__ import annotations

import math
from array import array

import msgspec

from pdserve.common.errors import PeerError
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.wire.messages import cached_tokens_from_wire, moments_from_wire
from pdserve.router.attempts.call_events import CallReader, Moments, Outputs
from pdserve.router.attempts.outgoing_request import OutgoingRequest
from pdserve.router.attempts.worker_calls import WorkerCall, block_source
from pdserve.router.placement.placement import BlockMove
from pdserve.router.workers.worker import RemoteWorker
from pdserve.v1 import prefill_pb2


class Embedded(msgspec.Struct):
    """A worker's answer."""

    values: array[float]
    """float32, packed, which takes an eighth of the memory of a list."""
    cached_tokens: CachedTokens
    moments: Moments


async def embed(
    worker: RemoteWorker, request: GenerationRequest, number: int, move: BlockMove | None = None
) -> Embedded:
    """Call a prefill worker for one vector, in its turn; the call ends before this returns or raises. number: of the attempt. move:
    see `Placement.move`.

    Raises: CallFailed, also for a vector of another length than requested.
    """
    async with worker.pooling_room:
        reader = _PoolingReader(request, worker)
        fields = {"attempt": number, "embed": prefill_pb2.Embed(), "block_source": block_source(move)}
        return await WorkerCall(worker, OutgoingRequest(request), reader, is_bulk=True, **fields).only_answer()


class _PoolingReader(CallReader[prefill_pb2.PoolingResult, Embedded]):
    kind = prefill_pb2.PoolingResult

    def __init__(self, request: GenerationRequest, worker: RemoteWorker) -> None:
        super().__init__(request, worker.identity.vocab_size)
        self._worker = worker

    def tokens(self, index: int, first_position: int, token_ids: list[int]) -> Outputs:
        """Raises: PeerError."""
        raise PeerError("a worker sent tokens in place of a vector")

    def read(self, message: prefill_pb2.PoolingResult) -> Embedded:
        """Raises: PeerError for a vector of another length than requested, or numbers that are not finite."""
        worker, pooling = self._worker, self._request.pooling_params
        identity = worker.identity
        expected = pooling.num_values(identity.hidden_size, identity.num_labels) if pooling else 0
        if len(message.values) != expected:
            raise PeerError(f"worker {worker} sent {len(message.values)} numbers, {expected} were requested")
        values = array("f", message.values)
        if not all(map(math.isfinite, values)):
            raise PeerError(f"worker {worker} sent numbers that are not finite")
        return Embedded(values, cached_tokens_from_wire(message.cached_tokens), moments_from_wire(message.moments))
