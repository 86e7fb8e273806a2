"""Embeddings as an HTTP response, sent when all are known or one has failed."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.common.errors import Overloaded, PdServeError
from pdserve.router.bodies.client_bodies import ClientBodies
from pdserve.router.http_front.answer_parts import PART_BYTES, abandon, send_body
from pdserve.router.http_front.error_response import JSON, error_response
from pdserve.router.http_front.generation_response import cancel_on_disconnect
from pdserve.router.openai.embeddings import PART_BYTES as MADE_BYTES
from pdserve.router.requests.tasks.embedding_task import Embedding

log = logging.getLogger(__name__)
_NUMBER_BYTES = 20
"""Approximate bytes of a number in JSON."""


class EmbeddingResponse(Response):
    """Computes the embeddings and sends the response; a disconnect of the client ends it."""

    def __init__(
        self, embedding: Embedding, parts: Callable[[list[array[float]]], Iterator[bytes]], bodies: ClientBodies
    ) -> None:
        """parts: yields the parts of the body for the vectors; many vectors are serialized in a thread."""
        super().__init__()
        self._embedding = embedding
        self._bodies = bodies
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listener = asyncio.create_task(cancel_on_disconnect(self._embedding, receive))
        try:
            # until the client has read the answer, it counts for its tenant
            async with self._embedding.results() as vectors:
                num_bytes = sum(vector.itemsize * len(vector) for vector in vectors)
                async with self._bodies.unread.room(num_bytes) if num_bytes > PART_BYTES else nullcontext() as room:
                    sending = self._send(vectors, scope, receive, send)
                    try:
                        await (sending if room is None else room.read(sending, None))
                    except Overloaded:
                        # others wait for its room
                        log.info("request %s: given up, its client reads too slowly", self._embedding.request_id)
                        abandon(scope)
        except PdServeError as error:
            await error_response(error, self._embedding.answer_headers)(scope, receive, send)
        finally:
            listener.cancel()

    async def _send(self, vectors: list[array[float]], scope: Scope, receive: Receive, send: Send) -> None:
        headers = self._embedding.answer_headers
        parts = self._parts(vectors)
        num_bytes = min(MADE_BYTES, _NUMBER_BYTES * sum(map(len, vectors)))
        part = await self._next(parts, num_bytes)
        following = await self._next(parts, num_bytes)
        if not following:
            await Response(part, headers=headers, media_type=JSON)(scope, receive, send)
            return
        # the next parts are made after the client has read these
        response = Response(headers=headers, media_type=JSON)
        raw = [header for header in response.raw_headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        while following:
            for start in range(0, len(part), PART_BYTES):
                await send({"type": "http.response.body", "body": part[start : start + PART_BYTES], "more_body": True})
            part, following = following, await self._next(parts, num_bytes)
        await send_body(part, scope, send)

    async def _next(self, parts: Iterator[bytes], num_bytes: int) -> bytes:
        """The next part; empty after the last."""
        return await self._bodies.in_background_pool(num_bytes, lambda: next(parts, b""))
