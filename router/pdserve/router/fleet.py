"""The workers that this router knows, from the addresses it was given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pdserve.common.errors import PdServeError
from pdserve.common.held_blocks import HeldBlocks
from pdserve.router.watch import introduce
from pdserve.router.watched_address import TICK_STILL_S, Expected, WatchedAddress
from pdserve.router.worker import Worker, WorkerRole, WorkerState

log = logging.getLogger(__name__)

_CHECK_TICKS_S = 0.25
T = TypeVar("T")


class Fleet:
    """Watches every address, in whatever order they start; use as an async context."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], expected: Expected, held: HeldBlocks | None = None
    ) -> None:
        """held: is told which blocks the workers hold."""
        self._watched = [
            WatchedAddress(address, role, expected, self._on_change, held)
            for role, addresses in ((WorkerRole.PREFILL, prefill), (WorkerRole.DECODE, decode))
            for address in dict.fromkeys(addresses)
        ]
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._met: set[tuple[str, int]] = set()
        self._compared: set[frozenset[tuple[str, int]]] = set()
        self.listeners: list[Callable[[], None]] = []
        """Called after every change."""

    async def __aenter__(self) -> Fleet:
        for watched in self._watched:
            self._spawn(watched.keep())
        self._spawn(self._check_ticks())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def workers(self, role: WorkerRole) -> list[Worker]:
        """Those that may be given work, in the order of their addresses."""
        return [
            watched.worker
            for watched in self._watched
            if watched.role is role and watched.worker is not None and watched.worker.state is WorkerState.LIVE
        ]

    def counts(self) -> dict[str, dict[str, int]]:
        """role -> how many addresses are configured, live, draining, refused."""
        return {role.value: self._count([w for w in self._watched if w.role is role]) for role in WorkerRole}

    def describe(self, role: WorkerRole) -> str:
        """For messages: how the addresses of a role stand."""
        count = self.counts()[role.value]
        if not count["addresses"]:
            return f"no {role.value} address was given"
        return (
            f"of {count['addresses']} {role.value} address(es) {count['live']} live, "
            f"{count['draining']} draining, {count['refused']} refused"
        )

    async def wait_for(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """What `look` returns, as soon as that is not None; it is asked now and after every change. None: timed out."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while (found := look()) is None:
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                async with asyncio.timeout_at(until):
                    await waiter
            except TimeoutError:
                return look()
            finally:
                self._waiters.discard(waiter)
        return found

    @staticmethod
    def _count(watched: Sequence[WatchedAddress]) -> dict[str, int]:
        states = [address.worker.state for address in watched if address.worker is not None]
        return {
            "addresses": len(watched),
            "live": states.count(WorkerState.LIVE),
            "draining": states.count(WorkerState.DRAINING),
            "refused": sum(address.refused is not None for address in watched),
        }

    def _on_change(self, watched: WatchedAddress) -> None:
        worker = watched.worker
        if worker is not None and worker.state is WorkerState.LIVE and worker.key not in self._met:
            self._met.add(worker.key)
            self._introduce(worker)
        if worker is None:
            alive = {address.worker.key for address in self._watched if address.worker is not None}
            self._met &= alive
            self._compared = {pair for pair in self._compared if pair <= alive}
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        for listener in self.listeners:
            listener()

    def _introduce(self, worker: Worker) -> None:
        role = worker.identity.role
        if role is None:
            return
        for peer in self.workers(role.other):
            if self._can_pair(worker, peer):
                self._spawn(self._meet(worker, peer))
                self._spawn(self._meet(peer, worker))

    def _can_pair(self, worker: Worker, peer: Worker) -> bool:
        differences = worker.identity.layout.differences(peer.identity.layout)
        pair = frozenset((worker.key, peer.key))
        if differences and pair not in self._compared:
            self._compared.add(pair)
            log.warning("workers %s and %s are not paired: %s", worker, peer, "; ".join(differences))
        return not differences

    async def _meet(self, worker: Worker, peer: Worker) -> None:
        try:
            await introduce(worker.channel, peer.identity)
        except PdServeError as error:
            log.warning("worker %s could not be introduced to %s: %s", worker, peer, error.message)

    async def _check_ticks(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(_CHECK_TICKS_S)
            now = loop.time()
            late, last = now - last - _CHECK_TICKS_S, now
            for watched in self._watched:
                if late > 1:
                    # this process was stopped; the workers' messages wait in its sockets
                    watched.forgive(late)
                watched.check_tick(now - TICK_STILL_S)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
