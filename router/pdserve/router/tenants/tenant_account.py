"""`TenantAccounts`: each tenant's use of the router, checked against the limits of its keys; `TokenBucket`: a rate limit."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdserve.common.errors import InvalidRequest, Overloaded
from pdserve.common.settings.api_key_file import KeyLimits
from pdserve.router.tenants.client import Client

RETRY_AFTER_S = 1.0
RETRY_AFTER_MAX_S = 60.0
"""Seconds in which an empty bucket of tokens per minute fills."""
FIRST_OUTPUT_TOKENS = 128.0
"""Expected output tokens of a tenant's first sequence."""
_KEPT = 0.9
"""Weight of the old value in the decaying mean output of a tenant's sequences."""


class UsedElsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """Total published use of a tenant in the other routers of the fleet."""

    num_sequences: int = 0
    num_waiting: int = 0
    num_sessions: int = 0


NOWHERE = UsedElsewhere()


class TokenBucket:
    """The level may become negative: a running request is charged as its tokens arrive."""

    def __init__(self, tokens_per_minute: int, clock: Callable[[], float]) -> None:
        """clock: seconds, monotonic."""
        self._clock = clock
        self._size = tokens_per_minute
        self._level = float(tokens_per_minute)
        self._filled_s = clock()

    @property
    def size(self) -> int:
        """Tokens per minute. Setting it does not refill the bucket."""
        return self._size

    @size.setter
    def size(self, tokens_per_minute: int) -> None:
        self._fill()
        self._size = tokens_per_minute
        self._level = min(self._level, tokens_per_minute)

    @property
    def level(self) -> float:
        """Tokens that may be spent now; below 0 after an overdraft."""
        self._fill()
        return self._level

    def spend(self, tokens: float) -> None:
        """Take tokens. tokens: below 0 to return them."""
        self._fill()
        self._level = min(float(self._size), self._level - tokens)

    def wait_s(self, tokens: float) -> float:
        """Seconds until the bucket has `tokens`, or is full if it cannot hold as many; 0: now."""
        missing = min(max(tokens, 1.0), self._size) - self.level
        # a full bucket must count as full despite rounding
        return missing * 60.0 / self._size if missing > 1e-6 else 0.0

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(float(self._size), self._level + (now - self._filled_s) * self._size / 60.0)
        self._filled_s = now


class TenantAccount:
    """Use of one tenant, over all of its keys."""

    __slots__ = ("bucket", "mean_output", "num_requests", "num_running", "num_sequences", "num_sessions", "tokens_used")

    def __init__(self) -> None:
        self.num_requests = 0
        """Number of prompts in the router."""
        self.num_sequences = 0
        """Number of sequences in the router that run, wait, or are being prepared."""
        self.num_running = 0
        """Number of sequences that have a place."""
        self.num_sessions = 0
        """Number of open sessions, also between turns."""
        self.tokens_used = 0.0
        """Prompt and output tokens since the account was opened, without returned charges."""
        self.bucket: TokenBucket | None = None
        self.mean_output: float | None = None
        """Decaying mean of output tokens per sequence; None: not known yet."""

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the router without a place."""
        return self.num_sequences - self.num_running

    def expected_output(self, max_tokens: int, num_sequences: int) -> float:
        """Expected output tokens of a request."""
        mean = FIRST_OUTPUT_TOKENS if self.mean_output is None else self.mean_output
        return num_sequences * min(float(max_tokens), mean)

    def learn(self, num_tokens: int, num_sequences: int) -> None:
        """Record the output tokens of an ended request."""
        mean = num_tokens / num_sequences
        self.mean_output = mean if self.mean_output is None else _KEPT * self.mean_output + (1 - _KEPT) * mean

    def spend(self, tokens: float) -> None:
        """Charge tokens. tokens: below 0 to return an unused charge."""
        self.tokens_used += tokens
        self.spend_elsewhere(tokens)

    def spend_elsewhere(self, tokens: float) -> None:
        """Charge tokens that another router charged; as `spend`."""
        if self.bucket is not None:
            self.bucket.spend(tokens)


class TenantAccounts:
    """Tenant -> account; "" is the only tenant of a router without keys."""

    def __init__(self, default_max_sequences: int | None, clock: Callable[[], float]) -> None:
        """default_max_sequences: limit of keys without their own `max_sequences` (setting `max_requests_per_key`)."""
        self._default_max_sequences = default_max_sequences
        self._clock = clock
        self._accounts: dict[str, TenantAccount] = {}
        self.elsewhere: Callable[[str], UsedElsewhere] = lambda tenant: NOWHERE
        """Returns the use of a tenant in other routers; called at each check, so it must not block."""

    def __getitem__(self, tenant: str) -> TenantAccount:
        if (account := self._accounts.get(tenant)) is None:
            account = self._accounts[tenant] = TenantAccount()
        return account

    def items(self) -> list[tuple[str, TenantAccount]]:
        """All tenants with current or recent use."""
        return list(self._accounts.items())

    def check_sequences(self, client: Client, num_sequences: int) -> None:
        """Raises: InvalidRequest for more than the key may ever have; Overloaded for more than it may have now."""
        limit, name = client.limits.max_sequences, "max_sequences of this API key"
        if limit is None:
            limit, name = self._default_max_sequences, "max_requests_per_key"
        if limit is None or not client.tenant:
            return
        if num_sequences > limit:
            raise InvalidRequest(f"{num_sequences} sequences came in one request; {name} is {limit}")
        used = self[client.tenant].num_sequences + self.elsewhere(client.tenant).num_sequences
        if used + num_sequences > limit:
            raise Overloaded(
                f"{used} sequences of tenant {client.tenant} are in the router and {num_sequences} more came; "
                f"{name} is {limit}",
                RETRY_AFTER_S,
            )

    def check_waiting(self, client: Client, num_waiting: int, num_more: int) -> None:
        """num_waiting: sequences of the tenant that have to wait for a place. Raises: Overloaded."""
        limit = client.limits.max_queued_requests
        if limit is None:
            return
        used = num_waiting + self.elsewhere(client.tenant).num_waiting
        # a single request may have more sequences than the limit; otherwise it would always be refused
        if used + num_more > limit and (used or not limit):
            raise Overloaded(
                f"{used} sequences of tenant {client.tenant} wait and {num_more} more came; max_queued_requests of this "
                f"API key is {limit}",
                RETRY_AFTER_S,
            )

    def check_tokens(self, client: Client, tokens: float) -> None:
        """tokens: expected use. Raises: Overloaded until the tenant's bucket has as many."""
        bucket = self._bucket(client.tenant, client.limits)
        if bucket is None or not (wait_s := bucket.wait_s(tokens)):
            return
        raise Overloaded(
            f"tenant {client.tenant} has {max(0, int(bucket.level))} of {bucket.size} tokens left and this request needs "
            f"about {max(1, int(tokens))}; tokens_per_minute of this API key is {bucket.size}",
            min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_S, wait_s)),
        )

    def check_sessions(self, client: Client, num_open: int, num_possible: int, *, is_shared: bool) -> None:
        """num_open: sessions of all tenants here. num_possible: sessions that the workers accept together; 0: not known.

        is_shared: True if the fleet has several tenants; then no tenant may have more sessions than remain free for others.
        Raises: Overloaded.
        """
        limit = client.limits.max_sessions
        used = self[client.tenant].num_sessions + self.elsewhere(client.tenant).num_sessions
        if limit is not None and used >= limit:
            raise Overloaded(
                f"{used} sessions of tenant {client.tenant} are open; max_sessions of this API key is {limit}",
                RETRY_AFTER_S,
            )
        if is_shared and num_possible and used and used + 1 > num_possible - num_open:
            raise Overloaded(
                f"{used} sessions of tenant {client.tenant} are open, and {max(0, num_possible - num_open)} of "
                f"{num_possible} (max_sessions of the workers) are left for all tenants; a tenant may have as many as "
                "stay free",
                RETRY_AFTER_S,
            )

    def _bucket(self, tenant: str, limits: KeyLimits) -> TokenBucket | None:
        if limits.tokens_per_minute is None:
            return None
        account = self[tenant]
        if account.bucket is None:
            account.bucket = TokenBucket(limits.tokens_per_minute, self._clock)
        elif account.bucket.size != limits.tokens_per_minute:
            account.bucket.size = limits.tokens_per_minute
        return account.bucket
