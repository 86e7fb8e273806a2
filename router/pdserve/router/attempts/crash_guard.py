"""`CrashGuard`: refuses prompts that crash workers for a while, so that one of them cannot take down a fleet.

A worker's death says little about each of the many requests that it served, so it is divided among them. Requests with two
deaths continue apart from each other, one per worker, and only a prompt with enough evidence is refused, only to the client that
sent it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdserve.common.errors import WorkerLost
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.router.attempts.attempt_failure import AttemptFailed
from pdserve.router.placement.placement import Placement, WorkerKey
from pdserve.router.tenants.client import Client
from pdserve.router.workers.fleet import Fleet
from pdserve.router.workers.worker import Worker

REFUSED_S = 60.0
DEATHS = 2
"""Workers that must have died under one request after they had admitted it."""
DEATHS_IN_ALL = 3
"""Or workers that died under it, whether they had admitted it or not."""
SUSPICION = 1.5
"""Least sum of the request's shares in these deaths: two alone, or one alone and one with one other request."""
LATELY_S = 1.0
"""Requests that left a worker no longer ago than this may have left because it died."""
_MAX_ENTRIES = 4096

Name = tuple[str, str, bytes]
"""Tenant, name of the API key, and digest of the prompt."""


class DenyList:
    """Refused prompts: name -> (`time.monotonic()` until which it is refused, callable that returns whether the reason holds)."""

    def __init__(self) -> None:
        self._entries: dict[Name, tuple[float, Callable[[], bool]]] = {}

    def add(self, client: Client, request_digest: bytes, holds: Callable[[], bool]) -> None:
        """Refuse it to this client. holds: called each time that the client asks the same again; False ends it early."""
        if len(self._entries) >= _MAX_ENTRIES:
            self._entries.pop(next(iter(self._entries)))
        self._entries[_name(client, request_digest)] = time.monotonic() + REFUSED_S, holds

    def check(self, client: Client, request_digest: bytes) -> None:
        """Raises: WorkerLost for a prompt that is refused to this client."""
        name = _name(client, request_digest)
        if name not in self._entries:
            return
        until, holds = self._entries[name]
        left = until - time.monotonic()
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
    """Which of this router's requests are at each worker, or were recently."""

    def __init__(self) -> None:
        self._stays: dict[WorkerKey, list[_Stay]] = {}
        self.on_left: Callable[[], None] = lambda: None
        """Called when an attempt has ended that had its workers apart from other suspects."""

    @contextmanager
    def serving(self, request: CrashGuard, placement: Placement) -> Iterator[None]:
        """Around an attempt."""
        stay = _Stay(request, request.goes_apart)
        keys = [worker.key for worker in (placement.prefill, placement.decode) if worker is not None]
        if self._stays:
            # the entry used longest ago: nothing else would ever remove that of a worker that has died
            self._forget(next(iter(self._stays)))
        for key in keys:
            self._forget(key)
            self._stays.setdefault(key, []).append(stay)
        try:
            yield
        finally:
            stay.left_at = time.monotonic()
            if stay.is_apart:
                self.on_left()

    def _forget(self, key: WorkerKey) -> None:
        """Drop attempts that left the worker longer than `LATELY_S` ago."""
        since = time.monotonic() - LATELY_S
        stays = [stay for stay in self._stays.pop(key, []) if stay.left_at is None or stay.left_at >= since]
        if stays:
            self._stays[key] = stays

    def lately_at(self, key: WorkerKey) -> tuple[int, int]:
        """Requests that are at a worker or were recently: all, and those with work that may stop an engine by itself."""
        self._forget(key)
        requests = {stay.request for stay in self._stays.get(key, [])}
        return len(requests), sum(request.is_costly for request in requests)

    def taken(self, request: CrashGuard) -> set[WorkerKey]:
        """Workers at which a suspect other than this request is apart from the others."""
        return {
            key
            for key, stays in self._stays.items()
            if any(stay.is_apart and stay.left_at is None and stay.request is not request for stay in stays)
        }


@dataclass(frozen=True, slots=True)
class _Death:
    """One worker's, as far as it concerns one request."""

    worker: Worker
    share: float
    """The request's share in the death: 1 if it was alone at the worker."""
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
        """Workers that the next attempt must not use: those, and for a suspect those where another one is."""
        return self.workers | (self._company.taken(self) if self.goes_apart else set())

    @property
    def goes_apart(self) -> bool:
        """True once `DEATHS` workers that had admitted it have died under it: its next attempts are apart from other suspects."""
        return sum(death.was_admitted for death in self._dead) >= DEATHS

    def count(self, failure: AttemptFailed, prompt_digest: bytes) -> None:
        """An attempt has failed. Raises: WorkerLost when the deaths under the prompt point to it; it is refused."""
        if not failure.died or failure.blamed is None:
            return
        self._deaths[failure.blamed.key] = self._death(failure.blamed, was_admitted=not failure.never_admitted)
        if self._is_to_be_denied():
            self._deny_list.add(self._client, prompt_digest, self._is_to_be_denied)
            text = f"{len(self._dead)} workers died while they served this request"
            raise WorkerLost(text).for_clients() from failure

    def _death(self, worker: Worker, *, was_admitted: bool) -> _Death:
        num_requests, num_costly = self._company.lately_at(worker.key)
        load = worker.load
        num_requests = max(1, num_requests, load.num_running + load.num_waiting + load.num_remote_kv)
        share = 1 / num_requests
        if self.goes_apart and was_admitted:
            share = SUSPICION  # of all suspects it alone was there
        elif worker.stalled and num_costly:
            share = 1 / num_costly if self.is_costly else 0.0
        return _Death(worker, share, was_admitted, outlives_return=worker.stalled and self.is_costly)

    @property
    def _dead(self) -> list[_Death]:
        """Deaths that count."""
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
