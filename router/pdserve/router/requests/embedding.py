"""One client's request for embeddings in the router: a run per input, and the scope that ends them all."""

from __future__ import annotations

import asyncio
import time
from array import array

from pdserve.common.errors import Cancelled, PdServeError
from pdserve.router.admission.admission import Admission
from pdserve.router.requests.embedding_task import EmbeddingInput, EmbeddingTask
from pdserve.router.requests.request_scope import RequestScope
from pdserve.router.requests.request_services import RequestServices
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.tenants.client import ANYBODY, Client

MAX_RUNNING = 128
"""Inputs of one request that are served at a time; each holds a call, timers and buffers."""


class Embedding(RequestScope[EmbeddingInput]):
    """`results` once."""

    def __init__(
        self,
        request_id: str,
        inputs: list[EmbeddingInput],
        services: RequestServices,
        admission: Admission,
        record: RequestTrace,
        client: Client = ANYBODY,
    ) -> None:
        super().__init__(request_id, inputs, admission, record, client)
        self._services = services
        self._all: asyncio.Future[list[None]] | None = None
        self._error: PdServeError | None = None

    async def results(self) -> list[array[float]]:
        """A vector per input, in float32, in their order. Nothing of it runs any more when this returns or raises.

        Raises: PdServeError, of the first input that failed; Overloaded, Draining before any has begun.
        """
        if len(self._runs) > MAX_RUNNING:
            # the inputs have just been made, which is as long as all others should wait
            await asyncio.sleep(0)
        self._enter()
        began = time.monotonic()
        waiting = iter(enumerate(self._runs))
        vectors = [array("f")] * len(self._runs)

        async def serve() -> None:
            for place, served in waiting:
                vectors[place] = await EmbeddingTask(served, self._services, time.monotonic() - began).run()

        tasks: list[asyncio.Task[None]] = []
        try:
            if self._error is not None:
                raise self._error
            tasks = [asyncio.create_task(serve()) for _ in range(min(MAX_RUNNING, len(self._runs)))]
            self._all = asyncio.gather(*tasks)
            await self._all
            return vectors
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._error is None or task is None or task.cancelling():
                raise
            raise self._error from None
        except PdServeError as error:
            self._record.abort(error)
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
        self._record.abort(self._error)
        if self._all is not None:
            self._all.cancel()
