"""What a request holds while it runs (`Place`) or waits (`Waiter`), and what the fleet and the settings allow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from pdserve.router.tenants.tenant_account import TenantAccount


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that may run at the same time."""

    num_requests: int
    """Places: a request takes one per sequence."""
    num_blocks: int | None = None
    """KV blocks of their prompts, together; None: no limit."""
    num_sessions: int = 0
    """Streaming sessions; 0: not known."""
    waiting_tokens: int = 0
    """Prompt tokens that wait at workers to be computed."""
    prefill_tokens_per_s: float = 0.0
    """At which workers compute them, together; 0: not known."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of settings on admission."""

    max_queued_requests: int
    """Sequences that wait for a place."""
    queue_timeout_s: float = 30.0
    """Seconds for which a request may wait for a place."""
    max_requests_per_key: int | None = None
    """Sequences of a tenant whose key has no limit of its own."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a request, as far as it is known before it runs."""

    num_blocks: int = 0
    """KV blocks of the prompt."""
    num_places: int = 1
    """Number of its sequences."""
    num_tokens: int = 1
    """Tokens of its prompt."""
    max_tokens: int = 0
    """Output of each sequence, at most."""


class Place:
    """Held by a running request, which reports its cost as it arises."""

    def __init__(self, cost: Cost, account: TenantAccount, charge: Callable[[float], None]) -> None:
        self.cost = cost
        self._account = account
        self._charge = charge
        self.on_placed: Callable[[], None] | None = None
        """Called once, when a worker has the prompt; set with the place."""
        self._output = 0
        self._charged_output = account.expected_output(cost.max_tokens, cost.num_places)
        account.spend(cost.num_tokens + self._charged_output)

    @property
    def expected_tokens(self) -> float:
        """Prompt and output, as they were charged before it ran."""
        return self.cost.num_tokens + self._charged_output

    def placed(self) -> None:
        """A worker has the prompt, or none will. Harmless when called again."""
        on_placed, self.on_placed = self.on_placed, None
        if on_placed is not None:
            on_placed()

    def produced(self, num_tokens: int) -> None:
        """Report output tokens that went to the client."""
        self._output += num_tokens
        if (more := self._output - self._charged_output) > 0:
            self._correct(more)

    def settle(self, *, has_run: bool) -> None:
        """The request has ended: give back what was charged and not used."""
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


class Waiter(msgspec.Struct, gc=False, eq=False):
    """In the queue until `granted` is set."""

    tenant: str
    account: TenantAccount
    place: Place
    granted: asyncio.Future[None]
    num_passed: int = 0
    """Later requests that passed it."""

    @property
    def cost(self) -> Cost:
        return self.place.cost


async def granted(waiter: Waiter, raise_when_no_worker: Coroutine[Any, Any, None]) -> None:
    """Returns when the waiter has its places. Raises: what `raise_when_no_worker` raises first."""
    no_worker = asyncio.ensure_future(raise_when_no_worker)
    # not by `first_of`: it would cancel the grant while the waiter is still in the queue
    try:
        await asyncio.wait((waiter.granted, no_worker), return_when=asyncio.FIRST_COMPLETED)
        if not waiter.granted.done():
            no_worker.result()
    finally:
        no_worker.cancel()
        # it may have ended beside the grant: its error is not asked for
        await asyncio.gather(no_worker, return_exceptions=True)
