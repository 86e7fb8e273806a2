"""`OutputPump`: writes a stream's outputs to its client as they come.

Outputs are written in the callback that has them, where the client can take them at once. Otherwise the task of `run` writes them,
and what comes meanwhile is merged in the stream, which bounds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pdserve.router.requests.client_stream import ClientStream
from pdserve.text.outputs.request_output import CompletionOutput


class OutputPump:
    """`run` once."""

    def __init__(
        self,
        stream: ClientStream,
        num_choices: int,
        write: Callable[[list[CompletionOutput]], Awaitable[None]],
        write_now: Callable[[list[CompletionOutput]], bool] = lambda outputs: False,
    ) -> None:
        """num_choices: of the stream. write: may wait for the client. write_now: writes without waiting, or returns False and
        writes nothing."""
        self._stream = stream
        self._num_open = num_choices
        self._write = write
        self._write_now = write_now
        self._for_task: asyncio.Future[list[CompletionOutput]] | None = None
        """Takes outputs that the task has to write; None while it writes."""

    async def run(self, first: list[CompletionOutput]) -> list[CompletionOutput]:
        """Write `first` and everything that follows but the last outputs, and return these; empty without any.

        Raises: the error that ends the request, after all output before it; errors of `write` and `write_now`.
        """
        outputs = first
        self._stream.subscribe(self._on_output)
        try:
            self._count_ended(first)
            while outputs and self._num_open:
                if not self._write_now(outputs):
                    self._stream.is_blocked = True
                    await self._write(outputs)
                    self._stream.is_blocked = False
                outputs = await self._next()
            return outputs
        finally:
            self._stream.subscribe(None)

    async def _next(self) -> list[CompletionOutput]:
        """Outputs that could not be written at once, or the last ones; empty at the end. Raises: as `run`."""
        self._for_task = asyncio.get_running_loop().create_future()
        # there may be output that came during the write
        self._stream.wake()
        try:
            return await self._for_task
        finally:
            self._for_task = None

    def _on_output(self) -> None:
        """There may be new output, or the end."""
        waiting = self._for_task
        if waiting is None or waiting.done():
            return
        try:
            outputs = self._stream.take_now()
            self._count_ended(outputs)
            if outputs and self._num_open and self._write_now(outputs):
                if self._stream.ended:
                    # an error follows, or an end without output
                    self._stream.wake()
            elif outputs or self._stream.ended:
                waiting.set_result(outputs)
        except Exception as error:
            waiting.set_exception(error)

    def _count_ended(self, outputs: list[CompletionOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._num_open -= 1
