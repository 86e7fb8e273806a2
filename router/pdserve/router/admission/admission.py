"""`Admission`: decides which requests may enter and which may run, by limits and a queue that is fair to tenants.

A request *enters* the router, or is refused at once: by the limits of its key, by its tenant's share of the queue, or because its
expected wait is too long. It then waits for *places*, one per sequence; their number is what the workers can serve at the same
time. Places go to tenants in the order of the tokens that they were served (`FairQueue`); within a tenant the lowest `priority`
value is first, then the order of arrival.

If several tenants share the fleet, no tenant may take all remaining capacity: it may queue at most as many sequences as remain free
in the queue, and hold at most `PLACES_PER_FREE` places per free place, so that other tenants find room in both.

A flex request waits as long as nothing else needs its room: a request that is not flex would be refused only if it were refused
without the flex requests that wait. As few of these as needed are ended, the last to arrive first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NoReturn

from pdserve.common import clock
from pdserve.common.errors import Draining, Overloaded
from pdserve.router.admission.fair_queue import FairQueue
from pdserve.router.admission.flex_requests import NOTHING, FlexRequest, FlexRequests, Freed
from pdserve.router.admission.place import AdmissionLimits, Capacity, Cost, Granted, Place, Waiter, unless_raised
from pdserve.router.tenants.client import ANYBODY, Client
from pdserve.router.tenants.tenant_account import RETRY_AFTER_S, TenantAccounts

RETRY_AFTER_MAX_S = 30.0
PLACES_PER_FREE = 8
"""Places that one tenant may hold per free place."""
MAX_OVERTAKES = 8
"""Number of requests that may pass one that does not fit yet; then nothing passes it."""
PREFILL_AHEAD_S = 0.05
"""Seconds. With several tenants, prompts are sent to workers only while less prefill work than this waits there: workers' queues
are not fair to tenants, so prompts wait in the router's queue."""
_LOOK_AHEAD = 16
"""Requests that are tried after one that does not fit."""
_LOOK_AHEAD_PER_TENANT = 4
_KEPT = 0.9
"""Weight of the old value in the decaying mean time for which a place is held."""


class Admission:
    """Counts the requests in the router, and grants places in the queue's order."""

    def __init__(
        self,
        limits: AdmissionLimits,
        capacity: Callable[[], Capacity],
        *,
        num_tenants: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = clock.monotonic,
    ) -> None:
        """capacity: called whenever a place might be granted; call `recheck` after it has grown.

        num_tenants: number of tenants with keys. clock: seconds, monotonic.
        """
        self._limits = limits
        self._capacity = capacity
        self._num_tenants = num_tenants
        self._clock = clock
        self.tenants = TenantAccounts(limits.max_requests_per_key, clock)
        self._num_sequences = 0
        """Sequences of the prompts that entered."""
        self.num_running = 0
        """Number of places that are held."""
        self.num_sessions = 0
        """Number of open sessions."""
        self._unplaced_tokens = 0
        """Tokens of prompts that have a place and have not reached a worker."""
        self._running_blocks = 0
        self._running_since = 0.0
        """Sum of the times at which running requests got their places, seconds."""
        self._mean_s: float | None = None
        self._queue = FairQueue[Waiter]()
        self._flex = FlexRequests()
        self.num_requests = 0
        """Prompts that entered and have not left."""
        self._closing = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._expel: dict[Callable[[], None], None] = {}

    @property
    def closed(self) -> bool:
        """True if no request may enter any more."""
        return self._closing.is_set()

    def close(self) -> None:
        """Refuse all requests from now on."""
        self._closing.set()

    async def until_closed(self) -> NoReturn:
        """Wait until `close`, for a front end that waits without a request. Raises: Draining."""
        await self._closing.wait()
        raise _leaving()

    def expel(self) -> None:
        """End all requests."""
        for expel in list(self._expel):
            expel()

    async def emptied(self) -> None:
        """Returns when no request is left."""
        await self._emptied.wait()

    @property
    def capacity(self) -> Capacity:
        """Capacity of the workers now."""
        return self._capacity()

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place now."""
        return len(self._queue)

    def num_queued_of(self, tenant: str) -> int:
        """Requests of one tenant that wait for a place now."""
        return self._queue.num_of(tenant)

    def enter(
        self,
        num_requests: int,
        expel: Callable[[], None],
        *,
        client: Client = ANYBODY,
        num_sequences: int | None = None,
        timeout_s: float | None = None,
        flex_id: str = "",
    ) -> None:
        """Enter requests. Call `leave` with the same arguments after they have ended.

        expel: called if the router must end these requests when it stops. client: their owner. num_sequences: of all requests
        together; None: one each. timeout_s: deadline of the requests. flex_id: a unique id of these requests if they are flex,
        and are ended together to make room for others that are not; "" if they are not.
        Raises: Overloaded, at once, if the queue is full or the wait would be too long; InvalidRequest for more than a key may ever
        have; Draining after `close`.
        """
        if self.closed:
            raise _leaving()
        sequences = num_requests if num_sequences is None else num_sequences
        self.tenants.check_sequences(client, sequences)
        self.tenants.check_tokens(client, 1.0)
        self._make_room(client, sequences, timeout_s, is_flex=bool(flex_id))
        self.num_requests += num_requests
        self._expel[expel] = None
        self._emptied.clear()
        if flex_id:
            self._flex.enter(flex_id, client.tenant, num_requests, sequences)
        self._num_sequences += sequences
        account = self.tenants[client.tenant]
        account.num_requests += num_requests
        account.num_sequences += sequences

    def leave(
        self,
        num_requests: int,
        expel: Callable[[], None],
        *,
        client: Client = ANYBODY,
        num_sequences: int | None = None,
        flex_id: str = "",
    ) -> None:
        """End requests. The arguments are those of `enter`."""
        if not flex_id or self._flex.leave(flex_id):
            self._uncount(client.tenant, num_requests, num_requests if num_sequences is None else num_sequences)
        self.num_requests -= num_requests
        self._expel.pop(expel, None)
        if not self.num_requests:
            self._emptied.set()

    def _uncount(self, tenant: str, num_requests: int, num_sequences: int) -> None:
        self._num_sequences -= num_sequences
        account = self.tenants[tenant]
        account.num_requests -= num_requests
        account.num_sequences -= num_sequences

    def open_session(self, client: Client = ANYBODY) -> Callable[[], None]:
        """Count a session until the returned function is called. Raises: Overloaded; Draining after `close`."""
        if self.closed:
            raise _leaving()
        self.tenants.check_sessions(
            client, self.num_sessions, self._capacity().num_sessions, is_shared=self._num_tenants() > 1
        )
        account = self.tenants[client.tenant]
        account.num_sessions += 1
        self.num_sessions += 1

        def close() -> None:
            account.num_sessions -= 1
            self.num_sessions -= 1

        # later calls have no effect
        stack = contextlib.ExitStack()
        stack.callback(close)
        return stack.close

    @contextlib.asynccontextmanager
    async def place(
        self,
        cost: Cost,
        priority: int = 0,
        raise_when_no_worker: Callable[[], Coroutine[Any, Any, None]] | None = None,
        *,
        client: Client = ANYBODY,
        flex_id: str = "",
    ) -> AsyncIterator[Place]:
        """Hold the request's places inside the context.

        priority: lower values are first among requests of the tenant. raise_when_no_worker: awaited while the request waits; never
        returns, and raises if no worker can serve the request. flex_id: as the request entered.
        Raises: Overloaded after `queue_timeout_s`, if the tenant has spent its tokens, or if the request is flex and made room for
        another; exceptions of `raise_when_no_worker`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = self.ask(cost, future, priority, client=client, flex_id=flex_id)
        try:
            await self._granted(future, raise_when_no_worker)
            if waiter.refusal is not None:
                raise waiter.refusal
        except BaseException:
            self.abandon(waiter)
            raise
        self.begin(waiter)
        try:
            yield waiter.place
        finally:
            self.end(waiter)

    def ask(
        self, cost: Cost, granted: Granted, priority: int = 0, *, client: Client = ANYBODY, flex_id: str = ""
    ) -> Waiter:
        """Ask for the places that `place` holds, without waiting for them. After `granted`, call `begin` and at last
        `end`, or `abandon`.

        Raises: Overloaded if the tenant has spent its tokens.
        """
        account = self.tenants[client.tenant]
        expected = cost.num_tokens + account.expected_output(cost.max_tokens, cost.num_places)
        self.tenants.check_tokens(client, expected)
        place = Place(cost, account, lambda tokens: self._queue.charge(client.tenant, tokens))
        waiter = Waiter(client.tenant, account, place, granted, flex_id)
        self._queue.append(client.tenant, id(waiter), waiter, priority)
        self._flex.queued(waiter)
        self.recheck()
        return waiter

    def begin(self, waiter: Waiter) -> None:
        """Note that the request holds its places from now on."""
        waiter.started_at = self._clock()
        self._running_since += waiter.started_at * waiter.cost.num_places

    def end(self, waiter: Waiter) -> None:
        """Give the places back."""
        self._running_since -= waiter.started_at * waiter.cost.num_places
        self._learn(self._clock() - waiter.started_at)
        waiter.place.settle(has_run=True)
        self._give_back(waiter)

    def abandon(self, waiter: Waiter) -> None:
        """The request does not begin: it waits no longer, was refused, or gives back what it was granted."""
        waiter.place.settle(has_run=False)
        self._flex.unqueued(waiter)
        if waiter.refusal is not None:
            return
        if not self._queue.remove(id(waiter)):
            self._queue.charge(waiter.tenant, -waiter.place.expected_tokens)
            self._give_back(waiter)
        else:
            # requests that waited for it may fit
            self.recheck()

    async def _granted(
        self, future: asyncio.Future[None], raise_when_no_worker: Callable[[], Coroutine[Any, Any, None]] | None
    ) -> None:
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                if future.done() or raise_when_no_worker is None:
                    await future
                else:
                    await unless_raised(future, raise_when_no_worker())
        except TimeoutError:
            raise Overloaded(
                f"no place became free within {self._limits.queue_timeout_s:g} s (queue_timeout_s)",
                self._retry_after_s(self.num_queued),
            ) from None

    def recheck(self) -> None:
        """Grant free places to the next requests."""
        if not self._queue:
            return
        capacity = self._capacity()
        while self._queue and (waiter := self._next(capacity)) is not None:
            self._queue.take(id(waiter), waiter.place.expected_tokens)
            self._flex.unqueued(waiter)
            self.num_running += waiter.cost.num_places
            waiter.account.num_running += waiter.cost.num_places
            self._running_blocks += waiter.cost.num_blocks
            self._unplaced_tokens += waiter.cost.num_tokens_to_compute
            waiter.place.on_placed = lambda tokens=waiter.cost.num_tokens_to_compute: self._placed(tokens)
            if not waiter.granted.done():
                waiter.granted.set_result(None)

    def _next(self, capacity: Capacity) -> Waiter | None:
        """The first request that fits and does not pass one that has been passed `MAX_OVERTAKES` times."""
        if self._is_behind_with_prefill(capacity):
            return None
        passed: list[Waiter] = []
        over_share: set[str] = set()
        candidates = self._queue.first(
            _LOOK_AHEAD, _LOOK_AHEAD_PER_TENANT, lambda tenant: self._is_within_share(tenant, 1, capacity)
        )
        for waiter in candidates:
            if waiter.tenant in over_share:
                continue
            if not self._is_within_share(waiter.tenant, waiter.cost.num_places, capacity):
                # later requests of its tenant do not pass it; those of other tenants do, since they take none of its share
                over_share.add(waiter.tenant)
            elif self._fits(waiter, capacity):
                for other in passed:
                    other.num_passed += 1
                return waiter
            elif waiter.num_passed >= MAX_OVERTAKES:
                return None
            else:
                passed.append(waiter)
        return None

    def _is_behind_with_prefill(self, capacity: Capacity) -> bool:
        """True if the workers have enough waiting prompts for now."""
        if not self.num_running or self._num_tenants() <= 1 or capacity.prefill_tokens_per_s <= 0:
            return False
        ahead = capacity.waiting_tokens + self._unplaced_tokens
        return ahead > 0 and ahead >= PREFILL_AHEAD_S * capacity.prefill_tokens_per_s

    def _placed(self, num_tokens: int) -> None:
        self._unplaced_tokens -= num_tokens

    def _fits(self, waiter: Waiter, capacity: Capacity) -> bool:
        if not self.num_running:
            return True
        if self.num_running + waiter.cost.num_places > capacity.num_requests:
            return False
        return capacity.num_blocks is None or self._running_blocks + waiter.cost.num_blocks <= capacity.num_blocks

    def _is_within_share(self, tenant: str, num_places: int, capacity: Capacity) -> bool:
        """True if enough places remain free for other tenants when the tenant gets `num_places` more."""
        held = self.tenants[tenant].num_running
        if not held or self._num_tenants() <= 1:
            return True
        return held + num_places <= PLACES_PER_FREE * (capacity.num_requests - self.num_running)

    def estimated_wait_s(self, num_ahead: int, freed: Freed = NOTHING) -> float | None:
        """Seconds that the last of `num_ahead` waiting sequences waits for a place; None: not known yet.

        freed: what is taken as ended.
        """
        mean_s = self._mean_place_s()
        if mean_s is None:
            return None
        # while requests wait, the running ones are as many as fit, regardless of the number of places
        is_queued = len(self._queue) > freed.num_queued
        at_once = self.num_running if is_queued else self._capacity().num_requests
        # unknown without a worker
        return num_ahead * mean_s / at_once if at_once else None

    def _make_room(self, client: Client, num_more: int, timeout_s: float | None, *, is_flex: bool) -> None:
        """Raises: Overloaded if there is no room, and could be none without the flex requests that wait."""
        if (refusal := self._refusal(client, num_more, timeout_s)) is None:
            return
        waiting = [] if is_flex else self._flex.waiting()
        if not waiting or self._refusal(client, num_more, timeout_s, Freed(waiting)) is not None:
            raise refusal
        freed, ended = Freed(), list[FlexRequest]()
        for request in waiting:
            ended.append(request)
            freed.add(request)
            if self._refusal(client, num_more, timeout_s, freed) is None:
                break
        retry_after_s = self._retry_after_s(self.num_queued)
        for request in ended:
            self._end(request, retry_after_s)
        # requests that waited for them may fit
        self.recheck()

    def _end(self, request: FlexRequest, retry_after_s: float) -> None:
        """End a flex request that waits; from now on nothing of it counts."""
        for waiter in request.waiters.values():
            self._queue.remove(id(waiter))
            waiter.refusal = Overloaded(
                "requests with service_tier flex wait as long as there is room: too many wait in the router, and this one "
                "made room for one that is not flex",
                retry_after_s,
            )
            if not waiter.granted.done():
                waiter.granted.set_result(None)
        request.waiters.clear()
        request.has_ended = True
        self._uncount(request.tenant, request.num_requests, request.num_sequences)

    def _refusal(
        self, client: Client, num_more: int, timeout_s: float | None, freed: Freed = NOTHING
    ) -> Overloaded | None:
        try:
            self._check_room(client, num_more, timeout_s, freed)
        except Overloaded as error:
            return error
        return None

    def _check_room(self, client: Client, num_more: int, timeout_s: float | None, freed: Freed) -> None:
        """freed: what is taken as ended, but for the limits of the key. Raises: Overloaded."""
        capacity = self._capacity().num_requests
        num_sequences, is_queued = self._num_sequences - freed.num_sequences, len(self._queue) > freed.num_queued
        # requests that are being tokenized will wait, too
        num_ahead = num_sequences + num_more - capacity
        if is_queued:
            num_ahead = max(num_ahead, num_sequences - self.num_running + num_more)
        if num_ahead <= 0:
            return
        free = 0 if is_queued else max(0, capacity - self.num_running)
        num_own = max(0, self.tenants[client.tenant].num_waiting - free)
        self.tenants.check_waiting(client, num_own, num_more)
        num_own = max(0, num_own - freed.sequences_of[client.tenant])
        self._check_queue(client, num_ahead, num_own, num_more)
        # tenants take turns, so only the first requests of other tenants run before this one
        queued_of = {tenant: self._queue.num_of(tenant) - count for tenant, count in freed.queued_of.items()}
        num_tenants = self._queue.num_tenants - list(queued_of.values()).count(0)
        num_tenants += 0 if queued_of.get(client.tenant, self._queue.num_of(client.tenant)) else 1
        num_ahead = min(num_ahead, (num_own + num_more) * num_tenants)
        wait_s = self.estimated_wait_s(num_ahead, freed)
        if wait_s is None:
            return
        if wait_s > self._limits.queue_timeout_s:
            raise Overloaded(
                f"a place would be free in about {wait_s:.1f} s, queue_timeout_s is {self._limits.queue_timeout_s:g}",
                self._retry_after_s(num_ahead),
            )
        if timeout_s is not None and wait_s + (self._mean_place_s() or 0.0) > timeout_s:
            raise Overloaded(
                f"it could not be done in time: a place would be free in about {wait_s:.1f} s, the request's deadline "
                f"is in {timeout_s:.1f} s",
                self._retry_after_s(num_ahead),
            )

    def _check_queue(self, client: Client, num_ahead: int, num_own: int, num_more: int) -> None:
        """Raises: Overloaded. num_ahead: waiting sequences of all tenants. num_own: earlier waiting sequences of this tenant."""
        limit = self._limits.max_queued_requests
        # a single request may have more sequences than the limit; otherwise it would always be refused
        if num_ahead > limit and num_ahead > num_more:
            raise Overloaded(
                f"{self._num_sequences} requests are in the router, {self.num_running} of them run, and {num_more} "
                f"more came; at most {limit} may wait (max_queued_requests)",
                self._retry_after_s(num_ahead - limit),
            )
        left = limit - (num_ahead - num_more)
        if self._num_tenants() > 1 and num_own and num_own + num_more > left:
            raise Overloaded(
                f"{num_own} requests of tenant {client.tenant} wait and {num_more} more came; a tenant may have as many "
                f"as stay free for others, which are {max(0, left)} of {limit} (max_queued_requests)",
                self._retry_after_s(num_own),
            )

    def _retry_after_s(self, num_ahead: int) -> float:
        wait_s = self.estimated_wait_s(num_ahead) or RETRY_AFTER_S
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_S, wait_s))

    def _mean_place_s(self) -> float | None:
        """Mean seconds for which a place is held; before the first one was returned, the mean so far of running requests."""
        if self._mean_s is not None or not self.num_running:
            return self._mean_s
        return max(0.0, self._clock() - self._running_since / self.num_running)

    def _learn(self, held_s: float) -> None:
        self._mean_s = held_s if self._mean_s is None else _KEPT * self._mean_s + (1 - _KEPT) * held_s

    def _give_back(self, waiter: Waiter) -> None:
        self.num_running -= waiter.cost.num_places
        waiter.account.num_running -= waiter.cost.num_places
        self._running_blocks -= waiter.cost.num_blocks
        waiter.place.placed()
        self.recheck()


def _leaving() -> Draining:
    return Draining("this router is shutting down")
