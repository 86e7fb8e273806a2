"""Capacity of the fleet, and the limits of settings on admission."""

from __future__ import annotations

import msgspec


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
