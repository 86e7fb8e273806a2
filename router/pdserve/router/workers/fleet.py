"""`Fleet`: the workers of this router, at addresses from settings and from a directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from pdserve.common.errors import InvalidRequest, NotFound, PdServeError
from pdserve.common.kv_events import KvEventSink, WorkerKey
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.security.tls import ClientTls
from pdserve.common.tasks.background_task import background_task
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.workers.watch import ask_to_drain, introduce, set_role
from pdserve.router.workers.worker import RemoteWorker, WorkerState
from pdserve.router.workers.worker_watcher import TICK_STILL_S, CompatibilityCheck, WorkerWatcher

log = logging.getLogger(__name__)

_CHECK_TICKS_S = 0.25
_FOR_EVER_S = 86_400.0
_MAX_PASSED_OVER = 1024
T = TypeVar("T")


class Discovery(Protocol):
    """The operations of the router's `Fleet` that a directory uses."""

    def register(self, address: str, role: WorkerRole) -> None:
        """Add a worker's address. Idempotent; an address from settings, or with a live worker, keeps its role."""

    def forget(self, missing: Collection[str]) -> None:
        """Forget those of these addresses, which no record names any more, that have no live worker."""

    def introduced(self) -> Sequence[str]:
        """Addresses that only a directory added."""

    def lives(self) -> Sequence[RemoteWorker]:
        """Every worker with a working watch, one entry per epoch."""


class Directory(Protocol):
    """A source of addresses of workers, and of their blocks unless the fleet reads these itself. Runs while the fleet does."""

    async def run(self, fleet: Discovery) -> None:
        """Register workers until cancelled; one that reads blocks keeps the prefix index equal to those of live workers."""


IsStarting = Callable[[], Awaitable[bool]]
"""Returns True if the process that starts this router's workers is starting or restarting one."""


async def nobody_starts() -> bool:
    """`IsStarting` of a router whose workers are started by others."""
    return False


class Fleet:
    """Watches every address; services may start in any order. Use as an async context."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        expected: CompatibilityCheck,
        held: KvEventSink | None = None,
        directory: Directory | None = None,
        tls: ClientTls | None = None,
        *,
        insecure: bool = False,
        is_starting: IsStarting = nobody_starts,
        starting_timeout_s: float = 0.0,
    ) -> None:
        """held: receives the workers' blocks; None if the directory reads them. is_starting, starting_timeout_s: see
        `wait_for_worker`.

        insecure: connect without TLS also to addresses of the directory beyond loopback.
        """
        self._expected = expected
        self._tls = tls
        self._is_starting = is_starting
        self._starting_timeout_s = starting_timeout_s
        self._may_leave_machine = insecure or tls is not None
        self._passed_over: set[str] = set()
        """Addresses that were logged because they would need an unencrypted connection; limited in number."""
        self._held = held
        self._directory = directory
        self._watched = [
            self._watch_address(address, role)
            for role, addresses in ((WorkerRole.PREFILL, prefill), (WorkerRole.DECODE, decode))
            for address in dict.fromkeys(addresses)
        ]
        self._introduced: dict[str, asyncio.Task[None]] = {}
        """Address that the directory found -> task that watches it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._met: set[tuple[WorkerKey, WorkerRole | None]] = set()
        self._compared: set[frozenset[tuple[str, int]]] = set()
        self.listeners: list[Callable[[], None]] = []
        """Called after every change."""

    async def __aenter__(self) -> Fleet:
        for watched in self._watched:
            self._keep(background_task("watch", watched.keep))
        self._keep(background_task("ticks", self._check_ticks))
        if (directory := self._directory) is not None:
            self._keep(background_task("directory", lambda: directory.run(self)))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def workers(self, role: WorkerRole) -> list[RemoteWorker]:
        """Workers that may get requests, in the order of their addresses."""
        return [worker for worker in self.lives(role) if worker.state is WorkerState.LIVE]

    def lives(self, role: WorkerRole | None = None) -> list[RemoteWorker]:
        """Workers with a working watch, including draining ones; one entry per epoch, also if it has several addresses."""
        found = {
            watched.worker.key: watched.worker
            for watched in reversed(self._watched)
            if watched.worker is not None and role in (None, watched.worker.role)
        }
        return list(reversed(found.values()))

    def reconnected(self, lost: RemoteWorker) -> bool:
        """True if a lost worker has not died: it is watched again in the same epoch, and its engine has made progress."""
        return any(life.key == lost.key and life.joined_at > lost.died_at for life in self.lives())

    def register(self, address: str, role: WorkerRole) -> None:
        """Add a worker's address. Idempotent; an address from settings, or with a live worker, keeps its role.

        An address beyond loopback that would need an unencrypted connection is ignored, with one warning.
        """
        if not self._may_leave_machine and not is_loopback(address):
            self._pass_over(address)
            return
        known = next((watched for watched in self._watched if watched.address == address), None)
        if known is not None:
            if known.address_role is role or known.worker is not None or address not in self._introduced:
                return
            # another worker had the address before
            self._give_up(known)
        watched = self._watch_address(address, role, found=True)
        self._watched.append(watched)
        self._introduced[address] = self._keep(background_task("watch", watched.keep))

    def _pass_over(self, address: str) -> None:
        if address not in self._passed_over and len(self._passed_over) < _MAX_PASSED_OVER:
            self._passed_over.add(address)
            log.warning(
                "the address %s, which the directory names, is not used: it is not loopback, and this router has no TLS: "
                "tls_cert_file with tls_key_file and tls_ca_file is needed, or --insecure",
                address,
            )

    def introduced(self) -> list[str]:
        """Addresses that only a directory added."""
        return list(self._introduced)

    def forget(self, missing: Collection[str]) -> None:
        """Forget those of these addresses, which no record names any more, that have no live worker."""
        for watched in list(self._watched):
            if watched.address in missing and watched.address in self._introduced and watched.worker is None:
                self._give_up(watched)
                log.info(
                    "%s address %s is forgotten: no record names it any more",
                    watched.address_role.value,
                    watched.address,
                )

    def _give_up(self, watched: WorkerWatcher) -> None:
        self._introduced.pop(watched.address).cancel()
        self._watched.remove(watched)

    async def drain(self, worker_id: str) -> list[RemoteWorker]:
        """Have the workers of this name drain; returns them. Raises: NotFound if none is connected; PdServeError of the call."""
        named = self._named(worker_id)
        for worker in named:
            await ask_to_drain(worker.channel)
            worker.refuse_more()
            log.info("worker %s drains, as asked", worker)
        return named

    async def set_role(
        self, worker_id: str, role: WorkerRole, dwell_s: float = 0.0, *, force: bool = False
    ) -> list[RemoteWorker]:
        """Have the workers of this name take a role; returns them. dwell_s: as of `SetRole`.

        Raises: NotFound if none is connected; InvalidRequest, without `force`, if no live worker of their role would be left;
        PdServeError of the call.
        """
        named = self._named(worker_id)
        leaving = [worker for worker in named if worker.role is not role]
        for worker in leaving:
            if not force and worker.role is not None and not set(self.workers(worker.role)) - set(leaving):
                raise InvalidRequest(
                    f"role is {role.value!r}, and {worker_id} is the only {worker.role.value} worker that is live: force is needed",
                    "role",
                )
        for worker in named:
            await set_role(worker.channel, role, dwell_s)
        return named

    def _named(self, worker_id: str) -> list[RemoteWorker]:
        """Raises: NotFound if none is connected."""
        named = [worker for worker in self.lives() if worker.identity.worker_id == worker_id]
        if not named:
            raise NotFound(f"no worker {worker_id[:100]!r} is connected")
        return named

    def absent(self) -> list[tuple[WorkerRole, str, str]]:
        """(role, worker or its address, reason) of workers that must not get requests."""
        left = []
        for watched in self._watched:
            if watched.worker is None:
                why = f"refused: {watched.refused}" if watched.refused else "dead, or not reached yet"
                left.append((watched.address_role, watched.address, why))
            elif watched.worker.state is not WorkerState.LIVE:
                role = watched.worker.role or watched.address_role
                left.append((role, watched.worker.identity.worker_id, watched.worker.state.value))
        return left

    def counts(self) -> dict[str, dict[str, int]]:
        """role -> state (configured, live, draining, refused) -> number of addresses. A worker counts with its present role."""
        return {role.value: self._count([w for w in self._watched if w.role is role]) for role in WorkerRole}

    def describe(self, role: WorkerRole) -> str:
        """The state of a role's addresses, for error messages."""
        count = self.counts()[role.value]
        if not count["addresses"]:
            return f"no {role.value} address {'was given' if self._directory is None else 'is known'}"
        return (
            f"of {count['addresses']} {role.value} address(es) {count['live']} live, "
            f"{count['draining']} draining, {count['refused']} refused"
        )

    async def wait_for(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """The first result of `look` that is not None; `look` is called now and after every change. None after the timeout."""
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

    async def wait_for_worker(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """`wait_for`, which waits again while a worker is being started, up to `starting_timeout_s` in all.

        timeout_s: 0 if no worker can come.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._starting_timeout_s
        while (found := await self.wait_for(look, timeout_s)) is None:
            left_s = give_up_at - loop.time()
            if not timeout_s or left_s <= 0 or not await self._is_starting():
                return None
            timeout_s = min(timeout_s, left_s)
        return found

    def look_again(self) -> None:
        """Make `wait_for` check again after a change elsewhere."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_until_absent(self, is_there: Callable[[], bool], for_s: float) -> None:
        """Wait until `is_there` has been false for as long as `wait_for_worker` waits; it is called now and after every change."""
        while True:
            await self.wait_for(lambda: None if is_there() else True, _FOR_EVER_S)
            if await self.wait_for_worker(lambda: is_there() or None, for_s) is None:
                return

    @staticmethod
    def _count(watched: Sequence[WorkerWatcher]) -> dict[str, int]:
        states = [address.worker.state for address in watched if address.worker is not None]
        return {
            "addresses": len(watched),
            "live": states.count(WorkerState.LIVE),
            "draining": states.count(WorkerState.DRAINING),
            "refused": sum(address.refused is not None for address in watched),
        }

    def _on_change(self, watched: WorkerWatcher) -> None:
        worker = watched.worker
        if (
            worker is not None
            and worker.state is WorkerState.LIVE
            and (met := (worker.key, worker.role)) not in self._met
        ):
            self._met.add(met)
            self._introduce(worker)
        if worker is None:
            alive = {address.worker.key for address in self._watched if address.worker is not None}
            self._met = {met for met in self._met if met[0] in alive}
            self._compared = {pair for pair in self._compared if pair <= alive}
        self.look_again()
        for listener in self.listeners:
            listener()

    def _introduce(self, worker: RemoteWorker) -> None:
        role = worker.role
        if role is None:
            return
        for peer in self.workers(role.other):
            if self._can_pair(worker, peer):
                self._spawn(self._meet(worker, peer))
                self._spawn(self._meet(peer, worker))

    def _can_pair(self, worker: RemoteWorker, peer: RemoteWorker) -> bool:
        differences = worker.identity.layout.differences(peer.identity.layout)
        pair = frozenset((worker.key, peer.key))
        if differences and pair not in self._compared:
            self._compared.add(pair)
            log.warning("workers %s and %s are not paired: %s", worker, peer, "; ".join(differences))
        return not differences

    async def _meet(self, worker: RemoteWorker, peer: RemoteWorker) -> None:
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
                    # this process was suspended; the workers' messages wait in its sockets
                    watched.extend_deadline(late)
                watched.check_tick(now - TICK_STILL_S)

    def _watch_address(self, address: str, role: WorkerRole, *, found: bool = False) -> WorkerWatcher:
        return WorkerWatcher(address, role, self._expected, self._on_change, self._held, self._tls, found=found)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._keep(asyncio.create_task(coroutine))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
