"""`Embedding`: one client's request for embeddings, classes or scores; `EmbeddingTask`: one input, served by a prefill worker."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from pdserve.common import clock
from pdserve.common import timeline as moments
from pdserve.common.errors import Cancelled, Draining, InternalError, PdServeError, WorkerLost
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.timeline import Timeline
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.admission.admission import Admission
from pdserve.router.admission.place import Cost
from pdserve.router.attempts.attempt_failure import AttemptFailed
from pdserve.router.attempts.embed_call import Embedded, embed
from pdserve.router.attempts.migration import MigrationSource
from pdserve.router.placement.placement import Placement
from pdserve.router.placement.worker_selector import pooling_workers
from pdserve.router.requests.preparation import ClientRequest, ServedLimits
from pdserve.router.requests.request_scope import RequestScope
from pdserve.router.requests.request_services import RequestServices
from pdserve.router.requests.tasks.placed_task import PlacedTask
from pdserve.router.requests.tasks.retry_state import RetryState
from pdserve.router.requests.usage import Usage
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.tenants.client import ANYBODY, Client
from pdserve.router.workers.call_failure import CallFailed
from pdserve.router.workers.worker import RemoteWorker


class EmbeddingInput:
    """One input of such a request, kept as long as the request lives: small, since there may be thousands."""

    __slots__ = ("record", "request", "request_id", "timeline", "usage")
    num_sequences = 1

    def __init__(self, request_id: str, request: ClientRequest, record: RequestTrace) -> None:
        self.request_id = request_id
        self.request = request
        self.usage = Usage()
        self.timeline = Timeline()
        self.record = record.run(self.timeline)

    @property
    def timeout_s(self) -> float:
        """The client's deadline, seconds from the start of the request."""
        return self.request.timeout_s


class EmbeddingTask(PlacedTask["array[float]"]):
    """Serves one input: its vector, in float32, whatever its task. `run` once."""

    roles = (WorkerRole.PREFILL,)

    def __init__(self, served: EmbeddingInput, services: RequestServices, late_s: float = 0.0) -> None:
        """late_s: seconds since the request began, which reduce the time that the client gave."""
        self._asked_s = served.timeout_s
        request = msgspec.structs.replace(served.request, timeout_s=max(0.0, served.timeout_s - late_s))
        super().__init__(served.request_id, request, services, served.record, served.timeline, served.usage)
        self._embedded: Embedded | None = None

    async def run(self) -> array[float]:
        """Raises: PdServeError."""
        try:
            return await self.served()
        finally:
            # the record outlives the timer, and what the timer refers to
            self._record.deadline = None

    async def serve(self) -> array[float]:
        token_ids = await self._services.preparation.tokenize(self._request, ServedLimits.of(self.workers()))
        request = self._services.preparation.complete_embedding(
            self.request_id, self._request, token_ids, await self.limits()
        )
        token_ids = request.prompt_token_ids
        self.usage.prompt_tokens = len(token_ids)
        self.timeline.mark(moments.TOKENIZED)
        self._record.tokenized(len(token_ids))
        num_blocks = max((worker.num_prompt_blocks(len(token_ids)) for worker in self.workers()), default=0)
        async with self._services.admission.place(
            Cost(num_blocks=num_blocks, num_tokens=len(token_ids)),
            raise_when_no_worker=self._raise_when_no_worker,
            client=self._request.client,
        ) as self._holds:
            self.timeline.mark(moments.ADMITTED)
            self._record.admitted()
            adapted = await self._services.models.with_adapter(request, self.patience_s, self.roles)
            await self.until_served(adapted, RetryState())
        if self._embedded is None:
            raise InternalError("an embedding without a vector")
        self.timeline.mark(moments.FINISHED)
        if not self._request.cache.is_shared:
            self.usage.cached_tokens = min(self._embedded.cached_tokens.total, self.usage.prompt_tokens)
        self._record.embedded(self._embedded.cached_tokens)
        return self._embedded.values

    async def attempt(
        self, number: int, prepared: GenerationRequest, placement: Placement, source: MigrationSource | None
    ) -> None:
        worker = placement.prefill
        if worker is None:
            raise InternalError("a placement without a prefill worker")
        reservation = worker.reserve(placement.prefill_share)
        try:
            self._embedded = await embed(worker, prepared, number, placement.move)
        except CallFailed as failure:
            if isinstance(failure.error, Draining):
                worker.refuse_more()
            raise AttemptFailed(failure.error, worker, died=failure.died) from failure
        finally:
            reservation.end()
        self.timeline.merge(self._embedded.moments)
        self._services.selector.moves.ended(placement.move, self.timeline, self._embedded.cached_tokens.total)

    def _wanted(self, request: GenerationRequest) -> dict[str, Any]:
        return {
            "num_tokens": len(request.prompt_token_ids),
            "max_tokens": 0,
            "hashes": lambda layout: self._known_hashes(request, layout),
            "pooling": self._pooling,
        }

    def _known_hashes(self, request: GenerationRequest, layout: KvLayout) -> list[bytes]:
        """Block hashes that may be served from cache; none for mean pooling, which needs every hidden state."""
        pooling = request.pooling_params
        return [] if pooling and not pooling.reads_prefix_cache else self.hashed(request, layout).placement_hashes

    async def _raise_when_no_worker(self) -> None:
        """Runs while the request waits for a place. Never returns. Raises: WorkerLost when no worker could serve it."""
        await self._services.fleet.wait_until_absent(
            lambda: self._services.selector.has_workers(pooling=self._pooling), self.patience_s
        )
        raise self.no_worker()

    def workers(self) -> list[RemoteWorker]:
        return pooling_workers(super().workers(), self._pooling)

    @property
    def _pooling(self) -> PoolingParams:
        return self._request.pooling_params or PoolingParams()

    @property
    def patience_s(self) -> float:
        """0 in a fleet without prefill workers."""
        has_any = self._services.fleet.counts()[WorkerRole.PREFILL.value]["addresses"]
        return super().patience_s if has_any else 0.0

    @property
    def timeout_s(self) -> float:
        return self._asked_s

    def no_worker(self) -> WorkerLost:
        what = "embeddings" if self._pooling.is_embedding else "classes"
        return WorkerLost(
            f"{what} are computed by prefill workers, and none could serve this: "
            f"{self._services.fleet.describe(WorkerRole.PREFILL)}"
        ).for_clients()


MAX_RUNNING = 128
"""Inputs of one request that are served at a time; each holds a call, timers and buffers."""


class Embedding(RequestScope[EmbeddingInput]):
    """Enter `results` once."""

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

    @contextlib.asynccontextmanager
    async def results(self) -> AsyncIterator[list[array[float]]]:
        """Compute a float32 vector per input, in their order. No run is left inside the context; the request counts for its tenant
        until its end, which is when the client has read its answer.

        Raises: PdServeError, of the first input that failed; Overloaded, Draining before any has begun.
        """
        if len(self._runs) > MAX_RUNNING:
            # the inputs have just been made, which is as long as all others should wait
            await asyncio.sleep(0)
        self._enter()
        try:
            yield await self._computed()
        finally:
            self._leave()

    async def _computed(self) -> list[array[float]]:
        began = clock.monotonic()
        waiting = iter(enumerate(self._runs))
        vectors = [array("f")] * len(self._runs)

        async def serve() -> None:
            for place, served in waiting:
                vectors[place] = await EmbeddingTask(served, self._services, clock.monotonic() - began).run()

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
            await asyncio.gather(*tasks, return_exceptions=True)

    def cancel(self, error: PdServeError | None = None) -> None:
        """End all runs, and their calls with them; `results` raises `error`."""
        if self._error is not None or (self._all is not None and self._all.done()):
            return
        self._error = error or Cancelled("the client left")
        self._record.abort(self._error)
        if self._all is not None:
            self._all.cancel()
