"""Both ends of a transfer without a network: a connector, streams and owners that record their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.common.errors import PdServeError, TransferFailed
from pdserve.common.security.block_digest import BlockDigest
from pdserve.kv_transfer.connector import BlockToRead, ReadListener, ReadOrder, ReadOutcome
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer, SourceRef
from pdserve.kv_transfer.control.source_transfer import (
    ExpectedTransfer,
    LeaseLimits,
    PeerId,
    PublishedRange,
    SourceResult,
    SourceTransfer,
)
from pdserve.kv_transfer.control.transfer_state import SourceState
from pdserve.kv_transfer.control.transfer_view import TransferView
from pdserve.kv_transfer.heads.head_groups import GroupSource
from pdserve.kv_transfer.memory.pool_memory import PoolMemory

RECEIVER = PeerId("decode-1", 11)
DIGEST = b"d" * 16
TRANSFER_ID = b"t" * 16
WHERE = [GroupSource(b"where", b"k" * 16)]
"""Whole blocks of one rank."""
NUM_PROMPT_BLOCKS = 64


async def turns() -> None:
    """Let everything happen that needs no time."""
    for _ in range(8):
        await asyncio.sleep(0)


LIMITS = LeaseLimits(attach_timeout_s=0.15, grace_s=0.1, max_s=5.0)
Heard = list[tuple[Any, ...]]


class FakeGrant:
    """A grant that is fenced by the test, or at once with `fence_at_once`."""

    def __init__(self, fence_at_once: bool) -> None:
        self.published: dict[int, int] = {}
        self.closed = False
        self._fence_at_once = fence_at_once
        self._waiting: list[Callable[[], None]] = []

    def publish(self, first_index: int, blocks: Sequence[int]) -> None:
        self.published.update(enumerate(blocks, first_index))

    def close(self, on_fenced: Callable[[], None]) -> None:
        assert not self.closed, "a grant was closed twice"
        self.closed = True
        if self._fence_at_once:
            on_fenced()
        else:
            self._waiting.append(on_fenced)

    def fence(self) -> None:
        for call in self._waiting:
            call()


class FakeRead:
    """A read controlled by the test."""

    def __init__(self, token: bytes, blocks: list[BlockToRead], listener: ReadListener, digest: BlockDigest) -> None:
        self.digest = digest
        self.token, self.blocks, self.listener = token, blocks, listener
        self.num_cancels = 0

    def cancel(self) -> None:
        self.num_cancels += 1

    @property
    def indexes(self) -> list[int]:
        return [block.index for block in self.blocks]

    def land(self, first: int = 0, count: int | None = None) -> None:
        self.listener.landed(first, len(self.blocks) - first if count is None else count)

    def end(self, outcome: ReadOutcome = ReadOutcome.DONE, cause: TransferFailed | None = None) -> None:
        self.listener.ended(outcome, cause)


class FakeConnector:
    name = "fake"
    metadata = b"where"

    def __init__(self, fence_at_once: bool = True) -> None:
        self.grants: dict[bytes, FakeGrant] = {}
        self.reads: list[FakeRead] = []
        self._fence_at_once = fence_at_once

    def serve(self, pool: PoolMemory, landing: PoolMemory | None = None) -> None: ...

    def grant(self, token: bytes, parts: int = 1) -> FakeGrant:
        grant = self.grants[token] = FakeGrant(self._fence_at_once)
        return grant

    def read(self, order: ReadOrder, listener: ReadListener) -> FakeRead:
        read = FakeRead(order.token, list(order.blocks), listener, order.digest)
        self.reads.append(read)
        return read

    def close(self) -> None: ...


@dataclass
class SourceOwner:
    """`SourceEvents`."""

    heard: Heard = field(default_factory=list)
    num_cached: int = 0
    """What `look_up` finds."""

    async def look_up(self, request_id: str, block_hashes: tuple[bytes, ...]) -> int:
        self.heard.append(("look_up", len(block_hashes)))
        return min(self.num_cached, len(block_hashes))

    def began(self, transfer: SourceTransfer) -> None:
        self.heard.append(("began",))

    def wanted(self, transfer: SourceTransfer, first_index: int) -> None:
        self.heard.append(("wanted", first_index))

    def ended(self, transfer: SourceTransfer) -> None:
        assert ("ended",) not in self.heard, "ended was called twice"
        self.heard.append(("ended",))


@dataclass
class SourceEnd:
    """`SourceStream`."""

    heard: Heard = field(default_factory=list)

    def published(self, blocks: PublishedRange) -> None:
        self.heard.append(("published", blocks.first_index, blocks.digests))

    def finished(self, result: SourceResult, request_digest: bytes) -> None:
        self.heard.append(("finished", result.num_tokens, result.token_ids, request_digest))

    def replaced(self) -> None:
        self.heard.append(("replaced",))

    def ended(self, state: SourceState, cause: PdServeError | None) -> None:
        self.heard.append(("ended", state, cause.message if cause is not None else None))


@dataclass
class ReceiverOwner:
    """`ReceiverEvents`."""

    heard: Heard = field(default_factory=list)

    def offered(self, transfer: ReceiverTransfer, num_blocks: int) -> None:
        self.heard.append(("offered", num_blocks))

    def landed(self, transfer: ReceiverTransfer, num_blocks: int) -> None:
        self.heard.append(("landed", num_blocks))

    def source_finished(self, transfer: ReceiverTransfer, num_tokens: int, token_ids: tuple[int, ...]) -> None:
        self.heard.append(("source_finished", num_tokens, token_ids))

    def failed(self, transfer: ReceiverTransfer, cause: PdServeError) -> None:
        assert "failed" not in self.words, "failed was called twice"
        self.heard.append(("failed", type(cause).__name__))

    def fenced(self, transfer: ReceiverTransfer) -> None:
        assert "fenced" not in self.words, "fenced was called twice"
        self.heard.append(("fenced",))

    @property
    def words(self) -> list[str]:
        return [words[0] for words in self.heard]


@dataclass
class ReceiverEnd:
    """`ControlStream`."""

    heard: Heard = field(default_factory=list)

    def want(self, first_index: int, num_blocks: int) -> None:
        self.heard.append(("want", first_index, num_blocks))

    def landed(self, num_blocks: int) -> None:
        self.heard.append(("landed", num_blocks))

    def release(self) -> None:
        self.heard.append(("release",))

    def close(self) -> None:
        self.heard.append(("close",))


def expected(transfer_id: bytes = TRANSFER_ID, lease_s: float = 5.0, request_id: str = "r.0.0") -> ExpectedTransfer:
    return ExpectedTransfer(transfer_id, request_id, RECEIVER, DIGEST, lease_s, NUM_PROMPT_BLOCKS)


def source_ref() -> SourceRef:
    return SourceRef("prefill-1", 7, "127.0.0.1:1", TRANSFER_ID, DIGEST)


def make_view(**changes: Any) -> TransferView:
    fields: dict[str, Any] = {
        "role": "receiver", "request_id": "r.0.0", "peer": "prefill-1", "connector": "tcp", "state": "RECEIVING",
        "num_blocks_wanted": 4, "num_blocks_landed": 2, "num_blocks_pinned": 0, "num_blocks_quarantined": 0,
        "fallbacks": [], "age_s": 0.5,
    }  # fmt: skip
    return TransferView(**(fields | changes))
