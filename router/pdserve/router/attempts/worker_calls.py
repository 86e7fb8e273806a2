"""gRPC calls to workers, with their events as plain values."""

from __future__ import annotations

import abc
import asyncio
import contextlib
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from pdserve.common.errors import Cancelled, InternalError, PdServeError, PeerError, WorkerLost, WrongWorker
from pdserve.common.net.rpc import ERROR_CODE_KEY, from_rpc_error
from pdserve.common.net.service_channel import END_SEQUENCES, GENERATE, PREFILL, SESSION, Method, readable, warn_of
from pdserve.common.request.engine_types import FinishReason, LogprobsLists
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.wire import (
    finish_reason_from_wire,
    logprobs_from_wire,
    moments_from_wire,
)
from pdserve.common.tasks.first_done import first_of
from pdserve.router.attempts.outgoing_request import OutgoingRequest
from pdserve.router.workers.worker import Worker
from pdserve.v1 import decode_pb2, prefill_pb2, request_pb2

Moments = dict[str, int]
"""name -> wall-clock nanoseconds"""
_NO_MOMENTS: Moments = {}
_ENDS = {number: name.lower() for name, number in prefill_pb2.Ended.How.items()}
"""Number -> name of the end of a transfer; a newer worker may send other numbers."""


class Admitted(msgspec.Struct, gc=False):
    moments: Moments


class Outputs(msgspec.Struct, gc=False):
    """New tokens of one sequence."""

    index: int
    first_position: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    moments: Moments = _NO_MOMENTS
    logprobs: LogprobsLists | None = None


class Computed(msgspec.Struct):
    """The prefill worker has computed the prompt's KV and the first token."""

    num_tokens: int
    request_digest: bytes
    first_outputs: list[Outputs]
    moments: Moments


class PromptLogprobs(msgspec.Struct):
    """Log-probabilities of consecutive prompt tokens."""

    first_position: int
    """Position in the prompt."""
    logprobs: LogprobsLists


class Ended(msgspec.Struct, gc=False):
    """The transfer has ended at its source."""

    released: bool
    """True if the receiver has all blocks; otherwise the source gave up, or its lease expired."""
    cause: str
    moments: Moments


class NeedsPrefill(msgspec.Struct, gc=False):
    uncached_tokens: int


class PrefillingLocally(msgspec.Struct, gc=False):
    pass


class Landed(msgspec.Struct, gc=False):
    num_blocks: int
    transfer_bytes: int
    connector: str
    moments: Moments


class UnknownEvent(msgspec.Struct, gc=False):
    """An event that this router does not know, from a newer worker."""


PrefillCallEvent = Admitted | PromptLogprobs | Computed | Ended | UnknownEvent
DecodeCallEvent = Admitted | NeedsPrefill | PrefillingLocally | Landed | PromptLogprobs | Outputs | UnknownEvent
END_SEQUENCE_TIMEOUT_S = 1.0
E = TypeVar("E")
M = TypeVar("M", bound=Message)


class CallFailed(Exception):
    """A call ended with an error."""

    def __init__(self, error: PdServeError, died: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.died = died
        """True if the channel broke without an answer from the worker, or the worker reported that its engine failed."""


class _WorkerCall(abc.ABC, Generic[M, E]):
    """One open call. Call `next` until it returns None; `cancel` at any time, also repeatedly."""

    def __init__(
        self,
        worker: Worker,
        call: grpc.aio.UnaryStreamCall[Any, M] | grpc.aio.StreamStreamCall[Any, M],
        request: GenerationRequest,
    ) -> None:
        self._call = call
        self._peer = f"worker {worker}"
        self._sampling = request.sampling_params
        """Parameters of the request, or of a session's last turn; the size of events is checked against them."""
        self._num_sequences = request.n
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self.has_answered = False
        """True if the worker has sent anything, and so has admitted the request."""

    def cancel(self) -> None:
        """End the call at both ends; sent in this turn of the event loop."""
        self._call.cancel()

    async def next(self) -> E | None:
        """The next event; None after the last event of a successful call. Raises: CallFailed."""
        try:
            message: Any = await self._call.read()
        except grpc.aio.AioRpcError as error:
            failure = call_failed(error)
            self.has_answered |= _said_by_worker(error) and not isinstance(failure.error, WrongWorker)
            raise failure from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise CallFailed(WorkerLost("the call was cancelled, but not by this router"), died=True) from None
        except grpc.aio.UsageError as error:
            raise CallFailed(InternalError(f"the call cannot be read: {error}"), died=False) from error
        self.has_answered = True
        if message is grpc.aio.EOF:
            return None
        try:
            message = readable(message)
        except PeerError as error:
            raise CallFailed(error, died=False) from error
        try:
            return self._read(message)
        except PeerError as error:
            warn_of(self._peer, error)
            raise CallFailed(error, died=False) from error

    @abc.abstractmethod
    def _read(self, message: M) -> E:
        """The message as a plain value; `UnknownEvent` for an unknown one."""

    def _prompt_logprobs(self, message: request_pb2.PromptLogprobs) -> PromptLogprobs:
        count, limit = len(message.logprobs.sampled_ranks), self._num_prompt_tokens
        if count > limit or message.first_position > limit:
            raise PeerError(
                f"a worker sent log-probabilities of {count} prompt tokens from position {message.first_position} on, "
                f"where the prompt has {limit}"
            )
        self._verify_width(message.logprobs, self._sampling.prompt_logprobs)
        return PromptLogprobs(message.first_position, logprobs_from_wire(message.logprobs))

    def _outputs(self, message: request_pb2.Outputs) -> Outputs:
        num_tokens, limit = len(message.token_ids), self._sampling.output_limit
        if message.first_position + num_tokens > limit:
            raise PeerError(
                f"a worker sent {num_tokens} tokens from position {message.first_position} on, where max_tokens is {limit}"
            )
        if (count := len(message.logprobs.sampled_ranks)) > num_tokens:
            raise PeerError(f"a worker sent log-probabilities of {count} tokens for {num_tokens} tokens")
        self._verify_width(message.logprobs, self._sampling.logprobs)
        return Outputs(
            message.index,
            message.first_position,
            list(message.token_ids),
            finish_reason_from_wire(message.finish_reason),
            message.stop_token_id if message.HasField("stop_token_id") else None,
            message.num_cached_tokens,
            moments_from_wire(message.moments) if message.moments else _NO_MOMENTS,
            logprobs_from_wire(message.logprobs) if message.HasField("logprobs") else None,
        )

    @staticmethod
    def _verify_width(logprobs: request_pb2.Logprobs, asked: int | None) -> None:
        if logprobs.width > 1 + (asked or 0):
            raise PeerError(f"a worker sent {logprobs.width} log-probabilities per token, where {asked} were requested")


def _opened(
    worker: Worker, method: Method[Any, M], message: Message, request: GenerationRequest
) -> grpc.aio.UnaryStreamCall[Any, M]:
    timeout_s, headers = request.remaining_s, request.trace_headers
    return worker.channel.unary_stream(method, message, timeout=timeout_s, metadata=headers.items())


class PrefillCall(_WorkerCall[prefill_pb2.PrefillEvent, PrefillCallEvent]):
    def __init__(
        self, worker: Worker, outgoing: OutgoingRequest, number: int, transfer_id: bytes, receiver: Worker | None
    ) -> None:
        """Open the call. receiver: the only worker that may read the blocks; None with an empty `transfer_id`."""
        request = outgoing.request
        message = prefill_pb2.PrefillRequest(
            **outgoing.fields(worker),
            attempt=request_pb2.Attempt(number=number),
            transfer_id=transfer_id,
        )
        if receiver is not None:
            message.receiver.worker_id, message.receiver.epoch = receiver.key
        super().__init__(worker, _opened(worker, PREFILL, message, request), request)

    def _read(self, message: prefill_pb2.PrefillEvent) -> PrefillCallEvent:
        match message.WhichOneof("event"):
            case "admitted":
                return Admitted(moments_from_wire(message.admitted.moments))
            case "computed":
                computed = message.computed
                if (num := len(computed.first_outputs)) > self._num_sequences:
                    raise PeerError(f"a worker sent outputs of {num} sequences, {self._num_sequences} were requested")
                return Computed(
                    num_tokens=computed.num_tokens,
                    request_digest=computed.request_digest,
                    first_outputs=[self._outputs(outputs) for outputs in computed.first_outputs],
                    moments=moments_from_wire(computed.moments),
                )
            case "prompt_logprobs":
                return self._prompt_logprobs(message.prompt_logprobs)
            case "ended":
                released = message.ended.how == prefill_pb2.Ended.RELEASED
                how = _ENDS.get(message.ended.how, "ended")
                cause = f"{how}: {message.ended.cause}" if message.ended.cause else how
                return Ended(released, cause, moments_from_wire(message.ended.moments))
            case _:
                return UnknownEvent()


class _DecodeServiceCall(_WorkerCall[decode_pb2.DecodeEvent, DecodeCallEvent]):
    def _read(self, message: decode_pb2.DecodeEvent) -> DecodeCallEvent:
        """Decode and check an event. Raises: PeerError if it has more than was requested."""
        match message.WhichOneof("event"):
            case "outputs":
                return self._outputs(message.outputs)
            case "prompt_logprobs":
                return self._prompt_logprobs(message.prompt_logprobs)
            case "admitted":
                return Admitted(moments_from_wire(message.admitted.moments))
            case "needs_prefill":
                return NeedsPrefill(message.needs_prefill.uncached_tokens)
            case "prefilling_locally":
                return PrefillingLocally()
            case "landed":
                landed = message.landed
                return Landed(
                    landed.num_blocks, landed.transfer_bytes, landed.connector, moments_from_wire(landed.moments)
                )
            case _:
                return UnknownEvent()


class DecodeCall(_DecodeServiceCall):
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
        """Opens the call. source: the worker that sends the KV blocks; None to prefill at `worker`."""
        request = outgoing.request
        self._channel = worker.channel
        self._of_sequences = decode_pb2.EndSequencesRequest(request_id=request.request_id, attempt=number)
        message = decode_pb2.DecodeRequest(
            **outgoing.fields(worker),
            attempt=request_pb2.Attempt(
                number=number, prefill_here=prefill_here, local_prefill_tokens=local_prefill_tokens
            ),
        )
        if source is not None:
            message.source.worker_id, message.source.epoch = source.key
            message.source.address = source.identity.address
            message.source.transfer_id = transfer_id
        super().__init__(worker, _opened(worker, GENERATE, message, request), request)

    async def end_sequence(self, index: int) -> None:
        """Request the end of a sequence. Its later outputs are dropped."""
        request = decode_pb2.EndSequencesRequest(indexes=[index])
        request.MergeFrom(self._of_sequences)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._channel.unary_unary(END_SEQUENCES, request, timeout=END_SEQUENCE_TIMEOUT_S)


class SessionCall(_DecodeServiceCall):
    """A session's call: `open` it or `go_on` with a turn, then `next` until the turn's last outputs."""

    def __init__(self, worker: Worker, request: GenerationRequest) -> None:
        """Make the call, with a proof for its first turn, which `open` sends."""
        self._worker = worker
        first = OutgoingRequest(request).fields(worker, version_3="open")
        self._first = decode_pb2.DecodeTurn(**first).SerializeToString()
        self._turns: grpc.aio.StreamStreamCall[Any, decode_pb2.DecodeEvent] = worker.channel.stream_stream(
            SESSION, self._first, metadata=request.trace_headers.items()
        )
        self._cancelled = asyncio.Event()
        self._request_id = request.request_id
        self._num_turns = 0
        """Turns before the running one."""
        super().__init__(worker, self._turns, request)

    def cancel(self) -> None:
        super().cancel()
        self._cancelled.set()

    async def open(self) -> None:
        """Send the first turn."""
        await self._write(self._first)

    async def go_on(self, request: GenerationRequest) -> None:
        """Send the next turn, of which prompt, sampling parameters and trace headers count."""
        self._num_prompt_tokens += self._sampling.output_limit + len(request.prompt_token_ids)
        self._sampling = request.sampling_params
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


def _said_by_worker(rpc_error: grpc.aio.AioRpcError) -> bool:
    """True if the worker sent the error; False if the channel broke."""
    return any(name == ERROR_CODE_KEY for name, _ in rpc_error.trailing_metadata() or ())


def call_failed(rpc_error: grpc.aio.AioRpcError) -> CallFailed:
    """The failure of a call, and whether the worker died."""
    error = from_rpc_error(rpc_error)
    if _said_by_worker(rpc_error):
        if isinstance(error, WrongWorker):
            # another epoch of the worker answered
            return CallFailed(error, died=True)
        # a worker reports this only about itself, if its engine has failed and its process exits
        return CallFailed(error, died=isinstance(error, WorkerLost))
    if isinstance(error, Cancelled):
        # a stopping server cancels its calls; the router did not cancel this one
        error = WorkerLost(f"the worker ended the call: {error.message}")
    return CallFailed(error, died=isinstance(error, WorkerLost))
