"""A worker as the router sees it: who it is, how it does, whether it lives, and what this router has given it."""

from __future__ import annotations

import enum
from collections.abc import Callable

import grpc.aio
import msgspec

from pdserve.common.kv_layout import KvLayout


class WorkerRole(enum.Enum):
    """What a worker is for."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> WorkerRole:
        return WorkerRole.DECODE if self is WorkerRole.PREFILL else WorkerRole.PREFILL


class WorkerState(enum.Enum):
    """LIVE may be given work; DRAINING keeps what it has; DEAD is final for this life of the worker."""

    LIVE = "live"
    DRAINING = "draining"
    DEAD = "dead"


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker said about itself in the first message of its watch."""

    worker_id: str
    epoch: int
    role: WorkerRole | None
    """None for a role that this router does not know."""
    protocol_version: int
    address: str
    """host:port that peers should use."""
    layout: KvLayout
    tokenizer_fingerprint: str
    key_check: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    connectors: tuple[str, ...] = ()
    max_local_prefill_tokens: int | None = None


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says each second."""

    engine_tick: int = 0
    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_remote_kv: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens still to compute."""
    blocks_total: int = 0
    blocks_free: int = 0
    prefill_tokens_per_s: float = 0.0


class Worker:
    """One life of one worker: a restart makes another `Worker`."""

    def __init__(self, identity: WorkerIdentity, channel: grpc.aio.Channel, load: WorkerLoad | None = None) -> None:
        self.identity = identity
        self.channel = channel
        self.load = load or WorkerLoad()
        self.state = WorkerState.DRAINING if self.load.draining else WorkerState.LIVE
        self.cause_of_death = ""
        self.num_in_flight = 0
        """Legs that this router has open here."""
        self.num_placed = 0
        """Legs that this router has ever opened here."""
        self._report = 0
        self._unreported_tokens = 0
        self._unreported_legs = 0
        self._mourners: set[Callable[[Worker], None]] = set()

    def __str__(self) -> str:
        return f"{self.identity.worker_id} ({self.identity.address}, epoch {self.identity.epoch:016x})"

    @property
    def key(self) -> tuple[str, int]:
        """(worker_id, epoch): names this life."""
        return self.identity.worker_id, self.identity.epoch

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens to compute here: as last reported, and what was placed since."""
        return self.load.num_waiting_tokens + self._unreported_tokens

    @property
    def num_requests(self) -> int:
        """Requests here: as last reported, and what was placed since."""
        return self.load.num_running + self.load.num_waiting + self.load.num_remote_kv + self._unreported_legs

    def report(self, load: WorkerLoad) -> None:
        """Take the worker's own word on its load; it covers what this router placed before."""
        self.load = load
        self._report += 1
        self._unreported_tokens = self._unreported_legs = 0
        if self.state is not WorkerState.DEAD:
            self.state = WorkerState.DRAINING if load.draining else WorkerState.LIVE

    def refuse_more(self) -> None:
        """The worker said that it drains, before its next load did."""
        if self.state is WorkerState.LIVE:
            self.state = WorkerState.DRAINING

    def die(self, cause: str) -> None:
        """The end of this life: whoever has a leg here is told, at once and once."""
        if self.state is WorkerState.DEAD:
            return
        self.state, self.cause_of_death = WorkerState.DEAD, cause
        mourners, self._mourners = self._mourners, set()
        for tell in mourners:
            tell(self)

    def tell_death(self, tell: Callable[[Worker], None]) -> Callable[[], None]:
        """Have `tell` called when the worker dies; the returned function ends that."""
        self._mourners.add(tell)
        return lambda: self._mourners.discard(tell)

    def book(self, num_tokens: int) -> Booking:
        """Count one leg with `num_tokens` to prefill, until the booking ends."""
        return Booking(self, num_tokens)


class Booking:
    """One leg in the router's own account of a worker. `end` may be called again, which does nothing."""

    __slots__ = ("_num_tokens", "_open", "_report", "_worker")

    def __init__(self, worker: Worker, num_tokens: int) -> None:
        self._worker, self._num_tokens, self._open = worker, num_tokens, True
        self._report = worker._report
        worker.num_in_flight += 1
        worker.num_placed += 1
        worker._unreported_legs += 1
        worker._unreported_tokens += num_tokens

    def end(self) -> None:
        if not self._open:
            return
        self._open = False
        worker = self._worker
        worker.num_in_flight -= 1
        if worker._report == self._report:
            worker._unreported_legs -= 1
            worker._unreported_tokens -= self._num_tokens
