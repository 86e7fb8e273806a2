"""`EngineHost`: the side of a worker that uses the pool, and the values between it and the side of the calls.

    EngineClient, servicers, metrics          EngineHost: engine thread, transfers, connectors
    -------------------------------           ------------------------------------------------
    add_request, release_request, ...  --->
                                       <---   EngineEvents: outputs, ends of requests and of transfers

All that is passed is a value, so the two sides may be in two processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import grpc
import msgspec

from pdserve.common.errors import PdServeError
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.engine_types import (
    EngineCoreEvent,
    EngineCoreOutputs,
    EngineCoreRequest,
    SchedulerStats,
    StreamingUpdate,
)
from pdserve.common.security.role_guard import CallerRoles
from pdserve.engine.engine_info import EngineInfo

if TYPE_CHECKING:
    from pdserve.engine.request import Request
    from pdserve.engine.request_verifier import RequestVerifier
    from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer, SourceRef
    from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer, PeerId
    from pdserve.kv_transfer.control.transfer_state import SourceState
    from pdserve.kv_transfer.control.transfer_view import TransfersPage


class HostInfo(msgspec.Struct, frozen=True, array_like=True):
    """Properties of a loaded engine and its connectors."""

    engine: EngineInfo
    layout: KvLayout
    tokenizer_fingerprint: str
    has_grammars: bool
    """False without a tokenizer: there are no structured outputs."""
    connectors: tuple[str, ...]
    """Best first."""


class TransferCounts(msgspec.Struct, frozen=True, array_like=True):
    """State of a worker's transfers."""

    num_open: int = 0
    """Active transfers, as source or receiver."""
    num_expected: int = 0
    """Transfers as source that have not ended."""
    num_pinned: int = 0
    """Blocks that sources hold for their receivers."""
    num_fallbacks: int = 0
    """Transfers that went on over another connector, since start."""
    is_quarantine_full: bool = False
    """True if so much of the pool waits for abandoned reads that nothing new is received."""
    num_ended: Mapping[tuple[str, str], int] = {}
    """Transfers since start by (role, outcome)."""


class AbortedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that the end of its call has aborted."""

    moments: dict[str, float]
    """Name -> `time.monotonic()` seconds."""
    prefill_chunks: list[tuple[float, int]]
    num_preemptions: int
    events: list[EngineCoreEvent]
    """Events since its last output."""

    @classmethod
    def of(cls, request: Request) -> AbortedRequest:
        return cls(request.moments, request.prefill_chunks, request.num_preemptions, request.events)


class ReceivedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The transfer that delivered a request's blocks, at the request's end."""

    connector_name: str
    """The last connector; empty if no source has accepted."""
    num_blocks: int
    """Blocks that were wanted; 0 if none were reserved."""
    num_landed: int
    given_up: list[str]
    """Connectors that the transfer did not use, since they failed with its source."""

    @classmethod
    def of(cls, transfer: ReceiverTransfer) -> ReceivedBlocks:
        return cls(transfer.connector_name, transfer.num_blocks, transfer.num_landed, sorted(transfer.given_up))


class RequestEnd(msgspec.Struct, frozen=True, array_like=True):
    """The engine has nothing more of a released request."""

    aborted: AbortedRequest | None = None
    """None if the request had ended by itself."""
    received: ReceivedBlocks | None = None
    """None without a transfer to this worker."""


NOTHING_MORE = RequestEnd()
"""The end of a request of which the engine has nothing to add."""


class EngineEvents(Protocol):
    """Called by an `EngineHost`, in the asyncio thread."""

    def outputs(self, outputs: EngineCoreOutputs) -> None:
        """The results of a step."""

    def receiving(self, request_id: str, awaits_source: bool) -> None:
        """The transfer of a request's blocks goes on, or waits for its source: `TransferProgress`."""

    def blocks_landed(self, request_id: str, num_blocks: int, connector: str) -> None:
        """All blocks of a request's transfer are here, and the transfer has ended."""

    def source_ended(self, request_id: str, state: SourceState, cause: PdServeError | None) -> None:
        """The transfer of a request's blocks to its receiver has ended."""

    def released(self, request_id: str, end: RequestEnd) -> None:
        """The engine has nothing more of a request, of which `release_request` was called. Follows its last outputs."""

    def died_with(self, cause: PdServeError) -> None:
        """The engine has failed, or its process has ended. The last call."""


class EngineHost(Protocol):
    """Used in the asyncio thread. Commands return at once; an error of a request ends that request."""

    @property
    def info(self) -> HostInfo: ...

    @property
    def verifier(self) -> RequestVerifier:
        """The engine's rules for requests."""

    @property
    def tick(self) -> int: ...

    @property
    def ticked_at(self) -> float:
        """When the tick last moved, `time.monotonic()` seconds."""

    @property
    def stats(self) -> SchedulerStats:
        """State of the engine after its last step."""

    @property
    def counts(self) -> TransferCounts: ...

    def subscribe(self, events: EngineEvents) -> None:
        """Call `events` from now on. One subscriber, before the start."""

    def begin_transfers(self, identity: PeerId) -> None:
        """The worker has this identity; before the start."""

    def add_attach(self, server: grpc.aio.Server, callers: CallerRoles) -> None:
        """Add `KvSourceService` to a worker's server; after `begin_transfers`. callers: checks of the roles of callers."""

    async def start(self) -> None:
        """Start the engine and warm it up. Returns early if it dies."""

    async def close(self) -> None:
        """End all of it; waits. May be called without a start, and again."""

    def kill(self) -> None:
        """The engine is stuck: log the stacks of its process, and end that if it is another one than this. Any thread."""

    def add_request(self, request: EngineCoreRequest, transfer: ExpectedTransfer | SourceRef | None) -> None:
        """Queue a request that `verifier` has passed. transfer: where its blocks go, or come from; None: nowhere."""

    def resume_request(self, update: StreamingUpdate) -> None:
        """Queue a session's next turn, which `verifier` has passed."""

    def release_request(self, request_id: str) -> None:
        """Abort a request and its transfer, unless they have ended; `EngineEvents.released` follows."""

    def abort_request(self, request_id: str) -> None:
        """Abort a request, unless it has ended."""

    def end_sequence(self, request_id: str, index: int, turn: int | None) -> None:
        """One of a request's sequences, or this turn of a session, has ended where its text is made."""

    def fail_idle_sessions(self, cause: PdServeError) -> None:
        """End sessions that are between two turns."""

    def fail_requests(self, cause: PdServeError) -> None:
        """End all requests."""

    def revoke_transfers(self, cause: PdServeError) -> None:
        """End all transfers as source."""

    def meet(self, worker_id: str, epoch: int, address: str) -> None:
        """A peer has started: prepare to be its peer. address: one that `PeerChannels` allows."""

    async def add_lora(self, folder: str) -> str:
        """Read and check the adapter in a PEFT folder, if it is new or has changed, beside the steps; returns its fingerprint.

        Raises: ConfigError naming the file, the field or tensor, and the value; UnsupportedModel for what is not served.
        """

    async def remove_lora(self, folder: str) -> None:
        """Forget the adapter in a folder. Sequences that run with it end with it."""

    async def transfers(self) -> TransfersPage:
        """Transfers under way, and those that ended recently."""
