"""Messages between engine and transfers, and `KvOutbox`, by which the scheduler sends them.

Only the engine thread touches block tables and request states; only the transfer side touches sockets. They exchange
these values over two queues and share nothing else. A late, repeated or unknown event is counted and dropped.

    out of the engine                                 into the engine
    -----------------                                 ---------------
    ReceiveInto    blocks are reserved: pull          Landed          the first blocks are here, verified
    StopReceiving  return the holds                   SourceFinished  the source is done: count, first token
    Settled        these blocks are final             ReceiveFailed   the transfer is over, with its cause
    Missed         `Want` too late: compute again     HoldReturned    no read or write of these is under way
                                                      Want            the receiver has reserved blocks: publish
                                                      Revoke          the transfer ended before release
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdserve.common.errors import PdServeError
from pdserve.engine.kv_cache.block_pool import PinnedBlocks


@dataclass(frozen=True, slots=True)
class ReceiveInto:
    """Blocks `[first_index, first_index + len(hold))` of the prompt may be written into `hold`."""

    request_id: str
    first_index: int
    hold: PinnedBlocks


@dataclass(frozen=True, slots=True)
class StopReceiving:
    """The request has ended, or has no blocks: return every hold when it is safe."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Settled:
    """Blocks `[first_index, first_index + len(hold))` are final and pinned by `hold` until it is returned."""

    request_id: str
    first_index: int
    hold: PinnedBlocks
    device_event: object | None = None
    """On a GPU: what must have completed before the bytes are read."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Source side: `Want` came for a sequence that has ended and whose blocks were reused. It must be computed again."""

    request_id: str


OutOfEngine = ReceiveInto | StopReceiving | Settled | Missed


@dataclass(frozen=True, slots=True)
class Landed:
    """The first `num_blocks` of the blocks received into are here and verified; grows."""

    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SourceFinished:
    """The source computed the whole prompt; the sender of this has compared count and request digest."""

    request_id: str
    num_tokens: int
    token_ids: tuple[int, ...]
    """The first output token of each of the request's sequences, sampled at the source."""


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The transfer failed; the request ends with `cause`, and the router decides about another attempt."""

    request_id: str
    cause: PdServeError


@dataclass(frozen=True, slots=True)
class HoldReturned:
    """A hold is returned: no read or write of these blocks is under way."""

    request_id: str
    hold: PinnedBlocks


@dataclass(frozen=True, slots=True)
class Want:
    """Source side: the receiver has reserved room for the blocks from `first_index` on."""

    request_id: str
    first_index: int


@dataclass(frozen=True, slots=True)
class Revoke:
    """Source side: the transfer ended before release; a request that still computes for it ends."""

    request_id: str


IntoEngine = Landed | SourceFinished | ReceiveFailed | HoldReturned | Want | Revoke


class KvOutbox(Protocol):
    """Takes the scheduler's messages to the transfer side. Implemented by the worker's `KvTransferManager`."""

    def send(self, message: OutOfEngine) -> None:
        """Called by the engine thread; returns at once and raises nothing."""


class NoTransfers:
    """The `KvOutbox` of an engine without transfers: nothing is ever sent to it."""

    def send(self, message: OutOfEngine) -> None:
        raise RuntimeError(f"an engine without transfers sent {type(message).__name__}")
