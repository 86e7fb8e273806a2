"""`CrashGuard`: temporarily refuses prompts that crash workers, so that one prompt cannot end a whole fleet.

A worker's death is weak evidence against each of the requests that it served, so it is divided among them. Requests with two deaths
are isolated: they run on different workers. A prompt with enough evidence is refused, and only to the client that sent it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdserve.common import clock
from pdserve.common.errors import WorkerLost
from pdserve.common.kv_events import WorkerKey
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.router.attempts.attempt_failure import AttemptFailed
from pdserve.router.placement.placement import Placement
from pdserve.router.tenants.client import Client
from pdserve.router.workers.fleet import Fleet
from pdserve.router.workers.worker import RemoteWorker

REFUSED_S = 60.0
DEATHS = 2
"""Number of workers that died while they served the request, at which it is suspect."""
DEATHS_IN_ALL = 3
"""The same number including workers that had not admitted it."""
SUSPICION = 1.5
"""Least sum of the request's shares in these deaths for a refusal: for example 1 (no other request) and 1/2 (one other request)."""
LATELY_S = 1.0
"""Seconds. Requests that left a worker within this time before its death may have left because of it."""
_MAX_ENTRIES = 4096

Name = tuple[str, str, bytes]
"""Tenant, name of the API key, and digest of the prompt."""


class DenyList:
    """Refused prompts: name -> (`clock.monotonic()` until which it is refused, callable that returns whether the reason holds)."""

    def __init__(self) -> None:
        self._entries: dict[Name, tuple[float, Callable[[], bool]]] = {}

    def add(self, client: Client, request_digest: bytes, holds: Callable[[], bool]) -> None:
        """Refuse a prompt to this client. holds: called at each repetition; False ends the refusal early."""
        if len(self._entries) >= _MAX_ENTRIES:
            self._entries.pop(next(iter(self._entries)))
        self._entries[_name(client, request_digest)] = clock.monotonic() + REFUSED_S, holds

    def check(self, client: Client, request_digest: bytes) -> None:
        """Raises: WorkerLost if the prompt is refused to this client."""
        name = _name(client, request_digest)
        if name not in self._entries:
            return
        until, holds = self._entries[name]
        left = until - clock.monotonic()
        if left <= 0 or not holds():
            del self._entries[name]
            return
        text = f"workers died while they served this prompt; it is refused for another {left:.0f} s"
        raise WorkerLost(text).for_clients()


def _name(client: Client, request_digest: bytes) -> Name:
    return client.tenant, client.key_name, request_digest


@dataclass(eq=False, slots=True)
class _Stay:
    """An attempt at a worker."""

    request: CrashGuard
    is_apart: bool
    left_at: float | None = None


class Company:
    """This router's requests per worker, now and in the last `LATELY_S`."""

    def __init__(self) -> None:
        self._stays: dict[WorkerKey, list[_Stay]] = {}
        self.on_left: Callable[[], None] = lambda: None
        """Called after an attempt of an isolated suspect has ended."""

    @contextmanager
    def serving(self, request: CrashGuard, placement: Placement) -> Iterator[None]:
        """Record an attempt at its workers while the context is open."""
        stay = _Stay(request, request.goes_apart)
        keys = [worker.key for worker in (placement.prefill, placement.decode) if worker is not None]
        if self._stays:
            # drop the least recently used entry; nothing else would remove the entry of a dead worker
            self._forget(next(iter(self._stays)))
        for key in keys:
            self._forget(key)
            self._stays.setdefault(key, []).append(stay)
        try:
            yield
        finally:
            stay.left_at = clock.monotonic()
            if stay.is_apart:
                self.on_left()

    def _forget(self, key: WorkerKey) -> None:
        """Drop attempts that left the worker longer than `LATELY_S` ago."""
        since = clock.monotonic() - LATELY_S
        stays = [stay for stay in self._stays.pop(key, []) if stay.left_at is None or stay.left_at >= since]
        if stays:
            self._stays[key] = stays

    def lately_at(self, key: WorkerKey) -> tuple[int, int]:
        """Current and recent requests at a worker: (all, those whose grammar or plug-ins may stop an engine)."""
        self._forget(key)
        requests = {stay.request for stay in self._stays.get(key, [])}
        return len(requests), sum(request.is_costly for request in requests)

    def taken(self, request: CrashGuard) -> set[WorkerKey]:
        """Workers with an isolated suspect other than this request."""
        return {
            key
            for key, stays in self._stays.items()
            if any(stay.is_apart and stay.left_at is None and stay.request is not request for stay in stays)
        }


@dataclass(frozen=True, slots=True)
class _Death:
    """The death of a worker under one request."""

    worker: RemoteWorker
    share: float
    """The request's share in the death: 1 if it was the worker's only request."""
    was_admitted: bool
    outlives_return: bool
    """True: counts although the worker reconnects, because its engine stalled and the request had work that may cause that."""


class CrashGuard:
    """Counts the workers that died under one request.

    A worker that had not admitted the request counts less: when several workers stop at once, a request may be sent to one of them
    before its death is known. A worker that reconnects in the same epoch had not died: its connection had broken, or its engine had
    stalled. A stall counts only against requests with a grammar or plug-ins, if there are any.
    """

    def __init__(
        self,
        deny_list: DenyList,
        fleet: Fleet,
        company: Company,
        client: Client,
        sampling: SamplingParams | None = None,
    ) -> None:
        self._deny_list = deny_list
        self._fleet = fleet
        self._company = company
        self._client = client
        self.is_costly = sampling is not None and bool(sampling.structured_outputs or sampling.logits_processors)
        self._deaths: dict[WorkerKey, _Death] = {}

    @property
    def workers(self) -> set[WorkerKey]:
        """Dead workers that have not reconnected."""
        return {key for key, death in self._deaths.items() if not self._fleet.reconnected(death.worker)}

    @property
    def unfit(self) -> set[WorkerKey]:
        """Workers that the next attempt must not use: dead ones, and for a suspect those with another suspect."""
        return self.workers | (self._company.taken(self) if self.goes_apart else set())

    @property
    def goes_apart(self) -> bool:
        """True if the request is suspect, after `DEATHS` deaths of workers that had admitted it; its attempts are then isolated."""
        return sum(death.was_admitted for death in self._dead) >= DEATHS

    def count(self, failure: AttemptFailed, prompt_digest: bytes) -> None:
        """Count a failed attempt. Raises: WorkerLost, and refuses the prompt, if there is enough evidence against it."""
        if not failure.died or failure.blamed is None:
            return
        self._deaths[failure.blamed.key] = self._death(failure.blamed, was_admitted=not failure.never_admitted)
        if self._is_to_be_denied():
            self._deny_list.add(self._client, prompt_digest, self._is_to_be_denied)
            text = f"{len(self._dead)} workers died while they served this request"
            raise WorkerLost(text).for_clients() from failure

    def _death(self, worker: RemoteWorker, *, was_admitted: bool) -> _Death:
        num_requests, num_costly = self._company.lately_at(worker.key)
        load = worker.load
        num_requests = max(1, num_requests, load.num_running + load.num_waiting + load.num_remote_kv)
        share = 1 / num_requests
        if self.goes_apart and was_admitted:
            share = SUSPICION  # it was the only suspect there
        elif worker.stalled and num_costly:
            share = 1 / num_costly if self.is_costly else 0.0
        return _Death(worker, share, was_admitted, outlives_return=worker.stalled and self.is_costly)

    @property
    def _dead(self) -> list[_Death]:
        """The deaths that still count."""
        return [
            death
            for death in self._deaths.values()
            if death.outlives_return or not self._fleet.reconnected(death.worker)
        ]

    def _is_to_be_denied(self) -> bool:
        dead = self._dead
        num_admitted = sum(death.was_admitted for death in dead)
        enough = num_admitted >= DEATHS or len(dead) >= DEATHS_IN_ALL
        return enough and sum(death.share for death in dead) >= SUSPICION
