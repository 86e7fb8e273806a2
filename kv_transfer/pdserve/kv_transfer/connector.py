"""`BlockConnector`, the interface of data planes: in terms of block numbers and peers, without requests.

    source                                     receiver
    ------                                     --------
    serve(pool)                                serve(pool)
    grant(token)  -> Grant
    grant.publish(first_index, blocks)
                                               read(order, listener) -> BlockRead
                                                   listener.landed(...)   as verified ranges come in
                                                   listener.ended(...)    exactly once
    grant.close(on_fenced)
    close()                                    close()

Every implementation passes `tests/kv_transfer/data_plane/connector_contract.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import TransferFailed
from pdserve.common.security.block_digest import XXH3, BlockDigest
from pdserve.kv_transfer.memory.pool_memory import PoolMemory


@dataclass(frozen=True, slots=True)
class BlockToRead:
    """One block of a transfer to read."""

    index: int
    """Index in the transfer, in blocks from the start of the prompt."""
    digest: int
    """The digest of its bytes, as the source published it."""
    local_block: int
    """The block of the receiver's pool that its bytes are written to."""
    location: int = 0
    """The source's block number; only connectors that read memory directly use it."""


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """What one read reads, and from where."""

    metadata: bytes
    """Describes the peer: its connector's `metadata`."""
    token: bytes
    """That of the peer's grant."""
    blocks: Sequence[BlockToRead]
    digest: BlockDigest = XXH3
    """Verifies the blocks."""
    unused: DeviceEvent | None = None
    """The event after which no step of an earlier owner writes the local blocks; None on a host, where steps are done when their
    blocks are free."""
    parts: int = 1
    """The local blocks are those of the pool divided into `parts` (`PoolMemory.divided`); `location` counts parts of that size,
    too."""
    source_parts: int = 1
    """Number of such parts in a block of the source."""


class ReadOutcome(enum.Enum):
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ReadListener(Protocol):
    """Called by a read, on a transport thread; returns quickly and raises nothing."""

    def landed(self, first: int, count: int) -> None:
        """`blocks[first : first + count]` of the read have arrived and are verified. Each block is reported once; ranges in any
        order."""

    def ended(self, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        """Called exactly once, last: this read writes no byte into the pool any more. cause: set with FAILED."""


class BlockRead(Protocol):
    """A read that has begun."""

    def cancel(self) -> None:
        """Stop the read as soon as it is safe; `ended` follows, unless it was called before. Never blocks; may be called again."""


class Grant(Protocol):
    """Permission to read the published blocks of one transfer, for the holder of one token. Kept by the source."""

    def publish(self, first_index: int, blocks: Sequence[int]) -> None:
        """Publish the source's block `blocks[i]` as index `first_index + i`. The blocks must not change until fenced."""

    def close(self, on_fenced: Callable[[], None]) -> None:
        """Begin no new read; `on_fenced` is called once, from any thread, when no byte of the blocks is sent any more."""


class BlockConnector(Protocol):
    """A method of moving blocks between two processes. Thread-safe."""

    name: str

    def serve(self, pool: PoolMemory, landing: PoolMemory | None = None) -> None:
        """Register memory and serve peers. Called once, before all other methods.

        pool: what peers read. landing: what reads write, if that is not the pool. Raises: ConfigError if an address is not
        available, or the memory is of a kind that this connector cannot read or write.
        """

    @property
    def metadata(self) -> bytes:
        """The metadata that a peer needs to read from this process; at most 64 KiB."""

    def grant(self, token: bytes, parts: int = 1) -> Grant:
        """A new grant. token: 16 random bytes that the source drew for this transfer. parts: the blocks that it publishes are those
        of the pool divided into `parts` (`PoolMemory.divided`).

        Raises: ValueError if the token is already granted.
        """

    def read(self, order: ReadOrder, listener: ReadListener) -> BlockRead:
        """Start to read blocks; returns at once. Every error, malformed metadata included, is reported through `listener.ended`."""

    def close(self) -> None:
        """End all reads (listeners get CANCELLED), grants and threads, and close all ports. Idempotent."""


@runtime_checkable
class SupportsPeerWarmup(Protocol):
    """A connector that prepares for peers before the first read."""

    def meet(self, worker_id: str, epoch: int) -> None:
        """Prepare for a peer that has started. Returns at once; may be repeated."""


@runtime_checkable
class SupportsPeerEviction(Protocol):
    """A connector that keeps resources per peer."""

    def forget(self, metadata: bytes) -> None:
        """Free the resources of an ended peer. Returns at once; if the peer still runs, later reads make them again."""
