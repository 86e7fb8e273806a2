"""`SequenceMove`: an attempt that another decode worker can continue, and the task that moves it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from pdserve.router.workers.worker import RemoteWorker

log = logging.getLogger(__name__)


class SequenceMove:
    """Use as a context around the attempt: `Movable` of its decode worker."""

    def __init__(
        self,
        worker: RemoteWorker,
        move: Callable[[RemoteWorker], Coroutine[Any, Any, bool]],
        num_output_tokens: Callable[[], int],
    ) -> None:
        """move: moves the attempt from this worker, and returns whether it will go; cancelled when the attempt ends.
        num_output_tokens: as of `Movable`."""
        self._worker = worker
        self._num_output_tokens = num_output_tokens
        self._move = move
        self._task: asyncio.Task[bool] | None = None
        """Until it has found that the attempt stays."""

    def __enter__(self) -> SequenceMove:
        self._worker.movable.add(self)
        if self._worker.sequences_leave:  # since it was placed
            self.move()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._worker.movable.discard(self)
        if self._task is not None:
            self._task.cancel()

    @property
    def num_output_tokens(self) -> int:
        """As of `Movable`."""
        return self._num_output_tokens()

    def move(self) -> None:
        """As `Movable.move`."""
        if self._task is None:
            self._task = asyncio.create_task(self._move(self._worker), name="move of a sequence")
            self._task.add_done_callback(self._done)

    def stay(self) -> None:
        """As `Movable.stay`."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self._task = None

    def _done(self, task: asyncio.Task[bool]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("a sequence could not be moved", exc_info=error)
        elif not task.result():
            self._task = None
