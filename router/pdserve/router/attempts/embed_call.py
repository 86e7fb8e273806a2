"""One embedding, or the classes of one input, as a gRPC call to a prefill worker."""

from __future__ import annotations

import asyncio
import math
from array import array

import grpc.aio
import msgspec

from pdserve.common.errors import PeerError, WorkerLost
from pdserve.common.net.service_channel import EMBED, readable, warn_of
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.wire import moments_from_wire
from pdserve.router.attempts.call_events import Moments
from pdserve.router.attempts.outgoing_request import OutgoingRequest
from pdserve.router.attempts.worker_errors import believed
from pdserve.router.workers.call_failure import CallFailed, call_failed
from pdserve.router.workers.worker import Worker
from pdserve.v1 import prefill_pb2, request_pb2


class Embedded(msgspec.Struct):
    """A worker's answer."""

    values: array[float]
    """float32, packed, which takes an eighth of the memory of a list."""
    num_cached_tokens: int
    moments: Moments


async def embed(worker: Worker, request: GenerationRequest, number: int) -> Embedded:
    """Call a prefill worker for one vector, in its turn; the call ends before this returns or raises. number: of the attempt.

    Raises: CallFailed, also for a vector of another length than requested.
    """
    async with worker.pooling_room:
        response = await _called(worker, request, number)
    try:
        return _embedded(worker, request, response)
    except PeerError as error:
        warn_of(f"worker {worker}", error)
        raise CallFailed(error, died=False) from error


async def _called(worker: Worker, request: GenerationRequest, number: int) -> prefill_pb2.PoolingResponse:
    message = prefill_pb2.PoolingRequest(
        **OutgoingRequest(request).fields(worker), attempt=request_pb2.Attempt(number=number)
    )
    call = worker.channel.unary_unary(
        EMBED, message, timeout=request.remaining_s, metadata=request.trace_headers.items()
    )
    unsubscribe = worker.subscribe_lost(lambda _: call.cancel())  # type: ignore[arg-type]
    try:
        return readable(await call)
    except grpc.aio.AioRpcError as error:
        raise believed(call_failed(error), request) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CallFailed(WorkerLost(f"worker {worker} is lost: {worker.cause_of_death}"), died=True) from None
    except PeerError as error:
        raise CallFailed(error, died=False) from error
    finally:
        unsubscribe()
        call.cancel()


def _embedded(worker: Worker, request: GenerationRequest, response: prefill_pb2.PoolingResponse) -> Embedded:
    """Raises: PeerError."""
    identity, pooling = worker.identity, request.pooling_params
    asked = pooling.num_values(identity.hidden_size, identity.num_labels) if pooling else 0
    if len(response.values) != asked:
        raise PeerError(f"worker {worker} sent {len(response.values)} numbers, {asked} were requested")
    values = array("f", response.values)
    if not all(map(math.isfinite, values)):
        raise PeerError(f"worker {worker} sent numbers that are not finite")
    return Embedded(
        values, min(response.num_cached_tokens, identity.max_model_len), moments_from_wire(response.moments)
    )
