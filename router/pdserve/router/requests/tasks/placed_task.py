"""`PlacedTask`: one prompt of a client's request: placed on workers, and attempted until one serves it.

Its life: `served` runs `serve` within the client's deadline, which tokenizes, waits for a place in `Admission` and calls
`until_served`. That places the request, runs an `attempt`, and starts again after a failure that another worker may not have.
A `PromptTask` generates, an `EmbeddingTask` pools.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from pdserve.common import timeline as moments
from pdserve.common.errors import (
    AdapterUnavailable,
    DeadlineExceeded,
    Evicted,
    InternalError,
    PdServeError,
    WorkerLost,
)
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.timeline import Timeline, now_unix_ns
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.admission.place import Place
from pdserve.router.attempts.attempt_failure import AttemptFailed, FullWorkers, PrefillNeeded, backoff_s
from pdserve.router.attempts.crash_guard import CrashGuard
from pdserve.router.attempts.migration import Migrated, MigrationSource
from pdserve.router.placement.placement import Placement, PlacementHint
from pdserve.router.placement.routing_decision import RoutingDecision
from pdserve.router.requests.client_error import as_client_sees
from pdserve.router.requests.preparation import ClientRequest, HashedRequest, ServedLimits
from pdserve.router.requests.request_services import RequestServices
from pdserve.router.requests.tasks.retry_state import RetryState
from pdserve.router.requests.usage import Usage
from pdserve.router.telemetry.request_trace import PromptTrace
from pdserve.router.workers.worker import RemoteWorker
from pdserve.text.outputs.output_processor import PositionConflict

log = logging.getLogger(__name__)

WAIT_FOR_WORKER_S = 5.0
"""Seconds for which a request waits for a worker that may serve it, if none is being started (`Fleet.wait_for_worker`)."""
MAX_EVICTIONS = 16
"""Evictions and failed moves of one request that do not count as failed attempts: each let other sequences continue, or was this
router's choice."""
T = TypeVar("T")


class PlacedTask(ABC, Generic[T]):
    """`served` once. T: the result."""

    roles: tuple[WorkerRole, ...] = tuple(WorkerRole)
    """Roles of the workers that may serve it."""

    def __init__(
        self,
        request_id: str,
        request: ClientRequest,
        services: RequestServices,
        record: PromptTrace,
        timeline: Timeline,
        usage: Usage,
    ) -> None:
        self.request_id = request_id
        self.usage = usage
        self.timeline = timeline
        self._request = request
        self._services = services
        self._record = record
        record.priority, record.service_tier = request.priority, request.service_tier
        self._holds: Place | None = None
        self._prepared: dict[tuple[str, int, int, int], HashedRequest] = {}
        """(layout, sequence, length of the client's output) -> hashed request."""
        self._numbers = itertools.count()
        """Numbers of attempts."""
        self._crash_guard = CrashGuard(
            services.deny_list, services.fleet, services.company, request.client, request.sampling_params
        )
        self._full = FullWorkers(services.settings.limits.queue_timeout_s)

    @abstractmethod
    async def serve(self) -> T:
        """Prepare the request, wait for its place, and serve it. Raises: PdServeError."""

    @abstractmethod
    async def attempt(
        self, number: int, prepared: GenerationRequest, placement: Placement, source: MigrationSource | None
    ) -> None:
        """Serve the request, or what is left of it, on these workers. source: `placement.source`'s call. Raises: AttemptFailed,
        PrefillNeeded, Migrated."""

    @abstractmethod
    def no_worker(self) -> WorkerLost:
        """The error of a request that no worker could serve."""

    @property
    def request(self) -> ClientRequest:
        """What the client asked, as it runs."""
        return self._request

    @property
    def timeout_s(self) -> float:
        """The client's deadline, seconds from the start of the request."""
        return self._request.timeout_s

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the client has, after which the next attempt continues."""
        return 0

    @property
    def patience_s(self) -> float:
        """Seconds for which it waits for a worker that may serve it."""
        return WAIT_FOR_WORKER_S

    async def served(self) -> T:
        """The result. Raises: PdServeError as the client sees it, whatever failed but for cancellation."""
        try:
            async with asyncio.timeout(self._request.timeout_s) as deadline:
                self._record.deadline = deadline
                return await self.serve()
        except TimeoutError:
            expired = deadline.expired()
            error: PdServeError = self.too_late() if expired else InternalError("something timed out in the router")
        except PdServeError as failed:
            error = self._in_the_clients_words(failed)
        except Exception:
            log.exception("request %s failed in the router", self.request_id)
            error = InternalError("internal error; the router's log has the details")
        self._record.error = error
        raise as_client_sees(error, self.request_id)

    def _in_the_clients_words(self, error: PdServeError) -> PdServeError:
        """The error with the client's name of the field."""
        return error

    async def until_served(self, request: GenerationRequest, retry_state: RetryState) -> None:
        """Run attempts until one serves the request. Raises: PdServeError."""
        try:
            await self._until_served(request, retry_state)
        finally:
            retry_state.end_migration()

    async def _until_served(self, request: GenerationRequest, retry_state: RetryState) -> None:
        while True:
            started_unix_ns = now_unix_ns()
            number = next(self._numbers)
            resumed, decision = self._resumed(request, retry_state), None
            if retry_state.source is not None and (decision := self._look(resumed, number, retry_state)) is None:
                retry_state.end_migration()
                resumed = self._resumed(request, retry_state)
            if decision is None:
                decision = await self.place(resumed, number, retry_state)
            placement = decision.placement
            self.timeline.mark(moments.PLACED)
            self._record.routed(started_unix_ns, decision.policy, placement, decision.attributes)
            hashed = self.hashed(request, placement.layout)
            prompt_digest = hashed.request.request_digest
            self._record.hashed(hashed.placement_hashes, placement.layout.block_size)
            self._services.deny_list.check(self._request.client, prompt_digest)
            prepared = self.hashed(resumed, placement.layout).request
            if not prepared.remaining_s:
                # workers refuse a request without time
                raise self.too_late()
            record = self._record.attempt(number, placement, len(resumed.output_token_ids))
            if self._holds is not None:
                self._holds.placed()
            is_sampled = not request.sampling_params.greedy
            if is_sampled and len(placement.sampler_versions | retry_state.sampler_versions) > 1:
                self._record.sampled_by_other()
            num_tokens = self.num_output_tokens
            try:
                with record, self._services.company.serving(self._crash_guard, placement):
                    await self.attempt(number, record.with_trace_headers(prepared), placement, retry_state.source)
                return
            except Migrated as migrated:
                retry_state.end_migration()
                if is_sampled:
                    retry_state.sampler_version = placement.sampler_version
                if await self._go_on_migrated(request, retry_state, migrated):
                    return
                continue
            except PrefillNeeded as needed:
                retry_state.hint, retry_state.blamed = PlacementHint.REMOTE, frozenset()
                retry_state.num_uncounted += 1
                if retry_state.num_uncounted <= self._services.settings.limits.max_attempts:
                    continue
                failure = AttemptFailed(WorkerLost(f"decode asks for prefill again and again: {needed}"))
            except AttemptFailed as failed:
                failure = failed
            has_not_moved = retry_state.source is not None and failure.in_transfer
            retry_state.end_migration()
            if self.num_output_tokens > num_tokens and is_sampled:
                retry_state.sampler_version = placement.sampler_version
            if (full := failure.refused_by) is not None:
                await self._full.refused(full, failure.error)
                continue
            is_uncounted = has_not_moved or isinstance(failure.error, Evicted)
            if is_uncounted and retry_state.num_evictions < MAX_EVICTIONS:
                retry_state.num_evictions += 1
            else:
                retry_state.num_counted += 1
            told = self.request_id, number, self.num_output_tokens, failure
            log.info("request %s: attempt %d failed after %d tokens: %s", *told)
            retry_state.hint = self._after(failure, prompt_digest, retry_state.num_counted, has_not_moved)
            retry_state.blamed = frozenset() if failure.blamed is None else frozenset((failure.blamed.key,))
            if resumed is request and not self.num_output_tokens and isinstance(failure.error, AdapterUnavailable):
                refused_by, self._prepared = retry_state.blamed, {}
                request = await self._services.models.after_refusal(request, refused_by, self.patience_s, self.roles)
            await asyncio.sleep(backoff_s(retry_state.num_counted + retry_state.num_evictions))
            if await self._go_on_apart(request, retry_state):
                return

    def _resumed(self, request: GenerationRequest, retry_state: RetryState) -> GenerationRequest:
        """The next attempt's request."""
        return request

    async def _go_on_migrated(self, request: GenerationRequest, retry_state: RetryState, migrated: Migrated) -> bool:
        """Continue sequences at another worker: in attempts of their own; False to continue the only one in the next attempt."""
        raise InternalError("a request without sequences has migrated")

    async def _go_on_apart(self, request: GenerationRequest, retry_state: RetryState) -> bool:
        """After a failed attempt, serve the sequences of the request in attempts of their own; False if they need none."""
        return False

    def _after(
        self, failure: AttemptFailed, prompt_digest: bytes, num_counted: int, has_not_moved: bool
    ) -> PlacementHint:
        """Parameters of the next attempt. has_not_moved: what failed is the move of a sequence.

        Raises: the failure's error when there is no next attempt.
        """
        error = failure.error
        self._crash_guard.count(failure, prompt_digest)
        if (
            not error.retryable
            or isinstance(error, PositionConflict)
            or num_counted >= self._services.settings.limits.max_attempts
        ):
            raise error
        if failure.in_transfer and not has_not_moved:
            if (answer := self._services.settings.on_kv_failure) == "fail":
                raise error
            return PlacementHint(answer)
        return PlacementHint.REMOTE if isinstance(error, Evicted) else PlacementHint.ANY

    async def place(self, request: GenerationRequest, attempt: int, retry_state: RetryState) -> RoutingDecision:
        """Workers for an attempt, as soon as there are some. Raises: WorkerLost."""
        look = functools.partial(self._look, request, attempt, retry_state)
        while (decision := await self._services.fleet.wait_for_worker(look, self.patience_s)) is None:
            if self._crash_guard.unfit == self._crash_guard.workers:
                raise self.no_worker()
        return decision

    def _look(
        self, request: GenerationRequest, attempt: int, retry_state: RetryState, leaving: RemoteWorker | None = None
    ) -> RoutingDecision | None:
        """Workers for an attempt. leaving: the one from which the request is to move, later."""
        source = retry_state.source
        return self._services.selector.place(
            self.request_id,
            attempt,
            tenant=self._request.client.tenant,
            hint=retry_state.hint,
            blamed=retry_state.blamed | self._full.keys,
            dead=self._crash_guard.unfit,
            sampler_version=retry_state.sampler_version,
            source=leaving if source is None else source.worker,
            receiver=None if source is None else source.receiver,
            is_plan=leaving is not None,
            adapter=(request.lora_name, request.lora_fingerprint),
            **self._wanted(request),
        )

    @abstractmethod
    def _wanted(self, request: GenerationRequest) -> dict[str, Any]:
        """Arguments of `WorkerSelector.place` that say what the workers will compute."""

    def workers(self) -> list[RemoteWorker]:
        """The live ones that may serve it."""
        return [worker for role in self.roles for worker in self._services.fleet.workers(role)]

    async def limits(self) -> ServedLimits:
        """Raises: WorkerLost when no worker is known in time."""
        limits = await self._services.fleet.wait_for_worker(lambda: ServedLimits.of(self.workers()), self.patience_s)
        if limits is None:
            raise self.no_worker()
        return limits

    def too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request was not done within {self.timeout_s:g} s")

    def hashed(self, request: GenerationRequest, layout: KvLayout) -> HashedRequest:
        """For blocks of this layout; generations of a model differ in them."""
        place = (request.index, len(request.output_token_ids)) if request.is_resumed else (-1, 0)
        key = (layout.model_fingerprint, layout.block_size, *place)
        if key not in self._prepared:
            # a beam search hashes as many requests per step as it has beams
            prompt = self._prepared.get((*key[:2], -1, 0))
            # a sequence that moves often would leave one for each of its lengths
            self._prepared = {known: kept for known, kept in self._prepared.items() if known[:3] != key[:3]}
            self._prepared[key] = self._services.preparation.hashed(request, self._request.cache, layout, prompt)
        return self._prepared[key]
