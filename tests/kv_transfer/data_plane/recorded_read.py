"""Pools with known bytes, reads of them, and a listener that writes down what it hears."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np

from pdserve.common.errors import TransferFailed
from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import BlockConnector, BlockRead, BlockToRead, Grant, ReadOrder, ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import HostPool
from tests.support.run.waiting import HANG_S

BLOCK_BYTES = 4096
NUM_BLOCKS = 256
IN_TIME_S = 10.0
"""Upper bound of waits for a peer: many times the limits that these tests set, a part of the next larger one."""


def make_pool(seed: int | None = None, num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES) -> HostPool:
    """A pool of zeros, or of bytes that the seed decides."""
    size = num_blocks * block_bytes
    content = (
        bytearray(size)
        if seed is None
        else bytearray(np.random.default_rng(seed).integers(256, size=size, dtype=np.uint8))
    )
    return HostPool(memoryview(content), block_bytes, num_blocks)


class RecordedRead:
    """A `ReadListener` for one read. Checks on its own that every call keeps the contract."""

    def __init__(self, num_blocks: int) -> None:
        self.read: BlockRead | None = None
        self.landed_blocks: set[int] = set()
        self.ranges: list[tuple[int, int]] = []
        self.outcome: ReadOutcome | None = None
        self.cause: TransferFailed | None = None
        self.broken_rules: list[str] = []
        self.when_ended: Callable[[], None] = lambda: None
        self._num_blocks = num_blocks
        self._changed = threading.Condition()

    def landed(self, first: int, count: int) -> None:
        with self._changed:
            blocks = set(range(first, first + count))
            if self.outcome is not None:
                self.broken_rules.append("landed after ended")
            if count < 1 or first < 0 or first + count > self._num_blocks:
                self.broken_rules.append(f"landed({first}, {count}) of {self._num_blocks}")
            if blocks & self.landed_blocks:
                self.broken_rules.append(f"landed twice: {sorted(blocks & self.landed_blocks)}")
            self.landed_blocks |= blocks
            self.ranges.append((first, count))
            self._changed.notify_all()

    def ended(self, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        with self._changed:
            if self.outcome is not None:
                self.broken_rules.append("ended twice")
            if (cause is not None) != (outcome is ReadOutcome.FAILED):
                self.broken_rules.append(f"{outcome} with cause {cause}")
            self.outcome, self.cause = outcome, cause
        self.when_ended()
        with self._changed:
            self._changed.notify_all()

    @property
    def num_landed(self) -> int:
        with self._changed:
            return len(self.landed_blocks)

    def ends_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.outcome is not None, seconds)

    def wait_ended(self) -> ReadOutcome:
        """Wait for the end; every rule of the contract was kept until then."""
        with self._changed:
            assert self.ends_within(HANG_S), "the read does not end"
            assert self.broken_rules == []
            assert self.outcome is not None
            if self.outcome is ReadOutcome.DONE:
                assert len(self.landed_blocks) == self._num_blocks
            return self.outcome

    def wait_failed(self) -> str:
        """Wait for the end, which is a failure; its message."""
        assert self.wait_ended() is ReadOutcome.FAILED
        assert self.cause is not None
        assert self.cause.retryable
        return self.cause.message

    def wait_landed(self, num_blocks: int) -> None:
        """Wait until so many blocks have landed."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.landed_blocks) >= num_blocks, HANG_S), "nothing lands"

    def cancel(self) -> None:
        assert self.read is not None
        self.read.cancel()


class Transfer:
    """One grant of a source pool: index i is block `source_blocks[i]`."""

    def __init__(self, source: BlockConnector, pool: HostPool, source_blocks: Sequence[int], publish: bool = True):
        self.token = secrets.token_bytes(16)
        self.source_blocks = list(source_blocks)
        self.pool = pool
        self.grant: Grant = source.grant(self.token)
        if publish:
            self.grant.publish(0, self.source_blocks)

    def blocks(self, indexes: Sequence[int], local_blocks: Sequence[int]) -> list[BlockToRead]:
        """A receiver's request for these indexes, into these blocks of its own."""
        return [
            BlockToRead(
                index, XXH3.of(self.pool.block(self.source_blocks[index]), index), local, self.source_blocks[index]
            )
            for index, local in zip(indexes, local_blocks, strict=True)
        ]

    def close(self) -> threading.Event:
        """Close the grant; the event is set when it is fenced."""
        fenced = threading.Event()
        calls: list[None] = []

        def on_fenced() -> None:
            calls.append(None)
            assert len(calls) == 1, "fenced twice"
            fenced.set()

        self.grant.close(on_fenced)
        return fenced


def start_read(receiver: BlockConnector, metadata: bytes, token: bytes, blocks: Sequence[BlockToRead]) -> RecordedRead:
    """Begin a read and record it."""
    recorded = RecordedRead(len(blocks))
    recorded.read = receiver.read(ReadOrder(metadata, token, blocks), recorded)
    return recorded


def same_bytes(
    transfer: Transfer, receiver_pool: HostPool, blocks: Sequence[BlockToRead], positions: Sequence[int] | None = None
) -> bool:
    """True if these blocks of a read have the source's bytes in the receiver's pool."""
    chosen = blocks if positions is None else [blocks[position] for position in positions]
    return all(
        receiver_pool.block(block.local_block) == transfer.pool.block(transfer.source_blocks[block.index])
        for block in chosen
    )
