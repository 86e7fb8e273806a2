"""`RequestStreams`: outputs of an engine, each passed to the reader of its request in one event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pdserve.common.errors import InvalidRequest, PdServeError, from_code
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.engine.client.engine_core_client import EngineCoreClient
from pdserve.engine.output_stream import OutputStream, failed_output


class RequestStreams:
    """The requests that have not ended, by the caller's names."""

    def __init__(self, client: EngineCoreClient) -> None:
        self._client = client
        self._streams: dict[str, OutputStream] = {}
        """Streams by the engine's request id."""
        self._active: dict[str, str] = {}
        """The caller's request id -> the engine's."""
        self._receiving: asyncio.Task[None] | None = None
        self.ended_with: PdServeError | None = None
        """The error that ended the engine; None while it takes requests."""

    @property
    def is_empty(self) -> bool:
        return not self._streams and not self._active

    def start(self) -> bool:
        """Receive outputs in the running loop from now on; returns whether this was the first call.

        Raises: what ended the engine; RuntimeError in another loop than before.
        """
        self.require_running()
        loop = asyncio.get_running_loop()
        if is_first := self._receiving is None:
            self._receiving = loop.create_task(self._receive())
        if self._receiving is not None and self._receiving.get_loop() is not loop:
            raise RuntimeError("this AsyncLLM belongs to another event loop")
        return is_first

    def require_running(self) -> None:
        """Raises: what ended the engine, if it takes no more requests."""
        if (cause := self.ended_with) is not None:
            raise from_code(cause.code, cause.message)

    def free_name(self, request_id: str | None) -> str:
        """A name for a request; None: a random one. Raises: InvalidRequest for a name that another request has now; what
        ended the engine meanwhile."""
        self.require_running()
        if request_id in self._active:
            raise InvalidRequest(f"request_id is {request_id!r}, which another request has now", "request_id")
        return secrets.token_hex(8) if request_id is None else request_id

    @contextmanager
    def submitted(self, request_id: str, core: EngineCoreRequest) -> Iterator[OutputStream]:
        """The outputs of a request, which ends when the context is left. request_id: the caller's."""
        engine_id = core.request_id
        stream = self._streams[engine_id] = OutputStream(engine_id, num_sequences=core.n)
        self._active[request_id] = engine_id
        try:
            try:
                self._client.add_request(core)
            except PdServeError as error:
                # the engine has ended, and its last word is not read yet
                self.ended_with = self.ended_with or error
                raise
            yield stream
        finally:
            del self._streams[engine_id], self._active[request_id]
            if not stream.has_ended:
                self._client.abort_requests([engine_id])

    def abort(self, names: Iterable[str]) -> None:
        """End requests by the caller's names, of which some may not exist."""
        self._client.abort_requests([self._active[name] for name in names if name in self._active])

    async def _receive(self) -> None:
        """Pass outputs on until the engine's end; then end the streams that it has not ended."""
        try:
            while True:
                for output in (await self._client.get_output_async()).outputs:
                    if (stream := self._streams.get(output.request_id)) is not None:
                        stream.put(output)
        except PdServeError as error:
            self.ended_with = cause = self.ended_with or error
            for stream in self._streams.values():
                stream.put(failed_output(stream.request_id, cause))
