"""`TransferView`: one transfer in `/debug/transfers`; `TransferLog`: the last ended transfers.

Views contain workers' ids, but neither addresses nor tokens.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from pdserve.common import clock
from pdserve.common.errors import PdServeError
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer
from pdserve.kv_transfer.control.source_transfer import SourceTransfer
from pdserve.kv_transfer.control.transfer_state import (
    RECEIVER_MOVES,
    SOURCE_MOVES,
    ReceiverState,
    SourceState,
    has_ended,
)

NUM_ENDED = 128
_MAX_CAUSE = 300
_ADDRESS = re.compile(
    # each alternative is tried once per run of characters, so that the time is linear in the text's length
    r"(?:ipv[46]:)?(?:\[[0-9A-F:.]+\]|%5B(?:[^%]|%25)*%5D|\b\d{1,3}(?:\.\d{1,3}){3})(?::\d{1,5}\b)?"
    r"|(?<![\w.-])[\w.-]+:\d{1,5}\b",
    re.IGNORECASE,
)


class TransferView(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer at one side."""

    role: Literal["source", "receiver"]
    request_id: str
    """The engine's id: `request.attempt.index`."""
    peer: str
    """The other side's worker id."""
    connector: str
    """The last connector agreed upon; empty before the first attach."""
    state: str
    num_blocks_wanted: int
    """Blocks that the receiver requests; 0 until it has reserved blocks."""
    num_blocks_landed: int
    num_blocks_pinned: int
    """Blocks of the source's pool that are kept for the receiver."""
    num_blocks_quarantined: int
    """Blocks of the receiver's pool that an abandoned read may still write."""
    fallbacks: list[str]
    """Connectors that failed in this transfer, in order; empty at the source."""
    age_s: float
    """Seconds since it began, or its duration if it has ended."""
    ended_s_ago: float | None = None
    cause: str | None = None
    """The error with which it ended early."""


class TransfersPage(msgspec.Struct, frozen=True, kw_only=True):
    """`/debug/transfers`."""

    num_blocks_pinned: int
    num_blocks_quarantined: int
    under_way: list[TransferView]
    """The oldest first."""
    ended: list[TransferView]
    """The last one first."""


def source_view(transfer: SourceTransfer, num_pinned: int) -> TransferView:
    """A source's view. num_pinned: blocks that are kept for the receiver."""
    return TransferView(
        role="source",
        request_id=transfer.expected.request_id,
        peer=transfer.expected.receiver.worker_id,
        connector=transfer.connector_name,
        state=transfer.state.name,
        num_blocks_wanted=transfer.num_wanted,
        num_blocks_landed=transfer.num_landed,
        num_blocks_pinned=num_pinned,
        num_blocks_quarantined=0,
        fallbacks=[],
        age_s=_age_s(transfer.began_at),
        cause=_told(transfer.cause),
    )


def receiver_view(transfer: ReceiverTransfer) -> TransferView:
    return TransferView(
        role="receiver",
        request_id=transfer.request_id,
        peer=transfer.source.worker_id,
        connector=transfer.connector_name,
        state=transfer.state.name,
        num_blocks_wanted=transfer.num_blocks,
        num_blocks_landed=transfer.num_landed,
        num_blocks_pinned=0,
        num_blocks_quarantined=transfer.num_quarantined,
        fallbacks=list(transfer.fell_back_from),
        age_s=_age_s(transfer.began_at),
        cause=_told(transfer.cause),
    )


_ENDS = [
    *(("source", state.name.lower()) for state in SourceState if has_ended(SOURCE_MOVES, state)),
    *(("receiver", state.name.lower()) for state in ReceiverState if has_ended(RECEIVER_MOVES, state)),
]


class TransferLog:
    """The last `NUM_ENDED` ended transfers of one worker."""

    def __init__(self, now: Callable[[], float] = clock.monotonic) -> None:
        self._ended: deque[tuple[float, TransferView]] = deque(maxlen=NUM_ENDED)
        self.num_ended: dict[tuple[str, str], int] = dict.fromkeys(_ENDS, 0)
        """(role, outcome) -> transfers since start, with an entry for each possible pair."""
        self._now = now

    def add(self, view: TransferView) -> None:
        """Add an ended transfer."""
        self._ended.appendleft((self._now(), view))
        self.num_ended[view.role, view.state.lower()] += 1

    def page(self, under_way: Iterable[TransferView]) -> TransfersPage:
        views, now = sorted(under_way, key=lambda view: -view.age_s), self._now()
        return TransfersPage(
            num_blocks_pinned=sum(view.num_blocks_pinned for view in views),
            num_blocks_quarantined=sum(view.num_blocks_quarantined for view in views),
            under_way=views,
            ended=[msgspec.structs.replace(view, ended_s_ago=round(now - at, 3)) for at, view in self._ended],
        )


def without_addresses(text: str) -> str:
    """The text without `host:port` pairs and IP addresses."""
    return _ADDRESS.sub("<address>", text)


def _told(cause: PdServeError | None) -> str | None:
    return None if cause is None else f"{cause.code}: {without_addresses(cause.message)[:_MAX_CAUSE]}"


def _age_s(began_at: float) -> float:
    return round(clock.monotonic() - began_at, 3)
