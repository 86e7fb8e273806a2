"""`RemoteWorker`: the router's view of a worker: identity, state, load, and the calls that this router has open there."""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from pdserve.common import clock
from pdserve.common.kv_events import WorkerKey
from pdserve.common.net.service_channel import ServiceChannel
from pdserve.common.request.known_adapters import NO_ADAPTERS, KnownAdapters
from pdserve.common.request.wire.step_wire import max_bulk_bytes
from pdserve.common.worker_identity import WorkerIdentity, WorkerRole
from pdserve.router.workers.step_stream import StepStream
from pdserve.router.workers.step_times import StepTimes

REPORT_LAG_S = 0.25
"""Greatest age of a load report on arrival, seconds: calls that ended within it may still be counted there."""


class WorkerState(enum.Enum):
    """LIVE: may get requests. DRAINING: finishes its requests. DEAD: lost; a reconnect makes another `RemoteWorker`."""

    LIVE = "live"
    DRAINING = "draining"
    DEAD = "dead"


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load report, sent every second."""

    engine_tick: int = 0
    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_remote_kv: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens still to compute."""
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_in_use: int = 0
    num_sessions: int = 0
    """Streaming sessions, also between turns."""
    max_sessions: int = 0
    """Most sessions; 0 if not reported, or none."""
    max_waiting: int = 0
    """Most waiting requests, including those for remote KV; 0 if not reported."""
    loaded_adapters: tuple[str, ...] = ()
    """Fingerprints of the adapters that have a slot on its device."""
    prefill_tokens_per_s: float = 0.0
    """Tokens per second beyond a step's constant cost; 0: unknown."""
    role: WorkerRole | None = None
    """What may be placed there now; None: the role of its identity."""
    num_other_calls: int = 0
    """Open calls of the other role, from before a change."""


class LoadEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a worker's load."""

    calls: int = 0
    tokens: int = 0
    """Prompt tokens to compute."""
    all_blocks: int = 0
    """Held blocks, with shared blocks counted per request."""
    new_blocks: int = 0
    """Held blocks, without those that were cached before."""

    def __add__(self, other: LoadEstimate) -> LoadEstimate:
        return LoadEstimate(
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            all_blocks=self.all_blocks + other.all_blocks,
            new_blocks=self.new_blocks + other.new_blocks,
        )

    def __sub__(self, other: LoadEstimate) -> LoadEstimate:
        return LoadEstimate(
            calls=self.calls - other.calls,
            tokens=self.tokens - other.tokens,
            all_blocks=self.all_blocks - other.all_blocks,
            new_blocks=self.new_blocks - other.new_blocks,
        )


_POOLING_CALLS = 64
"""Calls for embeddings, classes and scores that are open at a worker, at most: a request may have thousands of inputs, and a worker
refuses calls when too many wait there."""


_MIGRATIONS = 4
"""Sequences that leave a worker at a time, while blocks are read ahead: more would share the same bandwidth."""


class Movable(Protocol):
    """An attempt at a decode worker that another one can continue."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens that its sequences have, together."""

    def move(self) -> None:
        """Begin to move it; no effect if that has begun."""

    def stay(self) -> None:
        """Give a move up whose sequences have not been told to leave."""


class RemoteWorker:
    """One connection to one epoch of a worker. A restart, and also a reconnect, makes another `RemoteWorker`."""

    def __init__(
        self,
        identity: WorkerIdentity,
        channel: ServiceChannel,
        load: WorkerLoad | None = None,
        adapters: KnownAdapters = NO_ADAPTERS,
    ) -> None:
        self.identity = identity
        self.adapters = adapters
        """LoRA adapters that requests may name there."""
        self.channel = channel
        length = identity.max_model_len
        self.step_times = StepTimes()
        """From `time_steps` on."""
        self.step_stream = StepStream(channel, str(self), length)
        """Calls whose requests and answers are small."""
        self.bulk_stream = StepStream(channel, str(self), length, max_bulk_bytes(length, identity.vocab_size))
        """Calls with large requests or answers, sessions and embeddings, for which nothing in the step stream waits."""
        self.pooling_room = asyncio.Semaphore(_POOLING_CALLS)
        """Taken by each call for an embedding while it is open; the others wait for it."""
        self.migration_room = asyncio.Semaphore(_MIGRATIONS)
        """Taken for each sequence that leaves, until its blocks have been read ahead."""
        self.movable: set[Movable] = set()
        """Attempts that it decodes; they begin to move when it drains, or takes the prefill role."""
        self.load = load or WorkerLoad()
        self.prefill_tokens_per_s = self.load.prefill_tokens_per_s
        """The last rate that it has reported; 0: none."""
        self.role = self.load.role or identity.role
        """What may be placed there now: a worker may change its role within an epoch. None for a role that this router does not
        know."""
        self.role_changed_at = -math.inf
        """`clock.monotonic()` of the last change that this router has seen."""
        self.state = WorkerState.DRAINING if self.load.draining else WorkerState.LIVE
        self.cause_of_death = ""
        self.stalled = False
        """True if it is DEAD because its engine made no progress, and not because its connection broke."""
        self.joined_at = clock.monotonic()
        self.died_at = math.inf
        self.num_in_flight = 0
        """Open calls of this router."""
        self.num_placed = 0
        """All calls that this router has opened."""
        self._own = LoadEstimate()
        """Load of this router's open calls: held blocks and tokens to compute."""
        self._own_reported = LoadEstimate()
        """The part of `_own` that the last report may include."""
        self._ended_lately: deque[tuple[float, LoadEstimate]] = deque()
        self._on_lost: set[Callable[[RemoteWorker], None]] = set()

    def __str__(self) -> str:
        return f"{self.identity.worker_id} ({self.identity.address}, epoch {self.identity.epoch:016x})"

    @property
    def role_name(self) -> str:
        """For logs."""
        return self.role.value if self.role is not None else "unknown"

    @property
    def key(self) -> WorkerKey:
        """(worker_id, epoch)."""
        return self.identity.key

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens to compute: those of this router, and those that its last report showed in addition."""
        return self._own.tokens + max(0, self.load.num_waiting_tokens - self._own_reported.tokens)

    @property
    def num_requests(self) -> int:
        """Number of requests: those of this router, and those that its last report showed in addition."""
        reported = self.load.num_running + self.load.num_waiting + self.load.num_remote_kv
        return self._own.calls + max(0, reported - self._own_reported.calls)

    @property
    def has_full_queue(self) -> bool:
        """True if the worker would refuse a request, by its last report."""
        load = self.load
        return 0 < load.max_waiting <= load.num_waiting + load.num_remote_kv

    @property
    def has_all_sessions(self) -> bool:
        """True if the worker would refuse a session, by its last report."""
        return 0 < self.load.max_sessions <= self.load.num_sessions

    @property
    def num_blocks(self) -> int:
        """Blocks of its pool, of all KV cache groups together."""
        return self.identity.num_blocks // self.identity.layout.num_groups

    def num_sequence_tokens(self, num_tokens: int, num_encoder_tokens: int) -> int:
        """Tokens of a prompt after the positions of an encoder, which are padded to a full block."""
        block_size = self.identity.layout.block_size
        return -(-num_encoder_tokens // block_size) * block_size + num_tokens

    def num_prompt_blocks(self, num_tokens: int, num_cached: int = 0) -> int:
        """Blocks of a prompt after the first `num_cached` that the next token attends to, in units of `num_blocks`."""
        layout = self.identity.layout
        return -(-layout.num_prompt_blocks(num_tokens, num_cached) // layout.num_groups)

    @property
    def held_blocks(self) -> int:
        """Blocks in use, of all KV cache groups together: those that this router's calls added, and those that its last report
        showed beyond theirs."""
        in_use = -(-self.load.blocks_in_use // self.identity.layout.num_groups)
        return self._own.new_blocks + max(0, in_use - self._own_reported.all_blocks)

    def time_steps(self) -> None:
        """Fill `step_times` from now on; no effect when called again."""
        self.step_stream.on_step = self._step_arrived

    def _step_arrived(self, num_sequences: int) -> None:
        self.step_times.arrived(num_sequences, clock.monotonic())

    def report(self, load: WorkerLoad) -> None:
        """Apply a load report. The part above this router's own account is the work of other routers."""
        self.load = load
        self.prefill_tokens_per_s = load.prefill_tokens_per_s or self.prefill_tokens_per_s
        self._forget_ended()
        self._own_reported = sum((share for _, share in self._ended_lately), self._own)
        if (role := load.role or self.identity.role) is not self.role:
            self.role, self.role_changed_at = role, clock.monotonic()
            if not self.sequences_leave:
                for each in list(self.movable):
                    each.stay()
        if self.state is not WorkerState.DEAD:
            self.state = WorkerState.DRAINING if load.draining else WorkerState.LIVE
            self._move_if_leaving()

    def refuse_more(self) -> None:
        """Set DRAINING at once, before the next load report, because the worker refused a request."""
        if self.state is WorkerState.LIVE:
            self.state = WorkerState.DRAINING
            self._move_if_leaving()

    @property
    def sequences_leave(self) -> bool:
        """True if running sequences leave for other decode workers."""
        return self.state is WorkerState.DRAINING or self.role is not WorkerRole.DECODE

    def _move_if_leaving(self) -> None:
        if self.sequences_leave:
            for each in list(self.movable):
                each.move()

    def mark_lost(self, cause: str, *, stalled: bool = False) -> None:
        """Set DEAD and call all subscribers, once. stalled: True if the engine made no progress although the connection works."""
        if self.state is WorkerState.DEAD:
            return
        self.state, self.cause_of_death = WorkerState.DEAD, cause
        self.stalled, self.died_at = stalled, clock.monotonic()
        callbacks, self._on_lost = self._on_lost, set()
        for on_lost in callbacks:
            on_lost(self)
        self.step_stream.close()
        self.bulk_stream.close()

    def subscribe_lost(self, on_lost: Callable[[RemoteWorker], None]) -> Callable[[], None]:
        """Call `tell` when the worker is lost; the returned function unsubscribes."""
        self._on_lost.add(on_lost)
        return lambda: self._on_lost.discard(on_lost)

    def reserve(self, share: LoadEstimate) -> LoadReservation:
        """Count one call until the returned reservation ends."""
        return LoadReservation(self, share)

    def _open(self, share: LoadEstimate) -> None:
        self.num_in_flight += 1
        self.num_placed += 1
        self._own += share

    def _end(self, share: LoadEstimate) -> None:
        self._own -= share
        self._forget_ended()
        self._ended_lately.append((clock.monotonic(), share))

    def _forget_ended(self) -> None:
        before = clock.monotonic() - REPORT_LAG_S
        while self._ended_lately and self._ended_lately[0][0] < before:
            self._ended_lately.popleft()


class LoadReservation:
    """One call in the router's own account of a worker. Repeated calls of a method have no effect."""

    __slots__ = ("_share", "_worker")

    def __init__(self, worker: RemoteWorker, share: LoadEstimate) -> None:
        self._worker = worker
        self._share: LoadEstimate | None = share
        worker._open(share)

    def computed(self) -> None:
        """Remove the tokens of the computed prompt; its blocks remain held."""
        if self._share is not None and self._share.tokens:
            tokens = LoadEstimate(tokens=self._share.tokens)
            self._share -= tokens
            self._worker._end(tokens)

    def end(self) -> None:
        if self._share is not None:
            share, self._share = self._share, None
            self._worker.num_in_flight -= 1
            self._worker._end(share)
