"""Values exchanged between a worker and the transfers of its engine, which may run in another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from pdserve.engine.scheduler_output import RequestFailure
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer
from pdserve.kv_transfer.control.transfer_state import SourceState

T = TypeVar("T")


class TransferProperties(msgspec.Struct, frozen=True, array_like=True):
    """Properties of a worker's transfers."""

    connectors: tuple[str, ...]
    """Best first."""
    attach_port: int = 0
    """The port on which the engine's process serves `Attach`; 0: the worker's server does."""


class TransferCounts(msgspec.Struct, frozen=True, array_like=True):
    """State of a worker's transfers."""

    num_open: int = 0
    """Active transfers, as source or receiver."""
    num_expected: int = 0
    """Transfers as source that have not ended."""
    num_pinned: int = 0
    """Blocks that transfers as source keep for their receivers."""
    num_fallbacks: int = 0
    """Transfers since start that continued over another connector."""
    is_quarantine_full: bool = False
    """True if abandoned reads have blocked so much of the pool for so long that the worker receives no further blocks."""
    num_ended: Mapping[tuple[str, str], int] = {}
    """Transfers since start by (role, outcome)."""


class Receiving(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The transfer of a request's blocks makes progress, or waits for its source; see `TransferProgress`."""

    awaits_source: bool


class BlocksLanded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All blocks of a request's transfer are here, and the transfer has ended."""

    num_blocks: int
    connector: str


class SourceEnded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The transfer of a request's blocks to its receiver has ended."""

    state: SourceState
    cause: RequestFailure | None
    """The error that ended it before its receiver had all blocks."""
    index: int | None = None
    """Of the sequence that has migrated; None: the blocks are a prefill call's."""


TransferNews = Receiving | BlocksLanded | SourceEnded
"""`TransferEvent.event`."""


class ReceivedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """State at the request's end of the transfer that delivered its blocks."""

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


def typed(value: Any, kind: type[T]) -> T:
    """The value as `kind`; values from another process are converted."""
    return value if isinstance(value, kind) else msgspec.convert(value, kind)


def news_of(event: Any) -> TransferNews:
    """`TransferEvent.event` as one of its types; events from another process are converted."""
    if isinstance(event, Receiving | BlocksLanded | SourceEnded):
        return event
    news: TransferNews = msgspec.convert(event, TransferNews)
    return news
