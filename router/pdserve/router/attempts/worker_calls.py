"""Calls of attempts and sessions to workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from pdserve.common.errors import PeerError
from pdserve.common.net.service_channel import END_SEQUENCES, SESSION, warn_of
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import MAX_LOGPROBS
from pdserve.common.tasks.first_done import first_of
from pdserve.router.attempts.call_events import (
    CallReader,
    DecodeCallEvent,
    DecodeReader,
    PrefillCallEvent,
    PrefillReader,
)
from pdserve.router.attempts.outgoing_request import OutgoingRequest
from pdserve.router.workers.call_failure import CallFailed, next_message
from pdserve.router.workers.step_stream import MAX_SUBMISSION_BYTES, StepCall
from pdserve.router.workers.worker import Worker
from pdserve.v1 import decode_pb2, prefill_pb2, request_pb2

END_SEQUENCE_TIMEOUT_S = 1.0
E = TypeVar("E")
M = TypeVar("M", bound=Message)


class _OwnStream(Generic[M, E]):
    """A call with a gRPC stream of its own. Call `next` until it returns None; `cancel` at any time, also repeatedly."""

    def __init__(
        self,
        worker: Worker,
        call: grpc.aio.UnaryStreamCall[Any, M] | grpc.aio.StreamStreamCall[Any, M],
        reader: CallReader[M, E],
    ) -> None:
        self._call = call
        self._peer = f"worker {worker}"
        self._reader = reader

    def cancel(self) -> None:
        """End the call at both ends; sent in this turn of the event loop."""
        self._call.cancel()

    async def next(self) -> E | None:
        """The next event; None after the last event of a successful call. Raises: CallFailed."""
        message = await next_message(self._call, "the call")
        if message is None:
            return None
        try:
            return self._reader.read(message)
        except PeerError as error:
            warn_of(self._peer, error)
            raise CallFailed(error, died=False, is_answer=True) from error


class _AttemptCall(Generic[M, E]):
    """A call over the worker's step stream if it serves one and neither the request nor its answer is large, else with a stream of
    its own. `follow` it once; `cancel` at any time, also repeatedly."""

    def __init__(self, worker: Worker, request: GenerationRequest, reader: CallReader[M, E], field: str) -> None:
        """field: of `Submission`."""
        self._worker = worker
        self._request = request
        self._reader = reader
        self._field = field
        self._step_call: StepCall | None = None
        self._own: _OwnStream[M, E] | None = None
        self._is_over = False
        self.tasks: list[asyncio.Task[None]] = []
        """All end soon after `cancel`."""
        self.has_answered = False
        """True if the worker has sent anything, and so has admitted the request."""

    def _open(
        self, message: Message, on_event: Callable[[E], None], on_end: Callable[[CallFailed | None], None]
    ) -> None:
        self._on_event, self._on_end = on_event, on_end
        request, steps = self._request, self._worker.step_stream
        if steps is not None and message.ByteSize() <= MAX_SUBMISSION_BYTES and not _has_large_answer(request):
            self._step_call = steps.submit(self._field, message.SerializeToString(), self)
            return
        call = self._worker.channel.unary_stream(
            self._worker.bounded(self._reader.method),
            message,
            timeout=request.remaining_s,
            metadata=request.trace_headers.items(),
        )
        self._own = _OwnStream(self._worker, call, self._reader)
        self.tasks.append(asyncio.create_task(self._read(self._own)))

    def cancel(self) -> None:
        """End the call at both ends; sent in this turn of the event loop or the next. Nothing of it is reported any more."""
        self._is_over = True
        if self._step_call is not None:
            self._step_call.cancel()
        if self._own is not None:
            self._own.cancel()
        for task in self.tasks:
            task.cancel()

    async def _read(self, call: _OwnStream[M, E]) -> None:
        try:
            while (event := await call.next()) is not None:
                self.has_answered = True
                self._on_event(event)
                if self._is_over:
                    return
        except CallFailed as failure:
            self.ended(failure)
        else:
            self.ended(None)

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
    """True for log-probabilities in such numbers that tokens of other requests would wait behind them in a shared stream."""
    sampling = request.sampling_params
    return sampling.prompt_logprobs is not None or (sampling.logprobs or 0) > MAX_LOGPROBS


class PrefillCall(_AttemptCall[prefill_pb2.PrefillEvent, PrefillCallEvent]):
    def __init__(
        self, worker: Worker, outgoing: OutgoingRequest, number: int, transfer_id: bytes, receiver: Worker | None
    ) -> None:
        """receiver: the only worker that may read the blocks; None with an empty `transfer_id`."""
        request = outgoing.request
        reader = PrefillReader(request, worker.identity.vocab_size, is_source=bool(transfer_id))
        super().__init__(worker, request, reader, "prefill_request")
        self._message = prefill_pb2.PrefillRequest(
            **outgoing.fields(worker),
            attempt=request_pb2.Attempt(number=number),
            transfer_id=transfer_id,
        )
        if receiver is not None:
            self._message.receiver.worker_id, self._message.receiver.epoch = receiver.key

    def follow(self, on_event: Callable[[PrefillCallEvent], None], on_end: Callable[[CallFailed | None], None]) -> None:
        """Open the call. on_end: called once and last, unless the call is cancelled; None: it has ended well. Neither raises."""
        self._open(self._message, on_event, on_end)


class DecodeCall(_AttemptCall[decode_pb2.DecodeEvent, DecodeCallEvent]):
    def __init__(
        self,
        worker: Worker,
        outgoing: OutgoingRequest,
        number: int,
        *,
        transfer_id: bytes,
        source: Worker | None,
        prefill_here: bool,
        local_prefill_tokens: int | None,
    ) -> None:
        """source: the worker that sends the KV blocks; None to prefill at `worker`."""
        request = outgoing.request
        super().__init__(worker, request, DecodeReader(request, worker.identity.vocab_size), "decode_request")
        self._number = number
        self._message = decode_pb2.DecodeRequest(
            **outgoing.fields(worker),
            attempt=request_pb2.Attempt(
                number=number, prefill_here=prefill_here, local_prefill_tokens=local_prefill_tokens
            ),
        )
        if source is not None:
            self._message.source.worker_id, self._message.source.epoch = source.key
            self._message.source.address = source.identity.attach_address
            self._message.source.transfer_id = transfer_id

    def follow(self, on_event: Callable[[DecodeCallEvent], None], on_end: Callable[[CallFailed | None], None]) -> None:
        """As `PrefillCall.follow`."""
        self._open(self._message, on_event, on_end)

    def end_sequence(self, index: int) -> None:
        """Request the end of a sequence. Its later outputs are dropped."""
        if self._step_call is not None:
            self._step_call.end_sequence(index)
        else:
            self.tasks.append(asyncio.create_task(self._end_sequence(index)))

    async def _end_sequence(self, index: int) -> None:
        request = decode_pb2.EndSequencesRequest(
            request_id=self._request.request_id, attempt=self._number, indexes=[index]
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._worker.channel.unary_unary(END_SEQUENCES, request, timeout=END_SEQUENCE_TIMEOUT_S)


class SessionCall(_OwnStream[decode_pb2.DecodeEvent, DecodeCallEvent]):
    """A session's call: `open` it or `go_on` with a turn, then `next` until the turn's last outputs."""

    def __init__(self, worker: Worker, request: GenerationRequest) -> None:
        """Make the call, with a proof for its first turn, which `open` sends."""
        self._worker = worker
        first = OutgoingRequest(request).fields(worker, version_3="open")
        self._first = decode_pb2.DecodeTurn(**first).SerializeToString()
        self._turns: grpc.aio.StreamStreamCall[Any, decode_pb2.DecodeEvent] = worker.channel.stream_stream(
            worker.bounded(SESSION), self._first, metadata=request.trace_headers.items()
        )
        self._cancelled = asyncio.Event()
        self._request_id = request.request_id
        self._num_turns = 0
        """Turns before the running one."""
        super().__init__(worker, self._turns, DecodeReader(request, worker.identity.vocab_size))

    async def next(self) -> DecodeCallEvent | None:
        """As the base's."""
        try:
            return await super().next()
        except CallFailed as failure:
            raise self._reader.believed(failure, is_session=True) from failure

    def cancel(self) -> None:
        super().cancel()
        self._cancelled.set()

    async def open(self) -> None:
        """Send the first turn."""
        await self._write(self._first)

    async def go_on(self, request: GenerationRequest) -> None:
        """Send the next turn, of which prompt, sampling parameters and trace headers count."""
        self._reader.go_on(request)
        self._num_turns += 1
        turn = OutgoingRequest(request).fields(self._worker, version_3="next")
        await self._write(decode_pb2.DecodeTurn(**turn))

    async def end_turn(self) -> None:
        """Request the end of the running turn, whose text is complete; its last outputs still come."""
        request = decode_pb2.EndSequencesRequest(request_id=self._request_id, indexes=[0], turn=self._num_turns)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._worker.channel.unary_unary(END_SEQUENCES, request, timeout=END_SEQUENCE_TIMEOUT_S)

    async def _write(self, turn: decode_pb2.DecodeTurn | bytes) -> None:
        writing = asyncio.ensure_future(self._turns.write(turn))
        # the write of a call that is cancelled before it connects never returns
        async with first_of(writing, asyncio.ensure_future(self._cancelled.wait())):
            if writing.done():
                # the call has ended; `next` raises the cause
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    writing.result()
