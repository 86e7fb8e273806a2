"""`Place`: permission for a request to run; `Waiter`: a request that waits for one; limits of fleet and settings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from pdserve.common.errors import Overloaded
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.router.tenants.tenant_account import TenantAccount
from pdserve.router.workers.worker import RemoteWorker


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of requests, blocks and sessions at the same time."""

    num_requests: int
    """Number of places; a request takes one per sequence."""
    num_blocks: int | None = None
    """KV blocks of all prompts together; None: no limit."""
    num_sessions: int = 0
    """Streaming sessions; 0: not known."""
    waiting_tokens: int = 0
    """Prompt tokens that wait at workers to be computed."""
    prefill_tokens_per_s: float = 0.0
    """Rate of all workers together, prompt tokens per second; 0: not known."""


def capacity_of(prefill: Sequence[RemoteWorker], decode: Sequence[RemoteWorker], settings: RouterSettings) -> Capacity:
    """A place for every sequence that some worker can step, and prompts that fit into their pools together."""
    num_sessions = sum(worker.load.max_sessions for worker in decode)
    if settings.limits.max_running_requests is not None:
        return Capacity(num_requests=settings.limits.max_running_requests, num_sessions=num_sessions)
    workers = [*prefill, *decode]
    prefilling = prefill or workers
    return Capacity(
        num_requests=sum(worker.identity.max_num_seqs for worker in workers),
        num_blocks=sum(worker.num_blocks for worker in workers),
        num_sessions=num_sessions,
        waiting_tokens=sum(worker.waiting_tokens for worker in prefilling),
        prefill_tokens_per_s=sum(worker.load.prefill_tokens_per_s for worker in prefilling),
    )


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of settings on admission."""

    max_queued_requests: int
    """Most sequences that wait for a place."""
    queue_timeout_s: float = 30.0
    """Seconds for which a request may wait for a place."""
    max_requests_per_key: int | None = None
    """Most sequences of a tenant whose key has no own limit."""

    @classmethod
    def of(cls, settings: RouterSettings) -> AdmissionLimits:
        return cls(
            max_queued_requests=settings.limits.max_queued_requests,
            queue_timeout_s=settings.limits.queue_timeout_s,
            max_requests_per_key=settings.limits.max_requests_per_key,
        )


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a request that is known before it runs."""

    num_blocks: int = 0
    """KV blocks of the prompt."""
    num_places: int = 1
    """Number of its sequences."""
    num_tokens: int = 1
    """Tokens of its prompt."""
    num_encoder_tokens: int = 0
    """Positions of sound, which a worker computes like tokens of the prompt. They are not charged to the tenant."""
    max_tokens: int = 0
    """Largest number of output tokens per sequence."""

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens and positions that wait to be computed."""
        return self.num_tokens + self.num_encoder_tokens


class Place:
    """Held by a running request, which reports its cost as it arises."""

    def __init__(self, cost: Cost, account: TenantAccount, charge: Callable[[float], None]) -> None:
        self.cost = cost
        self._account = account
        self._charge = charge
        self.on_placed: Callable[[], None] | None = None
        """Called once when a worker has the prompt; set with the place."""
        self._output = 0
        self._charged_output = account.expected_output(cost.max_tokens, cost.num_places)
        account.spend(cost.num_tokens + self._charged_output)

    @property
    def expected_tokens(self) -> float:
        """Tokens of prompt and output that were charged in advance."""
        return self.cost.num_tokens + self._charged_output

    def placed(self) -> None:
        """Report that a worker has the prompt, or that none will. Later calls have no effect."""
        on_placed, self.on_placed = self.on_placed, None
        if on_placed is not None:
            on_placed()

    def produced(self, num_tokens: int) -> None:
        """Report output tokens that went to the client."""
        self._output += num_tokens
        if (more := self._output - self._charged_output) > 0:
            self._correct(more)

    def settle(self, *, has_run: bool) -> None:
        """Return the unused charge of an ended request."""
        if not has_run:
            self._account.spend(-self.expected_tokens)
            return
        self._correct(self._output - self._charged_output)
        if self.cost.max_tokens:
            self._account.learn(self._output, self.cost.num_places)

    def _correct(self, num_tokens: float) -> None:
        self._charged_output += num_tokens
        self._account.spend(num_tokens)
        self._charge(num_tokens)


class Granted(Protocol):
    """Told once when a request has its places, or is refused; a future of asyncio is one."""

    def done(self) -> bool:
        """True if it was told, or nobody waits any more."""

    def set_result(self, result: None, /) -> None:
        """Called if it is not done."""


class Waiter(msgspec.Struct, gc=False, eq=False):
    """A request in the queue, until `granted` is told."""

    tenant: str
    account: TenantAccount
    place: Place
    granted: Granted
    flex_id: str = ""
    """Of a flex request: as it entered."""
    num_passed: int = 0
    """Number of later requests that passed it."""
    refusal: Overloaded | None = None
    """Set with `granted` if the request was ended in the queue, where it no longer is."""
    started_at: float = 0.0
    """When it began to hold its places."""

    @property
    def cost(self) -> Cost:
        return self.place.cost


async def unless_raised(future: asyncio.Future[None], raise_when_no_worker: Coroutine[Any, Any, None]) -> None:
    """Wait for the future. Raises: an earlier exception of `raise_when_no_worker`."""
    no_worker = asyncio.ensure_future(raise_when_no_worker)
    # not by `first_of`: it would cancel the grant while the waiter is still in the queue
    try:
        await asyncio.wait((future, no_worker), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            no_worker.result()
    finally:
        no_worker.cancel()
        # it may have failed at the same time; its error is not needed
        await asyncio.gather(no_worker, return_exceptions=True)
