"""`WorkerCall`: one call to a worker in a step stream of its own, as a router makes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal

import grpc.aio

from pdserve.common.errors import PdServeError
from pdserve.common.net.rpc import from_rpc_error
from pdserve.common.net.service_channel import STEP_STREAM, ServiceChannel, readable
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.wire.request_bytes import encode_request
from pdserve.common.request.wire.step_wire import columns_of, end_from_wire
from pdserve.v1 import decode_pb2, prefill_pb2, request_pb2, step_stream_pb2
from tests.support.run.waiting import HANG_S

Kind = Literal["prefill", "decode", "session", "embed"]
_KINDS: dict[Kind, tuple[Any, Any]] = {
    "prefill": (prefill_pb2.Prefill, prefill_pb2.PrefillEvent),
    "decode": (decode_pb2.Decode, decode_pb2.DecodeEvent),
    "session": (decode_pb2.Session, decode_pb2.DecodeEvent),
    "embed": (prefill_pb2.Embed, prefill_pb2.PoolingResult),
}
KEY = 1


def submission(
    kind: Kind, request: GenerationRequest | bytes, *, key: int = KEY, attempt: int = 0, **fields: Any
) -> step_stream_pb2.Submission:
    """fields: those of the kind's message."""
    data = request if isinstance(request, bytes) else encode_request(request)
    made = step_stream_pb2.Submission(key=key, request=data, attempt=attempt)
    getattr(made, kind).CopyFrom(_KINDS[kind][0](**fields))
    return made


class WorkerCall:
    """Iterate over its events, or `read` them. The stream is opened by the first of these."""

    def __init__(
        self,
        service: ServiceChannel,
        kind: Kind,
        request: GenerationRequest | bytes,
        *,
        attempt: int = 0,
        **fields: Any,
    ) -> None:
        """fields: those of the kind's message."""
        self._kind: Kind = kind
        first = step_stream_pb2.StepCommands(submissions=[submission(kind, request, attempt=attempt, **fields)])
        self._first = first.SerializeToString()
        self._call: Any = service.stream_stream(STEP_STREAM, self._first)
        self._unread: deque[Any] = deque()
        self._has_begun = False
        self._has_ended = False
        self.error: PdServeError | None = None
        """What ended the call; None if it has ended well."""

    async def send(self, **commands: Any) -> None:
        """Send these commands of the call's stream."""
        await self._begin()
        await self._call.write(step_stream_pb2.StepCommands(**commands))

    async def send_turn(self, request: GenerationRequest | bytes) -> None:
        """Send a session's next turn."""
        data = request if isinstance(request, bytes) else encode_request(request)
        await self.send(turns=[step_stream_pb2.Turn(key=KEY, request=data)])

    async def read(self) -> Any:
        """The next event, tokens alone as `Outputs`; None at the end. Raises: PdServeError that ended the call or its stream."""
        await self._begin()
        async with asyncio.timeout(HANG_S):
            while not self._unread and not self._has_ended:
                try:
                    self._take(readable(await self._call.read()))
                except grpc.aio.AioRpcError as error:
                    self.error, self._has_ended = from_rpc_error(error), True
        if self._unread:
            return self._unread.popleft()
        if self.error is not None:
            raise self.error
        return None

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (event := await self.read()) is not None:
            yield event

    async def end(self) -> PdServeError | None:
        """Read to the end: the error that ended the call, or None."""
        with contextlib.suppress(PdServeError):
            async for _ in self:
                pass
        return self.error

    async def code(self) -> str | None:
        """Read to the end: the code of the error that ended the call, or None."""
        error = await self.end()
        return None if error is None else error.code

    def cancel(self) -> None:
        """End the stream, and with it the call."""
        self._call.cancel()

    async def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.write(self._first)

    def _take(self, message: Any) -> None:
        if message is grpc.aio.EOF:
            self._has_ended = True
            return
        columns = columns_of(message)
        tokens = [
            decode_pb2.DecodeEvent(outputs=request_pb2.Outputs(index=index, first_position=at, token_ids=ids))
            for _, index, at, ids in zip(*columns, strict=True)
        ]
        before = 0
        for event in message.events:
            self._unread += tokens[before : event.num_before]
            before = event.num_before
            if event.HasField("end"):
                self.error, self._has_ended = end_from_wire(event.end), True
                self._call.cancel()
            else:
                self._unread.append(_KINDS[self._kind][1].FromString(event.message))
        self._unread += tokens[before:]
