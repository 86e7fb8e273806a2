"""`RoleSwitching`: has a worker take the other role where the load has moved from prompts to answers, or back.

Two numbers describe a fleet's load:

    queue      prompt tokens that all workers have to compute, over the rates of the prefill workers together; seconds
    occupancy  of decode: the sequences that it decodes over `max_num_seqs`, or their blocks over the pools, the larger

What a decode worker prefills itself counts for the queue. Sequences that wait for blocks of prefill workers, and what they have
reserved, do not count for the occupancy, unless the pool is full.

A decode worker takes the prefill role while the queue is long and the other decode workers would still have room, and a prefill
worker the decode role while decode is full and the others' queue would still be short. Between the two pairs of limits nothing
changes, so that one change is never the cause of the next.

Each router decides by itself. That is safe since no router changes the first live worker of a role, by its id; since each waits
for `role_dwell_s` after a change that it has seen; and since a worker refuses a second change within that time. Nothing is decided
while workers of different layouts are in service, as during an upgrade.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from pdserve.common import clock
from pdserve.common.errors import InvalidRequest, PdServeError
from pdserve.common.kv_events import WorkerKey
from pdserve.common.net.service_channel import ServiceChannel
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.workers.watch import set_role
from pdserve.router.workers.worker import RemoteWorker

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
SUSTAINED_S = 1.5
"""Seconds for which the reason must hold: longer than the time between two reports of a worker's load."""
LONG_QUEUE_S = 1.0
SHORT_QUEUE_S = 0.25
FULL = 0.8
"""Occupancy of decode from which on it gets another worker."""
ROOM = 0.6
"""Occupancy up to which decode can do with one worker less."""
CHANGE_OUTCOMES = ("done", "refused", "failed")
"""The worker has the role; it can never take it; or not now, or it did not answer."""


class RoleChange(NamedTuple):
    """A worker that should take a role."""

    worker: RemoteWorker
    role: WorkerRole
    why: str
    """For the log."""


class RoleSwitching:
    """One router's. `run` it."""

    def __init__(
        self,
        workers: Callable[[WorkerRole], Sequence[RemoteWorker]],
        dwell_s: float,
        ask: Callable[[ServiceChannel, WorkerRole, float], Awaitable[None]] = set_role,
        *,
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """workers: returns the live ones of a role. dwell_s: `role_dwell_s`."""
        self._workers = workers
        self._dwell_s = dwell_s
        self._set_role = ask
        self._clock = clock
        self._asked_at = -math.inf
        self._wanted: tuple[WorkerRole, float] | None = None
        """The role that lacks a worker, and since when."""
        self._unable: set[WorkerKey] = set()
        """Workers that have refused the other role for good."""
        self.num_changes: Counter[tuple[str, str]] = Counter()
        """(role, outcome) -> changes that this router has asked for."""

    async def run(self) -> None:
        """Look for changes until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if (change := self.due()) is not None:
                await self._ask(change)

    def due(self) -> RoleChange | None:
        """The change to ask for now."""
        now_s = self._clock()
        prefill, decode = self._workers(WorkerRole.PREFILL), self._workers(WorkerRole.DECODE)
        both = [*prefill, *decode]
        self._unable &= {worker.key for worker in both}
        changed_at = max((worker.role_changed_at for worker in both), default=-math.inf)
        if now_s - max(changed_at, self._asked_at) < self._dwell_s:
            self._wanted = None
            return None
        change = self.find(prefill, decode)
        if change is None:
            self._wanted = None
            return None
        if self._wanted is None or self._wanted[0] is not change.role:
            self._wanted = change.role, now_s
        return change if now_s - self._wanted[1] >= SUSTAINED_S else None

    def find(self, prefill: Sequence[RemoteWorker], decode: Sequence[RemoteWorker]) -> RoleChange | None:
        """The change that the load of these workers, all live, calls for."""
        queue_s, occupancy = queue_of(prefill, decode), occupancy_of(decode)
        if queue_s is None or not prefill or not decode:
            return None
        first = decode[0].identity.layout
        if any(worker.identity.layout.differences(first) for worker in (*prefill, *decode)):
            return None
        why = f"prefill has a queue of {queue_s:.2f} s, and decode is full to {occupancy:.0%}"
        if queue_s >= LONG_QUEUE_S and _with_one_less(occupancy, decode) <= ROOM:
            role, worker = WorkerRole.PREFILL, self._one_of(decode)
        elif occupancy >= FULL and _with_one_less(queue_s, prefill) <= SHORT_QUEUE_S:
            role, worker = WorkerRole.DECODE, self._one_of(prefill)
        else:
            return None
        return None if worker is None else RoleChange(worker, role, why)

    def _one_of(self, workers: Sequence[RemoteWorker]) -> RemoteWorker | None:
        """The one with least to lose, but never the first."""
        first = min(worker.key for worker in workers)
        able = [worker for worker in workers if worker.key != first and worker.key not in self._unable]
        return min(able, key=_loss, default=None)

    async def _ask(self, change: RoleChange) -> None:
        self._asked_at, self._wanted = self._clock(), None
        outcome = "done"
        try:
            await self._set_role(change.worker.channel, change.role, self._dwell_s)
        except InvalidRequest as error:
            outcome, self._asked_at = "refused", -math.inf
            self._unable.add(change.worker.key)
            log.warning("worker %s does not take the role %s: %s", change.worker, change.role.value, error.message)
        except PdServeError as error:
            outcome = "failed"
            log.info("worker %s does not take the role %s now: %s", change.worker, change.role.value, error.message)
        else:
            log.info("worker %s takes the role %s: %s", change.worker, change.role.value, change.why)
        self.num_changes[change.role.value, outcome] += 1


def _loss(worker: RemoteWorker) -> tuple[object, ...]:
    """What a change costs, in the order of importance: sessions cannot move."""
    return worker.load.num_sessions, worker.num_requests, worker.waiting_tokens, worker.key


def _with_one_less(load: float, workers: Sequence[RemoteWorker]) -> float:
    """The load of the others if one of the workers leaves."""
    return load * len(workers) / (len(workers) - 1) if len(workers) > 1 else math.inf


def queue_of(prefill: Sequence[RemoteWorker], decode: Sequence[RemoteWorker] = ()) -> float | None:
    """Seconds in which the prefill workers could compute all prompt tokens that wait; None while no rate is known."""
    num_tokens = sum(worker.waiting_tokens for worker in (*prefill, *decode))
    tokens_per_s = sum(worker.prefill_tokens_per_s for worker in prefill)
    if not num_tokens:
        return 0.0
    return num_tokens / tokens_per_s if tokens_per_s > 0 else None


def occupancy_of(decode: Sequence[RemoteWorker]) -> float:
    """The part of these workers that the sequences take which they decode, by their last reports."""
    if not decode:
        return 0.0
    most = sum(worker.identity.max_num_seqs for worker in decode)
    return max(sum(map(_num_decoded, decode)) / most, sum(map(_used, decode)) / len(decode))


def _num_decoded(worker: RemoteWorker) -> int:
    """Sequences that it decodes, and those that wait only for a place among them."""
    load = worker.load
    return load.num_running + (load.num_waiting if load.num_running >= worker.identity.max_num_seqs else 0)


def _used(worker: RemoteWorker) -> float:
    """The part of its pool that the sequences have which it decodes; all that is in use where the pool is full."""
    load, used = worker.load, worker.held_blocks / worker.num_blocks
    if used >= FULL or not load.num_remote_kv:
        return used
    return used * load.num_running / (load.num_running + load.num_remote_kv)
