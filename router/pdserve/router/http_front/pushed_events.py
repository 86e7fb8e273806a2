"""`PushedEvents`: writes a stream's events as they come, with a task only for a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pdserve.common.errors import PdServeError
from pdserve.common.tasks.started_coroutine import start
from pdserve.router.requests.client_stream import ClientStream
from pdserve.text.outputs.request_output import CompletionOutput


class PushedEvents:
    """`run` once."""

    def __init__(
        self,
        stream: ClientStream,
        write: Callable[[list[CompletionOutput]], Coroutine[Any, Any, bool]],
        write_now: Callable[[list[CompletionOutput]], bool] = lambda outputs: False,
    ) -> None:
        """write: writes outputs, one call at a time; returns True after the last ones. It waits only for the client to read.

        write_now: writes outputs without waiting, or writes nothing and returns False; it leaves the last ones to `write`.
        """
        self._stream = stream
        self._write = write
        self._write_now = write_now
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: asyncio.Task[None] | None = None
        """Writes for a client that has to read first."""

    async def run(self, first: list[CompletionOutput]) -> None:
        """Write `first` and everything that follows. Raises: the error that ends the request, after all output before it."""
        self._stream.subscribe(self._take)
        try:
            self._begin(first)
            self._take()
            await self._ended
        finally:
            self._stream.subscribe(None)
            if self._waiting is not None:
                self._waiting.cancel()
                await asyncio.wait((self._waiting,))

    def _take(self) -> None:
        """There may be new output."""
        while self._waiting is None and not self._ended.done():
            try:
                outputs = self._stream.take_now()
            except PdServeError as error:
                self._ended.set_exception(error)
                return
            if not outputs:
                if self._stream.ended:
                    self._ended.set_result(None)
                return
            try:
                if self._write_now(outputs):
                    continue
            except Exception as error:
                self._ended.set_exception(error)
                return
            self._begin(outputs)

    def _begin(self, outputs: list[CompletionOutput]) -> None:
        rest = start(self._write_some(outputs))
        if rest is not None:
            self._stream.is_blocked = True
            self._waiting = asyncio.create_task(self._finish(rest))

    async def _write_some(self, outputs: list[CompletionOutput]) -> None:
        try:
            is_last = await self._write(outputs)
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)
            return
        if is_last and not self._ended.done():
            self._ended.set_result(None)

    async def _finish(self, rest: Awaitable[None]) -> None:
        await rest
        self._waiting, self._stream.is_blocked = None, False
        # what came meanwhile
        self._take()
