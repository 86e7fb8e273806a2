"""Embeddings as an HTTP response, sent when all are known or one has failed."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.common.errors import PdServeError
from pdserve.router.bodies.client_bodies import ClientBodies
from pdserve.router.http_front.generation_response import JSON, cancel_on_disconnect, error_response
from pdserve.router.openai.embeddings import PART_BYTES
from pdserve.router.requests.tasks.embedding_task import Embedding

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
        headers = self._embedding.answer_headers
        try:
            vectors = await self._embedding.results()
        except PdServeError as error:
            await error_response(error, headers)(scope, receive, send)
            return
        finally:
            listener.cancel()
        parts = self._parts(vectors)
        num_bytes = min(PART_BYTES, _NUMBER_BYTES * sum(map(len, vectors)))
        part = await self._next(parts, num_bytes)
        following = await self._next(parts, num_bytes)
        if not following:
            await Response(part, headers=headers, media_type=JSON)(scope, receive, send)
            return
        # the next parts are made after the client has read these
        response = Response(headers=headers, media_type=JSON)
        raw = [header for header in response.raw_headers if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        while part:
            await send({"type": "http.response.body", "body": part, "more_body": bool(following)})
            part, following = following, await self._next(parts, num_bytes) if following else b""

    async def _next(self, parts: Iterator[bytes], num_bytes: int) -> bytes:
        """The next part; empty after the last."""
        return await self._bodies.in_background_pool(num_bytes, lambda: next(parts, b""))
