"""One client's request for embeddings in the router: a run an input, and the scope that ends them all."""

from __future__ import annotations

import asyncio

from pdserve.common.errors import Cancelled, Draining, PdServeError
from pdserve.common.timeline import Timeline
from pdserve.router.admission import Admission
from pdserve.router.embedding_run import EmbeddingRun
from pdserve.router.request_record import RequestRecord
from pdserve.router.request_run import Usage


class Embedding:
    """`results` once."""

    def __init__(
        self,
        request_id: str,
        runs: list[EmbeddingRun],
        admission: Admission,
        record: RequestRecord,
        client: str = "",
    ) -> None:
        """client: whose it is, for limits per API key."""
        self.request_id = request_id
        self._runs = runs
        self._admission = admission
        self._client = client
        self._record = record
        self._all: asyncio.Future[list[list[float]]] | None = None
        self._error: PdServeError | None = None

    async def results(self) -> list[list[float]]:
        """A vector an input, in their order. Nothing of it runs any more when this returns or raises.

        Raises: PdServeError, of the first input that failed; Overloaded, Draining before any has begun.
        """
        timeout_s = min(run.timeout_s for run in self._runs)
        try:
            self._admission.enter(len(self._runs), self._expelled, client=self._client, timeout_s=timeout_s)
        except PdServeError as error:
            self._record.cut_short(error)
            self._record.end()
            raise
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
            await asyncio.gather(*tasks, return_exceptions=True)
            self._admission.leave(len(self._runs), self._expelled, client=self._client)
            self._record.end()

    def cancel(self, error: PdServeError | None = None) -> None:
        """End all runs, and their calls with them; `results` raises `error`."""
        if self._all is not None and not self._all.done():
            self._error = error or Cancelled("the client left")
            self._record.cut_short(self._error)
            self._all.cancel()

    @property
    def usage(self) -> Usage:
        """Summed over the inputs."""
        return Usage(
            prompt_tokens=sum(run.usage.prompt_tokens for run in self._runs),
            cached_tokens=sum(run.usage.cached_tokens for run in self._runs),
        )

    @property
    def timeline(self) -> Timeline:
        """Of the first input."""
        return self._runs[0].timeline

    def _expelled(self) -> None:
        self.cancel(Draining("this router is shutting down"))
