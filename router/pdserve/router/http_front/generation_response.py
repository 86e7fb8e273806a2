"""A generation as an HTTP response; headers are sent with the first token or the error."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.common.errors import InvalidRequest, Overloaded, PdServeError
from pdserve.common.net.chunk_writer import ChunkWriter, chunk_writer
from pdserve.common.request.generation_request import (
    MAX_DATA_PARALLEL_RANK,
    verify_client_request_id,
    verify_data_parallel_rank,
)
from pdserve.common.request.trace_headers import valid_trace_headers
from pdserve.common.timeline import Timeline
from pdserve.router.bodies.client_bodies import ClientBodies
from pdserve.router.http_front.answer_parts import PART_BYTES, abandon, send_body
from pdserve.router.http_front.error_response import JSON, error_response
from pdserve.router.requests.generation import Generation
from pdserve.router.requests.output_pump import OutputPump
from pdserve.router.requests.preparation import CallFields
from pdserve.router.requests.request_scope import REQUEST_ID_HEADER, RequestScope
from pdserve.router.requests.usage import Usage
from pdserve.text.outputs.request_output import CompletionOutput

log = logging.getLogger(__name__)

RANK_HEADER = "x-data-parallel-rank"
"""vLLM's header: the rank of the decode workers that the request prefers."""
TIMELINE_HEADER = "x-pdserve-timeline"
_RANK = re.compile("[0-9]{1,9}")
_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")
_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def call_fields(request: Request, timeout_s: float) -> CallFields:
    """timeout_s: the request's deadline. Raises: InvalidRequest for a header that the client or a proxy sent."""
    client_request_id = request.headers.get(REQUEST_ID_HEADER, "")
    verify_client_request_id(client_request_id, REQUEST_ID_HEADER)
    return CallFields(timeout_s, valid_trace_headers(request.headers), client_request_id, _rank(request))


def _rank(request: Request) -> int | None:
    given = request.headers.get(RANK_HEADER)
    if given is None:
        return None
    if not _RANK.fullmatch(given):
        raise InvalidRequest(
            f"{RANK_HEADER} is {given[:40]!r}, a number from 0 to {MAX_DATA_PARALLEL_RANK} is needed", RANK_HEADER
        )
    verify_data_parallel_rank(int(given), RANK_HEADER)
    return int(given)


def asks_for_timeline(request: Request) -> bool:
    """True if the client wants the phases of its request in the response."""
    return request.headers.get(TIMELINE_HEADER) == "1"


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_on_disconnect(scope: RequestScope[Any], receive: Receive) -> None:
    """End the request when its client disconnects; cancel this task when the request ends by itself."""
    await until_disconnect(receive)
    scope.cancel()


class AnswerWriter(Protocol):
    """Writes one request's answer in the shape of its API."""

    def whole(self, outputs: list[CompletionOutput], usage: Usage, timeline: Timeline) -> bytes:
        """The body of an answer that is not streamed."""

    def chunk(self, output: CompletionOutput, usage: Usage) -> bytes:
        """Events of one choice's new output."""

    def last_chunk(self, output: CompletionOutput, usage: Usage, timeline: Timeline) -> bytes:
        """As `chunk`, for the output that ends the request, followed by the end of the stream."""

    def failed(self, error: PdServeError) -> bytes:
        """Events for an error after the first output."""


class GenerationResponse(Response):
    """Runs the generation and sends the response; a disconnect of the client ends it."""

    def __init__(
        self,
        generation: Generation,
        answer: AnswerWriter,
        bodies: ClientBodies,
        *,
        stream: bool,
        before_end: Callable[[], Awaitable[None]] | None = None,
        content_type: str = JSON,
    ) -> None:
        """before_end: called once before the client can see that its answer is complete. content_type: of a whole answer."""
        super().__init__()
        self._content_type = content_type
        self._before_end = before_end
        self._bodies = bodies
        self._generation = generation
        self._answer = answer
        self._stream = stream
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._generation as generation:
                listener = asyncio.create_task(cancel_on_disconnect(generation, receive))
                try:
                    if self._stream:
                        await self._send_events(generation, send, chunk_writer(scope))
                    else:
                        await self._send_whole(generation, scope, send)
                finally:
                    listener.cancel()
        except PdServeError as error:
            await self._send_error(error, scope, receive, send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._generation.stalled or task is None or task.uncancel():
                raise
            abandon(scope)

    async def _send_whole(self, generation: Generation, scope: Scope, send: Send) -> None:
        num_bytes = await generation.stream.until_whole()
        # small ones do not wait for room
        async with self._bodies.unread.room(num_bytes) if num_bytes > PART_BYTES else nullcontext() as room:
            body = await self._whole(generation, num_bytes)
            if self._before_end is not None:
                await self._before_end()
            await self._start(send, {"content-type": self._content_type, "content-length": str(len(body))})
            sending = send_body(body, scope, send, generation.stream.note_read)
            if room is None:
                await sending
                return
            room.shrink(len(body))
            try:
                await room.read(sending, None)
            except Overloaded:
                # others wait for its room
                log.info("request %s: given up, its client reads too slowly", generation.request_id)
                abandon(scope)

    async def _whole(self, generation: Generation, num_bytes: int) -> bytes:
        """The body; nothing else of the answer is kept."""
        outputs = generation.stream.take_now()
        usage, timeline = generation.usage, generation.timeline
        return await self._bodies.in_background_pool(num_bytes, lambda: self._answer.whole(outputs, usage, timeline))

    async def _send_events(self, generation: Generation, send: Send, chunks: ChunkWriter | None) -> None:
        await generation.stream.until_ready()
        outputs = generation.stream.take_now()
        await self._start(send, _SSE_HEADERS)

        def events(outputs: list[CompletionOutput]) -> bytes:
            return one_line_each(b"".join([self._answer.chunk(output, generation.usage) for output in outputs]))

        async def write(outputs: list[CompletionOutput]) -> None:
            await send({"type": "http.response.body", "body": events(outputs), "more_body": True})

        def write_now(outputs: list[CompletionOutput]) -> bool:
            if chunks is None or not chunks.is_ready:
                return False
            chunks.write(events(outputs))
            return True

        outputs = await OutputPump(generation.stream, generation.num_choices, write, write_now).run(outputs)
        if not outputs:
            return
        *others, last = outputs
        body = events(others)
        body += one_line_each(self._answer.last_chunk(last, generation.usage, generation.timeline))
        if self._before_end is not None:
            await self._before_end()
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, send: Send, headers: Mapping[str, str]) -> None:
        self._started = True
        fields = {**headers, **self._generation.answer_headers}
        raw = [(name.encode(), value.encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _send_error(self, error: PdServeError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            response = error_response(error, self._generation.answer_headers)
            await response(scope, receive, send)
            return
        await send(
            {"type": "http.response.body", "body": one_line_each(self._answer.failed(error)), "more_body": False}
        )


def one_line_each(events: bytes) -> bytes:
    """Events whose fields are one line for every client. events: of ASCII and JSON, whose strings may have other characters. They
    mean the same afterwards.

    The standard of server-sent events knows CR and LF. Clients that split a decoded text with Python's `str.splitlines`, such as
    httpx's `iter_lines`, also end a line at U+000B, U+000C, U+001C to U+001E, U+0085, U+2028 and U+2029. JSON's encoder escapes
    those below U+0020; the others it writes as they are.
    """
    if events.isascii():
        return events
    for end, escape in _LINE_ENDS:
        events = events.replace(end, escape)
    return events
