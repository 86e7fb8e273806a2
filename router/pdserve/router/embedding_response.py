"""Embeddings as an HTTP response: nothing goes out before the last of them or the error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.common.errors import PdServeError
from pdserve.router.embedding import Embedding
from pdserve.router.generation_response import JSON, REQUEST_ID_HEADER, cancel_on_disconnect, error_response


class EmbeddingResponse(Response):
    """Computes while it responds; a client that leaves ends it."""

    def __init__(self, embedding: Embedding, body: Callable[[list[list[float]]], object]) -> None:
        """body: the answer, of the vectors."""
        super().__init__()
        self._embedding = embedding
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listener = asyncio.create_task(cancel_on_disconnect(self._embedding, receive))
        headers = {REQUEST_ID_HEADER: self._embedding.request_id}
        try:
            content = msgspec.json.encode(self._body(await self._embedding.results()))
            response = Response(content, headers=headers, media_type=JSON)
        except PdServeError as error:
            response = error_response(error, headers)
        finally:
            listener.cancel()
        await response(scope, receive, send)
