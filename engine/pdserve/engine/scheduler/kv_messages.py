"""Messages between engine and transfers, and `KvOutbox`, which sends them.

Only the engine thread touches block tables and request states; only the transfer side touches sockets. They exchange
these values over two queues and share nothing else. A late, repeated or unknown event is counted and dropped.

    out of the engine                                 into the engine
    -----------------                                 ---------------
    ReceiveInto    blocks are reserved: pull          Landed          the first blocks are here, verified
    StopReceiving  return the holds                   SourceFinished  the source is done: count, first token
    Settled        these blocks are final             ReceiveFailed   the transfer is over, with its cause
    Missed         `Want` too late: compute again     HoldReturned    no read or write of these is under way
    Found          so many blocks are cached here     Want            the receiver has reserved blocks: publish
    Migrating      a sequence has ended, for another worker to continue
                                                      Revoke          the transfer ended before release
                                                      Lookup          what does the prefix cache have of these
                                                      Offered         another worker has so many blocks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import PdServeError
from pdserve.common.request.engine_types import Migration
from pdserve.engine.kv_cache.block_pool import PinnedBlocks


@dataclass(frozen=True, slots=True)
class ReceiveInto:
    """Receive blocks with the numbers `[first_index, first_index + len(hold))` in the prompt's `TransferOrder` into `hold`."""

    request_id: str
    first_index: int
    hold: PinnedBlocks
    device_event: DeviceEvent | None = None
    """On a GPU, the event that must complete before bytes are written: a step of the blocks' last owner may still write them."""


@dataclass(frozen=True, slots=True)
class StopReceiving:
    """The request has ended or lost its blocks: return every hold once no read can write it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Settled:
    """Blocks with the numbers `[first_index, first_index + len(hold))` are final and pinned by `hold` until it is returned."""

    request_id: str
    first_index: int
    hold: PinnedBlocks
    device_event: DeviceEvent | None = None
    """On a GPU, the event that must complete before the bytes are read."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Source side: `Want` arrived after the sequence ended and its blocks were reused. It must be computed again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Found:
    """Source side: the answer to `Lookup`. `Want` may follow; the blocks are not pinned before."""

    request_id: str
    num_blocks: int
    """Places from the first; 0: nothing is known of the request any more."""


@dataclass(frozen=True, slots=True)
class Migrating:
    """A sequence has ended here, and another worker is to continue it: `Want` may follow. Its blocks are not pinned before."""

    request_id: str
    """Of the sequence."""
    core_request_id: str
    """Of the request to which it belongs."""
    index: int
    migration: Migration


OutOfEngine = ReceiveInto | StopReceiving | Settled | Missed | Found | Migrating


@dataclass(frozen=True, slots=True)
class Landed:
    """The first `num_blocks` blocks of `ReceiveInto` have arrived and are verified; the number only grows."""

    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SourceFinished:
    """The source computed the whole prompt; the transfer side has compared block count and request digest."""

    request_id: str
    num_tokens: int
    token_ids: tuple[int, ...]
    """The first output token of each of the request's sequences, sampled at the source."""


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The transfer failed. A request with `remote_prefill` ends with `cause`, and the router decides about another attempt; what
    another one lacks is computed here."""

    request_id: str
    cause: PdServeError


@dataclass(frozen=True, slots=True)
class HoldReturned:
    """A hold is returned: no read or write of these blocks is under way."""

    request_id: str
    hold: PinnedBlocks


@dataclass(frozen=True, slots=True)
class Want:
    """Source side: the receiver has reserved blocks for those from `first_index` on."""

    request_id: str
    first_index: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Source side: the transfer ended before release; its request ends if it still computes."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Lookup:
    """Source side: another worker asks for the blocks with these hashes, the first of a sequence. `Found` answers."""

    request_id: str
    """Of the transfer, not of a request here."""
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Offered:
    """The sequence's `block_source` has its first `num_blocks` blocks."""

    request_id: str
    num_blocks: int


IntoEngine = Landed | SourceFinished | ReceiveFailed | HoldReturned | Want | Revoke | Lookup | Offered


class KvOutbox(Protocol):
    """Sends the scheduler's messages to the transfer side. Implemented by the worker's `KvTransferManager`."""

    def send(self, message: OutOfEngine) -> None:
        """Called by the engine thread; returns at once and raises nothing."""


class NoTransfers:
    """The `KvOutbox` of an engine without transfers. Raises: RuntimeError for any message."""

    def send(self, message: OutOfEngine) -> None:
        raise RuntimeError(f"an engine without transfers sent {type(message).__name__}")
