"""`Embedding`: one client's request for embeddings, classes or scores; `EmbeddingTask`: one input, served by a prefill worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import AsyncIterator

import msgspec

from pdserve.common import timeline as moments
from pdserve.common.errors import Cancelled, DeadlineExceeded, Draining, InternalError, PdServeError, WorkerLost
from pdserve.common.kv_events import WorkerKey
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.timeline import Timeline, now_unix_ns
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.admission.place import Cost, RunningPlace
from pdserve.router.admission.shared_admission import RequestAdmission
from pdserve.router.attempts.attempt_failure import AttemptFailed, FullWorkers, backoff_s
from pdserve.router.attempts.crash_guard import CrashGuard
from pdserve.router.attempts.embed_call import Embedded, embed
from pdserve.router.placement.routing_decision import RoutingDecision
from pdserve.router.placement.worker_selector import pooling_workers
from pdserve.router.requests.client_error import as_client_sees
from pdserve.router.requests.preparation import ClientRequest, HashedRequest, Limits
from pdserve.router.requests.request_scope import RequestScope
from pdserve.router.requests.request_services import RequestServices
from pdserve.router.requests.tasks.prompt_task import WAIT_FOR_WORKER_S
from pdserve.router.requests.usage import Usage
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.tenants.client import ANYBODY, Client
from pdserve.router.workers.call_failure import CallFailed
from pdserve.router.workers.worker import Worker

log = logging.getLogger(__name__)


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


class EmbeddingTask:
    """Serves one input. `run` once."""

    def __init__(self, served: EmbeddingInput, services: RequestServices, late_s: float = 0.0) -> None:
        """late_s: seconds since the request began, which reduce the time that the client gave."""
        self._input = served
        self._request_id = served.request_id
        self._timeline = served.timeline
        self._record = served.record
        timeout_s = max(0.0, served.timeout_s - late_s)
        self._request = msgspec.structs.replace(served.request, timeout_s=timeout_s)
        self._services = services
        self._holds: RunningPlace | None = None
        self._prepared: dict[tuple[str, int], HashedRequest] = {}
        self._crash_guard = CrashGuard(services.deny_list, services.fleet, services.company, self._request.client)
        self._full = FullWorkers(services.settings.limits.queue_timeout_s)

    async def run(self) -> array[float]:
        """The vector, in float32. Raises: PdServeError."""
        try:
            async with asyncio.timeout(self._request.timeout_s) as deadline:
                self._record.deadline = deadline
                return await self._serve()
        except TimeoutError:
            expired = deadline.expired()
            error: PdServeError = self._too_late() if expired else InternalError("something timed out in the router")
        except PdServeError as failed:
            error = failed
        except Exception:
            log.exception("request %s failed in the router", self._request_id)
            error = InternalError("internal error; the router's log has the details")
        finally:
            # the record outlives the timer, and what the timer refers to
            self._record.deadline = None
        self._record.error = error
        raise as_client_sees(error, self._request_id)

    async def _serve(self) -> array[float]:
        token_ids = await self._services.preparation.tokenize(self._request, Limits.of(self._workers()))
        request = self._services.preparation.complete_embedding(
            self._request_id, self._request, token_ids, await self._limits()
        )
        token_ids = request.prompt_token_ids
        self._input.usage.prompt_tokens = len(token_ids)
        self._timeline.mark(moments.TOKENIZED)
        self._record.tokenized(len(token_ids))
        cost = Cost(num_blocks=self._num_blocks(len(token_ids)), num_tokens=len(token_ids))
        async with self._services.admission.place(
            cost, raise_when_no_worker=self._raise_when_no_worker, client=self._request.client
        ) as self._holds:
            self._timeline.mark(moments.ADMITTED)
            self._record.admitted()
            adapted = await self._services.models.with_adapter(request, self._patience_s, (WorkerRole.PREFILL,))
            embedded = await self._attempts(adapted)
        self._timeline.mark(moments.FINISHED)
        if not self._request.cache.is_shared:
            self._input.usage.cached_tokens = embedded.num_cached_tokens
        self._record.embedded(embedded.num_cached_tokens)
        return embedded.values

    async def _attempts(self, request: GenerationRequest) -> Embedded:
        """Attempt after attempt until one serves the request. Raises: PdServeError."""
        blamed: frozenset[WorkerKey] = frozenset()
        number = num_counted = 0
        while True:
            started_unix_ns = now_unix_ns()
            decision = await self._place(request, number, blamed)
            worker = decision.placement.prefill
            if worker is None:
                raise InternalError("a placement without a prefill worker")
            self._timeline.mark(moments.PLACED)
            self._record.routed(started_unix_ns, decision.policy, decision.placement, decision.attributes)
            prepared = self._hashed(request, worker.identity.layout).request
            self._services.deny_list.check(self._request.client, prepared.request_digest)
            if not prepared.remaining_s:
                raise self._too_late()
            record = self._record.attempt(number, decision.placement)
            try:
                with record, self._services.company.serving(self._crash_guard, decision.placement):
                    return await self._attempt(record.with_trace_headers(prepared), number, decision, worker)
            except AttemptFailed as failure:
                number += 1
                if (full := failure.refused_by) is not None:
                    await self._full.refused(full, failure.error)
                    continue
                log.info("request %s: attempt %d failed: %s", self._request_id, number - 1, failure)
                num_counted += 1
                self._crash_guard.count(failure, prepared.request_digest)
                if not failure.error.retryable or num_counted >= self._services.settings.limits.max_attempts:
                    raise failure.error from failure
            blamed = frozenset((worker.key,))
            await asyncio.sleep(backoff_s(num_counted))

    async def _attempt(
        self, prepared: GenerationRequest, number: int, decision: RoutingDecision, worker: Worker
    ) -> Embedded:
        """Raises: AttemptFailed."""
        reservation = worker.reserve(decision.placement.prefill_share)
        if self._holds is not None:
            self._holds.placed()
        try:
            embedded = await embed(worker, prepared, number)
        except CallFailed as failure:
            if isinstance(failure.error, Draining):
                worker.refuse_more()
            raise AttemptFailed(failure.error, worker, died=failure.died) from failure
        finally:
            reservation.end()
        self._timeline.merge(embedded.moments)
        return embedded

    async def _limits(self) -> Limits:
        limits = await self._services.fleet.wait_for_worker(lambda: Limits.of(self._workers()), self._patience_s)
        if limits is None:
            raise self._no_worker()
        return limits

    async def _place(self, request: GenerationRequest, attempt: int, blamed: frozenset[WorkerKey]) -> RoutingDecision:
        def look() -> RoutingDecision | None:
            return self._services.selector.place(
                self._request_id,
                attempt,
                tenant=self._request.client.tenant,
                num_tokens=len(request.prompt_token_ids),
                max_tokens=0,
                hashes=lambda layout: self._known_hashes(request, layout),
                blamed=blamed | self._full.keys,
                dead=self._crash_guard.unfit,
                pooling=self._pooling,
                adapter=(request.lora_name, request.lora_fingerprint),
            )

        while (decision := await self._services.fleet.wait_for_worker(look, self._patience_s)) is None:
            if self._crash_guard.unfit == self._crash_guard.workers:
                raise self._no_worker()
        return decision

    async def _raise_when_no_worker(self) -> None:
        """Runs while the request waits for a place. Never returns. Raises: WorkerLost when no worker could serve it."""
        await self._services.fleet.wait_until_absent(
            lambda: self._services.selector.has_workers(pooling=self._pooling), self._patience_s
        )
        raise self._no_worker()

    def _known_hashes(self, request: GenerationRequest, layout: KvLayout) -> list[bytes]:
        """Block hashes that may be served from cache; none for mean pooling, which needs every hidden state."""
        pooling = request.pooling_params
        return [] if pooling and not pooling.reads_prefix_cache else self._hashed(request, layout).placement_hashes

    def _hashed(self, request: GenerationRequest, layout: KvLayout) -> HashedRequest:
        key = (layout.model_fingerprint, layout.block_size)
        if key not in self._prepared:
            self._prepared[key] = self._services.preparation.hashed(request, self._request.cache, layout)
        return self._prepared[key]

    def _workers(self) -> list[Worker]:
        return pooling_workers(self._services.fleet.workers(WorkerRole.PREFILL), self._pooling)

    @property
    def _pooling(self) -> PoolingParams:
        return self._request.pooling_params or PoolingParams()

    @property
    def _patience_s(self) -> float:
        """How long to wait for a worker, seconds: 0 in a fleet without prefill workers."""
        return WAIT_FOR_WORKER_S if self._services.fleet.counts()[WorkerRole.PREFILL.value]["addresses"] else 0.0

    def _num_blocks(self, num_tokens: int) -> int:
        return max((worker.num_prompt_blocks(num_tokens) for worker in self._workers()), default=0)

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request was not done within {self._input.timeout_s:g} s")

    def _no_worker(self) -> WorkerLost:
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
        admission: RequestAdmission,
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
        await self._enter()
        try:
            yield await self._computed()
        finally:
            self._leave()

    async def _computed(self) -> list[array[float]]:
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
            await asyncio.gather(*tasks, return_exceptions=True)

    def cancel(self, error: PdServeError | None = None) -> None:
        """End all runs, and their calls with them; `results` raises `error`."""
        if self._error is not None or (self._all is not None and self._all.done()):
            return
        self._error = error or Cancelled("the client left")
        self._record.abort(self._error)
        if self._all is not None:
            self._all.cancel()
