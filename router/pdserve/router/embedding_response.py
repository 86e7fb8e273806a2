"""Embeddings as an HTTP response: nothing goes out before the last of them or the error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.common.errors import PdServeError
from pdserve.router.client_bodies import ClientBodies
from pdserve.router.embedding import Embedding
from pdserve.router.generation_response import JSON, REQUEST_ID_HEADER, cancel_on_disconnect, error_response

_NUMBER_BYTES = 20
"""About what a number takes in JSON."""


class EmbeddingResponse(Response):
    """Computes while it responds; a client that leaves ends it."""

    def __init__(self, embedding: Embedding, body: Callable[[list[list[float]]], bytes], bodies: ClientBodies) -> None:
        """body: the answer, of the vectors; called in a thread where they are many."""
        super().__init__()
        self._embedding = embedding
        self._bodies = bodies
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listener = asyncio.create_task(cancel_on_disconnect(self._embedding, receive))
        headers = {REQUEST_ID_HEADER: self._embedding.request_id}
        try:
            vectors = await self._embedding.results()
            num_bytes = _NUMBER_BYTES * sum(map(len, vectors))
            content = await self._bodies.aside(num_bytes, lambda: self._body(vectors))
            response = Response(content, headers=headers, media_type=JSON)
        except PdServeError as error:
            response = error_response(error, headers)
        finally:
            listener.cancel()
        await response(scope, receive, send)
