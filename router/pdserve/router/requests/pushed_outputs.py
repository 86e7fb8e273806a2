"""`PushedOutputs`: writes a stream's outputs to the client as they come, without a task of its own and without one per client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from pdserve.common.errors import PdServeError
from pdserve.router.requests.client_stream import ClientStream
from pdserve.text.outputs.request_output import CompletionOutput

Write = Callable[[list[CompletionOutput]], Coroutine[Any, Any, None]]
"""Writes outputs. It runs outside of tasks, so it may wait for futures alone."""


class PushedOutputs:
    """`run` once."""

    def __init__(
        self,
        stream: ClientStream,
        num_choices: int,
        write: Write,
        write_now: Callable[[list[CompletionOutput]], bool] = lambda outputs: False,
    ) -> None:
        """num_choices: of the stream. write: one at a time; what comes meanwhile is merged in the stream, which bounds it.

        write_now: writes outputs without waiting, or writes nothing and returns False.
        """
        self._stream = stream
        self._num_open = num_choices
        self._write = write
        self._write_now = write_now
        self._last: asyncio.Future[list[CompletionOutput]] = asyncio.get_running_loop().create_future()
        self._writing: Coroutine[Any, Any, None] | None = None
        """A write that waits for the client to read."""

    async def run(self, first: list[CompletionOutput]) -> list[CompletionOutput]:
        """Write `first` and everything that follows but the last outputs, and return these; empty without any.

        Raises: the error that ends the request, after all output before it; errors of `write`.
        """
        self._stream.subscribe(self._take)
        try:
            self._push(first)
            self._stream.wake()
            return await self._last
        finally:
            self._stream.subscribe(None)
            if self._writing is not None:
                self._writing.close()
                self._writing = None

    def _take(self) -> None:
        """There may be new output."""
        while self._writing is None and not self._last.done():
            try:
                outputs = self._stream.take_now()
            except PdServeError as error:
                self._last.set_exception(error)
                return
            if outputs:
                self._push(outputs)
            if not self._stream.ended:
                return
            if not outputs and not self._last.done():
                self._last.set_result([])

    def _push(self, outputs: list[CompletionOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._num_open -= 1
                if not self._num_open:
                    self._last.set_result(outputs)
                    return
        try:
            if self._write_now(outputs):
                return
        except Exception as error:
            self._last.set_exception(error)
            return
        self._writing = self._write(outputs)
        self._go_on()

    def _go_on(self, waited: asyncio.Future[Any] | None = None) -> None:
        """Run the write until it ends or waits again. waited: what it has waited for."""
        if self._writing is None or self._last.done():
            # `run` has ended meanwhile, or its task is cancelled and will close the write
            return
        try:
            waits_for = self._writing.send(None)
        except StopIteration:
            self._writing = None
        except asyncio.CancelledError:
            self._writing = None
            self._last.cancel()
        except Exception as error:
            self._writing = None
            self._last.set_exception(error)
        else:
            self._stream.is_blocked = True
            waits_for.add_done_callback(self._go_on)
            return
        self._stream.is_blocked = False
        if waited is not None:
            # there may be output that came meanwhile
            self._stream.wake()
