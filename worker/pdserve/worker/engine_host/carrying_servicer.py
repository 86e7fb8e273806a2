"""`CarryingServicer`: control streams of peers at a worker whose transfers are in another process.

The checks of a caller are made here, where its certificate is known; all else is in the process that has the pool.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from pdserve.common.address.peer_address import peer_host
from pdserve.common.errors import PdServeError
from pdserve.common.method_handler import Context
from pdserve.common.security.role_guard import CallerRoles
from pdserve.kv_transfer.control.attach_servicer import failed_event, log_refusal, opening_of, verify_receiver
from pdserve.v1 import kv_source_pb2, kv_source_pb2_grpc
from pdserve.worker.engine_host.host_frames import AttachEvent, AttachMessage, CloseAttach, OpenAttach


@dataclass(eq=False)
class CarryingServicer(kv_source_pb2_grpc.KvSourceServiceServicer):
    """Serves `KvSourceService`. Used in the asyncio thread."""

    _send: Callable[[OpenAttach | AttachMessage | CloseAttach], None]
    _callers: CallerRoles
    _events: dict[int, asyncio.Queue[bytes | PdServeError | None]] = field(default_factory=dict, init=False)
    """Stream -> messages for its peer; an error, or None, is the last."""
    _stream_ids: itertools.count[int] = field(default_factory=itertools.count, init=False)
    _ended_with: PdServeError | None = field(default=None, init=False)

    async def Attach(
        self, requests: AsyncIterator[kv_source_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[kv_source_pb2.AttachEvent]:
        incoming = aiter(requests)
        try:
            opening = await opening_of(incoming)
            verify_receiver(self._callers, context, opening)
            if self._ended_with is not None:
                raise self._ended_with
        except PdServeError as error:
            log_refusal(error)
            yield failed_event(error)
            return
        number = next(self._stream_ids)
        events = self._events[number] = asyncio.Queue()
        self._send(OpenAttach(number, peer_host(context.peer()), opening.SerializeToString()))
        reader = asyncio.create_task(self._read(number, incoming), name="attach reader")
        try:
            while isinstance(event := await events.get(), bytes):
                yield kv_source_pb2.AttachEvent.FromString(event)
            if event is not None:
                yield failed_event(event)
        finally:
            reader.cancel()
            del self._events[number]
            self._send(CloseAttach(number))

    def take(self, event: AttachEvent) -> None:
        """Pass a message to its peer, if that is still there."""
        if (events := self._events.get(event.stream_id)) is not None:
            events.put_nowait(event.event)

    def end_all(self, cause: PdServeError) -> None:
        """The other process has ended: report `cause` to every peer."""
        self._ended_with = cause
        for events in self._events.values():
            events.put_nowait(cause)

    async def _read(self, number: int, requests: AsyncIterator[kv_source_pb2.AttachRequest]) -> None:
        """Carry the peer's messages until it closes its side or disconnects."""
        try:
            async for request in requests:
                self._send(AttachMessage(number, request.SerializeToString()))
        except Exception:
            pass
        self._send(AttachMessage(number, None))
