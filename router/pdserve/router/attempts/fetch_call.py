"""Cached blocks that a worker reads from another one ahead of a sequence that it is to continue."""

from __future__ import annotations

from pdserve.common.errors import PeerError
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.router.attempts.call_events import CallReader, Outputs
from pdserve.router.attempts.outgoing_request import OutgoingRequest
from pdserve.router.attempts.worker_calls import WorkerCall, block_source
from pdserve.router.placement.placement import BlockRead
from pdserve.router.workers.worker import RemoteWorker
from pdserve.v1 import step_stream_pb2


async def fetch(worker: RemoteWorker, request: GenerationRequest, number: int, read: BlockRead) -> int:
    """Have a worker read the blocks of the request's tokens that it lacks into its prefix cache; the call ends before this returns
    or raises. number: as an attempt's.

    Returns: how many of the tokens it then has. Raises: CallFailed.
    """
    fields = {"attempt": number, "fetch": step_stream_pb2.Fetch(), "block_source": block_source(read)}
    reader = _FetchedReader(request, worker.identity.vocab_size)
    outgoing = OutgoingRequest(request).for_receiver()
    return await WorkerCall(worker, outgoing, reader, is_bulk=True, **fields).only_answer()


class _FetchedReader(CallReader[step_stream_pb2.Fetched, int]):
    kind = step_stream_pb2.Fetched

    def tokens(self, index: int, first_position: int, token_ids: list[int]) -> Outputs:
        """Raises: PeerError."""
        raise PeerError("a worker sent tokens in answer to a fetch")

    def read(self, message: step_stream_pb2.Fetched) -> int:
        """Tokens of the request, at most all."""
        return min(message.num_cached_tokens, len(self._request.given_token_ids))
