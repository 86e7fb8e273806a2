"""One client's request for embeddings in the router: a run an input, and the scope that ends them all."""

from __future__ import annotations

import asyncio

from pdserve.common.errors import Cancelled, PdServeError
from pdserve.router.admission import Admission
from pdserve.router.client import ANYBODY, Client
from pdserve.router.embedding_run import EmbeddingRun
from pdserve.router.request_record import RequestRecord
from pdserve.router.visit import Visit

_STARTED_AT_ONCE = 256
"""Inputs begun in one callback of the event loop."""


class Embedding(Visit[EmbeddingRun]):
    """`results` once."""

    def __init__(
        self,
        request_id: str,
        runs: list[EmbeddingRun],
        admission: Admission,
        record: RequestRecord,
        client: Client = ANYBODY,
    ) -> None:
        super().__init__(request_id, runs, admission, record, client)
        self._all: asyncio.Future[list[list[float]]] | None = None
        self._error: PdServeError | None = None

    async def results(self) -> list[list[float]]:
        """A vector an input, in their order. Nothing of it runs any more when this returns or raises.

        Raises: PdServeError, of the first input that failed; Overloaded, Draining before any has begun.
        """
        if len(self._runs) > _STARTED_AT_ONCE:
            # the runs have just been made, which is as long as all others should wait
            await asyncio.sleep(0)
        self._enter()
        tasks: list[asyncio.Task[list[float]]] = []
        try:
            while len(tasks) < len(self._runs):
                runs = self._runs[len(tasks) : len(tasks) + _STARTED_AT_ONCE]
                tasks += [asyncio.create_task(run.run()) for run in runs]
                if len(tasks) < len(self._runs):
                    await asyncio.sleep(0)
            if self._error is not None:
                raise self._error
            self._all = asyncio.gather(*tasks)
            return await self._all
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._error is None or task is None or task.cancelling():
                raise
            raise self._error from None
        except PdServeError as error:
            self._record.cut_short(error)
            raise
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._leave()

    def cancel(self, error: PdServeError | None = None) -> None:
        """End all runs, and their calls with them; `results` raises `error`."""
        if self._error is not None or (self._all is not None and self._all.done()):
            return
        self._error = error or Cancelled("the client left")
        self._record.cut_short(self._error)
        if self._all is not None:
            self._all.cancel()
