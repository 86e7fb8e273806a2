"""Types of `/debug/status` and `/debug/requests/{request_id}`, which the router encodes and `pdserve top` and `trace` decode.

A field that another version lacks has its default, so that both work with the router of another version.
"""

from __future__ import annotations

import msgspec

from pdserve.common.request.cached_tokens import CachedTokens

MAX_WORKERS = 256
MAX_TENANTS = 32
MAX_SLOWEST = 10
"""Most entries of each list; separate fields have the totals."""


class PhaseView(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a request."""

    name: str
    service: str
    """router, prefill or decode: the service that spent the time."""
    start_s: float
    """Seconds after the request's arrival."""
    duration_s: float
    overlaps: bool = False
    """True outside the critical path, whose phases add up to the request's duration."""


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended lately or is under way."""

    request_id: str
    client_request_id: str = ""
    tenant: str = ""
    key_name: str = ""
    operation: str = ""
    """chat, text_completion or embeddings."""
    outcome: str = ""
    """A finish reason or an error's code; empty while the request is under way."""
    arrived_unix_s: float = 0.0
    duration_s: float = 0.0
    """Until now for a request under way."""
    ttft_s: float | None = None
    """None before the first token, and for embeddings."""
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    """Only for operators: the cache may be shared with other tenants."""
    cached_tokens: CachedTokens | None = None
    """These by source; likewise."""
    num_output_tokens: int = 0
    num_attempts: int = 0
    """Attempts of the prompt that ended last; phases and workers are those of its last attempt."""
    prefill: str = ""
    decode: str = ""
    """Ids of workers, only for operators; empty for a role without a call."""
    phases: list[PhaseView] = []


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker by its last load report, or an address without a connection, which has only role, worker id, state and cause."""

    role: str
    worker_id: str
    """The address if the id is not known."""
    state: str
    """live, draining or absent."""
    cause: str = ""
    """The reason for which it gets no requests."""
    address: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_remote_kv: int = 0
    """Requests that receive KV blocks or wait for them."""
    num_waiting_tokens: int = 0
    max_num_seqs: int = 0
    blocks_in_use: int = 0
    blocks_total: int = 0
    num_sessions: int = 0
    max_sessions: int = 0
    prefill_tokens_per_s: float = 0.0
    """0: not known."""
    num_calls: int = 0
    """Open calls of this router."""
    num_other_calls: int = 0
    """Open calls, of all routers, of the role that it had before."""
    connected_s: float = 0.0
    """Seconds since this router connected."""
    connectors: list[str] = []
    protocol_version: int = 0
    sampler_version: int = 0
    model_fingerprint: str = ""


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's use of this router."""

    tenant: str
    num_requests: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_sessions: int = 0


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences in admission: of all tenants for an operator, else of the client's."""

    num_requests: int = 0
    """Prompts in the router."""
    num_running: int = 0
    num_queued: int = 0
    num_sessions: int = 0
    num_places: int | None = None
    """Most running sequences; None for users."""


class AdmissionView(msgspec.Struct, frozen=True, kw_only=True):
    """Admission as one client may see it."""

    queue: QueueView = QueueView()
    num_tenants: int = 0
    tenants: list[TenantView] = []
    """The tenants with most requests; empty for users."""


class RecentView(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended within the last `window_s` seconds; percentiles are None without a request."""

    window_s: float = 0.0
    num_requests: int = 0
    requests_per_s: float = 0.0
    failed_per_s: float = 0.0
    """Requests that ended with an error, without those whose client left."""
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    cached_fraction: float | None = None
    """Cached prompt tokens over prompt tokens; None for users, and without prompt tokens."""
    num_prompt_tokens: int = 0
    cached_tokens: CachedTokens | None = None
    """Of the prompt tokens, those that needed no computing, by source; None for users."""
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    duration_p50_s: float | None = None
    duration_p95_s: float | None = None


class MovesView(msgspec.Struct, frozen=True, kw_only=True):
    """What moved between workers since the router's start."""

    blocks: dict[str, int] = {}
    """Outcome -> reads of another worker's cached blocks for a prompt; the outcomes of `pdserve_block_moves_total`."""
    block_bytes: int = 0
    """Of those that brought their blocks, as they were placed."""
    requests: dict[str, int] = {}
    """Outcome -> running sequences that another decode worker was to continue; the outcomes of `pdserve_migrations_total`."""
    pause_p50_s: float | None = None
    """Median of the last pauses of sequences that moved; None without any."""


class StatusView(msgspec.Struct, frozen=True, kw_only=True):
    """A router's status. Lists and fields that depend on other tenants are empty for users."""

    unix_s: float
    version: str = ""
    model: str = ""
    healthy: bool = False
    uptime_s: float = 0.0
    sees_all: bool = False
    """True for an operator."""
    tenant: str = ""
    """The client's."""
    queue: QueueView = QueueView()
    recent: RecentView = RecentView()
    slowest: list[RequestView] = []
    """Slowest first: ended requests that are kept, and requests under way."""
    kept_requests: int = 0
    kept_s: float = 0.0
    """Limits of the requests that are kept: number, and seconds since their end."""
    num_workers: int = 0
    workers: list[WorkerView] = []
    num_tenants: int = 0
    tenants: list[TenantView] = []
    """The tenants with most requests."""
    errors: dict[str, int] = {}
    """Error's code -> requests since the start, refused ones included."""
    num_indexed_blocks: int = 0
    """Block hashes in the prefix index."""
    transfer_bytes_per_s: float = 0.0
    """Estimated bandwidth of KV transfers."""
    moves: MovesView = MovesView()
