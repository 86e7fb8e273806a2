"""Calls to workers: each is a submission in one of the router's two streams there, and a listener to its output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from pdserve.common.errors import BodyTooLarge, PeerError
from pdserve.common.net.service_channel import warn_of
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import MAX_LOGPROBS
from pdserve.router.attempts.call_events import (
    CallReader,
    DecodeCallEvent,
    DecodeReader,
    PrefillCallEvent,
    PrefillReader,
)
from pdserve.router.attempts.outgoing_request import OutgoingRequest
from pdserve.router.placement.placement import BlockMove, BlockRead
from pdserve.router.workers.call_failure import CallFailed
from pdserve.router.workers.step_stream import SubmittedCall
from pdserve.router.workers.worker import RemoteWorker
from pdserve.v1 import decode_pb2, prefill_pb2, step_stream_pb2
from pdserve.v1.step_stream_pb2 import Submission

MAX_STEP_REQUEST_BYTES = 256 << 10
"""Larger requests go over the bulk stream, so that nothing in the step stream waits until they are sent."""
E = TypeVar("E")
M = TypeVar("M", bound=Message)


class WorkerCall(Generic[M, E]):
    """A call to a worker. `follow` it once; `cancel` at any time, also repeatedly."""

    def __init__(
        self, worker: RemoteWorker, outgoing: OutgoingRequest, reader: CallReader[M, E], *, is_bulk: bool, **fields: Any
    ) -> None:
        """is_bulk: use the bulk stream whatever the size of the request. fields: those of `Submission`."""
        self._worker = worker
        self._reader = reader
        self._submission = Submission(request=outgoing.data, **fields)
        is_bulk = is_bulk or len(outgoing.data) > MAX_STEP_REQUEST_BYTES
        self._stream = worker.bulk_stream if is_bulk else worker.step_stream
        self._step_call: SubmittedCall | None = None
        self._is_over = False
        self.has_answered = False
        """True if the worker has sent anything, and so has admitted the request."""

    def follow(self, on_event: Callable[[E], None], on_end: Callable[[CallFailed | None], None]) -> None:
        """Open the call. on_end: called once and last, unless the call is cancelled; None: it has ended well. Neither raises."""
        self._on_event, self._on_end = on_event, on_end
        size, limit = len(self._submission.request), self._worker.identity.max_request_bytes
        if size <= limit:
            self._step_call = self._stream.submit(self._submission, self)
        else:
            # a message that is too large would end the stream
            error = BodyTooLarge(f"the request has {size} bytes for the workers, at most {limit} are possible")
            asyncio.get_running_loop().call_soon(self.ended, CallFailed(error, died=False))

    async def only_answer(self) -> E:
        """Open a call that has one event, which is returned; the call is over then. Raises: CallFailed."""
        answer: asyncio.Future[E] = asyncio.get_running_loop().create_future()

        def take(event: E) -> None:
            if not answer.done():
                answer.set_result(event)

        def end(failure: CallFailed | None) -> None:
            if not answer.done():
                early = PeerError(f"worker {self._worker} ended a call without an answer")
                answer.set_exception(failure or CallFailed(early, died=False, is_answer=True))

        try:
            self.follow(take, end)
            return await answer
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the call at both ends; sent in this turn of the event loop or the next. Nothing of it is reported any more."""
        self._is_over = True
        if self._step_call is not None:
            self._step_call.cancel()

    # ---- `StepListener`

    def tokens(self, index: int, first_position: int, token_ids: list[int]) -> None:
        """See `StepListener`."""
        self.has_answered = True
        try:
            event: Any = self._reader.tokens(index, first_position, token_ids)
        except PeerError as error:
            self._fail(error)
        else:
            self._on_event(event)

    def event(self, message: bytes) -> None:
        """See `StepListener`."""
        self.has_answered = True
        try:
            event = self._reader.read_bytes(message, f"worker {self._worker}")
        except PeerError as error:
            self._fail(error)
        else:
            self._on_event(event)

    def ended(self, failure: CallFailed | None) -> None:
        """See `StepListener`."""
        self.has_answered |= failure is None or failure.is_answer
        if not self._is_over:
            self._is_over = True
            self._on_end(failure and self._reader.believed(failure))

    def _fail(self, error: PeerError) -> None:
        warn_of(f"worker {self._worker}", error)
        if self._step_call is not None:
            self._step_call.cancel()
        self.ended(CallFailed(error, died=False, is_answer=True))


def _has_large_answer(request: GenerationRequest) -> bool:
    """True for log-probabilities in such numbers that tokens of other requests would wait for them in the step stream."""
    sampling = request.sampling_params
    return sampling.prompt_logprobs is not None or (sampling.logprobs or 0) > MAX_LOGPROBS


def block_source(read: BlockRead | None) -> step_stream_pb2.BlockSource | None:
    """As a submission carries it."""
    if read is None:
        return None
    source = read.source.identity
    return step_stream_pb2.BlockSource(
        worker_id=source.worker_id, epoch=source.epoch, address=source.attach_address, limit_s=read.limit_s
    )


class PrefillCall(WorkerCall[prefill_pb2.PrefillEvent, PrefillCallEvent]):
    def __init__(
        self,
        worker: RemoteWorker,
        outgoing: OutgoingRequest,
        number: int,
        transfer_id: bytes,
        receiver: RemoteWorker | None,
        move: BlockMove | None = None,
    ) -> None:
        """receiver: the only worker that may read the blocks; None with an empty `transfer_id`. move: see `Placement.move`."""
        request = outgoing.request
        reader = PrefillReader(request, worker.identity.vocab_size, is_source=bool(transfer_id))
        to = None if receiver is None else _receiver(worker, receiver)
        prefill = prefill_pb2.Prefill(transfer_id=transfer_id, receiver=to)
        is_bulk = _has_large_answer(request)
        fields = {"prefill": prefill, "block_source": block_source(move)}
        super().__init__(worker, outgoing, reader, is_bulk=is_bulk, attempt=number, **fields)


class DecodeCall(WorkerCall[decode_pb2.DecodeEvent, DecodeCallEvent]):
    def __init__(
        self,
        worker: RemoteWorker,
        outgoing: OutgoingRequest,
        number: int,
        *,
        transfer_id: bytes,
        source: RemoteWorker | None,
        without_draft_head: bool = False,
        prefill_here: bool,
        local_prefill_tokens: int | None,
        move: BlockMove | None = None,
    ) -> None:
        """source: the worker that sends the KV blocks; None to prefill at `worker`. without_draft_head: it sends none of a draft
        head, even if it has the same one. move: see `Placement.move`."""
        request = outgoing.request
        decode = decode_pb2.Decode(prefill_here=prefill_here, local_prefill_tokens=local_prefill_tokens)
        if source is not None:
            decode.source.worker_id, decode.source.epoch = source.key
            decode.source.address = source.identity.attach_address
            decode.source.transfer_id = transfer_id
            has_same = worker.identity.layout.has_draft_head_of(source.identity.layout)
            decode.source.without_draft_head = without_draft_head or not has_same
        reader = DecodeReader(request, worker.identity.vocab_size)
        is_bulk = _has_large_answer(request)
        fields = {"decode": decode, "block_source": block_source(move)}
        super().__init__(worker, outgoing, reader, is_bulk=is_bulk, attempt=number, **fields)

    def end_sequence(self, index: int) -> None:
        """Request the end of a sequence. Its later outputs are dropped."""
        if self._step_call is not None:
            self._step_call.end_sequence(index)

    def migrate(self, index: int, transfer_id: bytes, receiver: RemoteWorker) -> None:
        """Request the end of a sequence that the receiver continues; `Migrating` answers, unless its next token is the last."""
        if self._step_call is not None:
            self._step_call.migrate(index, transfer_id, _receiver(self._worker, receiver))


def _receiver(source: RemoteWorker, receiver: RemoteWorker) -> prefill_pb2.Receiver:
    """The only worker that may read the blocks."""
    has_same = source.identity.layout.has_draft_head_of(receiver.identity.layout)
    worker_id, epoch = receiver.key
    return prefill_pb2.Receiver(worker_id=worker_id, epoch=epoch, without_draft_head=not has_same)


class SessionCall(WorkerCall[decode_pb2.DecodeEvent, DecodeCallEvent]):
    """A session's call. The events of a turn end with its last outputs; then `go_on` begins the next."""

    def __init__(self, worker: RemoteWorker, request: GenerationRequest) -> None:
        """request: the first turn."""
        reader = DecodeReader(request, worker.identity.vocab_size, is_session=True)
        super().__init__(worker, OutgoingRequest(request), reader, is_bulk=True, session=decode_pb2.Session())
        self._num_turns = 0
        """Turns before the running one."""

    def go_on(self, request: GenerationRequest) -> None:
        """Send the next turn: its prompt, sampling parameters and trace headers count."""
        self._reader.go_on(request)
        self._num_turns += 1
        if self._step_call is not None:
            self._step_call.send_turn(OutgoingRequest(request).data)

    def end_turn(self) -> None:
        """Request the end of the running turn, whose text is complete; its last outputs still come."""
        if self._step_call is not None:
            self._step_call.end_sequence(0, self._num_turns)
