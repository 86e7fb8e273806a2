"""One client's request for embeddings in the router: a run an input, and the scope that ends them all."""

from __future__ import annotations

import asyncio

from pdserve.common.errors import Cancelled, PdServeError
from pdserve.router.admission import Admission
from pdserve.router.client import ANYBODY, Client
from pdserve.router.embedding_run import EmbeddingRun
from pdserve.router.request_record import RequestRecord
from pdserve.router.visit import Visit


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
        self._enter()
        tasks = [asyncio.create_task(run.run()) for run in self._runs]
        try:
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
        if self._all is not None and not self._all.done():
            self._error = error or Cancelled("the client left")
            self._record.cut_short(self._error)
            self._all.cancel()
