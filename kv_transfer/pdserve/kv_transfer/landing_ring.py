"""`RingConnector`: reads into a small ring of memory, and moves verified blocks from there into a device's pool.

    read --> batches, as slots are free --> inner connector --> ring: verified --move_in--> pool --> `landed`

Unverified bytes never reach the pool, and a read that cannot be cancelled can only spoil slots: its own end is reported as soon as
no move is under way, while the slots stay out of use until the inner connector has reported the end of its last read. Of a
receiver's memory, only the ring is registered with the network.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import (
    BlockConnector,
    BlockRead,
    BlockToRead,
    Grant,
    ReadListener,
    ReadOrder,
    ReadOutcome,
    SupportsPeerEviction,
    SupportsPeerWarmup,
)
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.memory.device_pool import DevicePool
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.kv_transfer.pull.block_reader import verify_read

PEER_SHARE = 4
"""One peer's reads hold at most one part in 4 of the ring, and peers with more than one batch hold half of it in all."""
BATCHES_PER_SHARE = 4
"""A batch is at most one part in 4 of a peer's share: while one is moved, the next ones travel."""


@dataclass(eq=False)
class _Batch:
    """Blocks `first..first + len(slots) - 1` of a read, and the slots that they are read into."""

    read: _RingRead
    first: int
    slots: list[int]
    out: set[int] = field(init=False)
    """Positions of slots that are not free again."""
    inner: BlockRead | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.out = set(range(len(self.slots)))

    def landed(self, first: int, count: int) -> None:
        """As `ReadListener.landed`, of the inner read."""
        self.read.connector.mover.call_soon(lambda: self.read.connector.move(self, first, count))

    def ended(self, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        """As `ReadListener.ended`, of the inner read."""
        self.read.connector.mover.call_soon(lambda: self.read.connector.batch_ended(self, outcome, cause))


@dataclass(eq=False)
class _RingRead:
    """A `BlockRead`. Its fields change under the connector's lock; `has_ended` only on the mover's thread."""

    connector: RingConnector
    order: ReadOrder
    """Parts of blocks take a slot each."""
    listener: ReadListener
    next: int = field(default=0, init=False)
    """First block that no batch has."""
    batches: list[_Batch] = field(default_factory=list, init=False)
    is_stopped: bool = field(default=False, init=False)
    """True: no further batch begins, and nothing more is moved."""
    has_ended: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """As `BlockRead.cancel`."""
        self.connector.stop(self, ReadOutcome.CANCELLED, None)


class RingConnector:
    """A `BlockConnector` that reads for another one. Thread-safe; copies run on a thread of their own."""

    def __init__(
        self, inner: BlockConnector, pool: DevicePool, ring: Tensor, landing: PoolMemory, slot_wait_s: float
    ) -> None:
        """ring: `[num_slots, ...]`; landing: the same bytes as the inner connector writes them. slot_wait_s: longest time without a
        free slot, after which a read fails."""
        self.name = inner.name
        self.mover = EventThread(f"{inner.name}-mover")
        self._inner = inner
        self._pool = pool
        self._ring = ring
        self._landing = landing
        self._slot_wait_s = slot_wait_s
        num_slots = landing.num_blocks
        self._share = max(1, num_slots // PEER_SHARE)
        self._batch_blocks = max(1, self._share // BATCHES_PER_SHARE)
        self._lock = threading.RLock()
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: dict[bytes, int] = {}
        """Peer's metadata -> slots that its reads hold."""
        self._waiting: list[_RingRead] = []
        """Reads with blocks that no batch has, in the order of their turns."""
        self._closed = False

    # ---- BlockConnector

    def serve(self, pool: PoolMemory, landing: PoolMemory | None = None) -> None:
        """As `BlockConnector.serve`; blocks land in the ring."""
        if landing is not None:
            raise ValueError("a ring has its own memory to land in")
        self._inner.serve(pool, self._landing)

    @property
    def metadata(self) -> bytes:
        return self._inner.metadata

    def grant(self, token: bytes, parts: int = 1) -> Grant:
        """As `BlockConnector.grant`."""
        return self._inner.grant(token, parts)

    def read(self, order: ReadOrder, listener: ReadListener) -> BlockRead:
        """As `BlockConnector.read`."""
        if not order.blocks:
            return self._inner.read(replace(order, unused=None), listener)
        read = _RingRead(self, order, listener)
        try:
            verify_read(order.token, order.blocks, self._pool.num_blocks * order.parts)
        except TransferFailed as error:
            self.stop(read, ReadOutcome.FAILED, error)
            return read
        with self._lock:
            if self._closed:
                self.stop(read, ReadOutcome.CANCELLED, None)
                return read
            self._waiting.append(read)
            self._begin_batches()
        self._limit_wait(read)
        return read

    def close(self) -> None:
        """As `BlockConnector.close`."""
        with self._lock:
            self._closed = True
            reads = list(self._waiting)
        for read in reads:
            read.cancel()
        self._inner.close()
        self.mover.close()

    def meet(self, worker_id: str, epoch: int) -> None:
        """As `SupportsPeerWarmup.meet`."""
        if isinstance(self._inner, SupportsPeerWarmup):
            self._inner.meet(worker_id, epoch)

    def forget(self, metadata: bytes) -> None:
        """As `SupportsPeerEviction.forget`."""
        if isinstance(self._inner, SupportsPeerEviction):
            self._inner.forget(metadata)

    # ---- slots

    @property
    def num_free(self) -> int:
        """Free slots."""
        with self._lock:
            return len(self._free)

    def _begin_batches(self) -> None:
        """Give free slots to reads in turn, one batch each. Called under the lock."""
        queue, without_room = deque(self._waiting), []
        while queue and self._free:
            read = queue.popleft()
            if read.is_stopped:
                continue
            if count := self._room_for(read):
                self._begin_batch(read, count)
                if read.next < len(read.order.blocks):
                    queue.append(read)
            else:
                without_room.append(read)
        self._waiting = [*without_room, *queue]

    def _room_for(self, read: _RingRead) -> int:
        """Blocks of the next batch: a whole one, or the rest of the read, so that no batch of single blocks begins; 0 to wait."""
        wanted = min(self._batch_blocks, len(read.order.blocks) - read.next)
        held = self._held.get(read.order.metadata, 0)
        room = min(len(self._free), self._share - held)
        if held:
            # half of the ring is for peers that hold nothing: a few slow peers must not stop all others
            room = min(room, len(self._free) - self._landing.num_blocks // 2)
        return wanted if wanted <= room and not read.is_stopped else 0

    def _begin_batch(self, read: _RingRead, count: int) -> None:
        slots = sorted(self._free.pop() for _ in range(count))
        self._held[read.order.metadata] = self._held.get(read.order.metadata, 0) + count
        batch = _Batch(read, read.next, slots)
        read.batches.append(batch)
        part = read.order.blocks[read.next : read.next + count]
        read.next += count
        into_slots = [
            BlockToRead(block.index, block.digest, slot * read.order.parts, block.location)
            for block, slot in zip(part, slots, strict=True)
        ]
        batch.inner = self._inner.read(replace(read.order, blocks=into_slots, unused=None), batch)

    def _give_back(self, batch: _Batch, positions: Sequence[int]) -> None:
        """Free slots that no read writes any more."""
        with self._lock:
            freed = [batch.slots[position] for position in positions if position in batch.out]
            batch.out.difference_update(positions)
            self._free.extend(reversed(freed))
            held = self._held.get(batch.read.order.metadata, 0) - len(freed)
            if held > 0:
                self._held[batch.read.order.metadata] = held
            else:
                self._held.pop(batch.read.order.metadata, None)
            self._begin_batches()

    def _limit_wait(self, read: _RingRead) -> None:
        """Fail the read if none of its blocks got a slot for too long."""
        with self._lock:
            before = read.next
            if read.is_stopped or before == len(read.order.blocks):
                return

        def look() -> None:
            with self._lock:
                is_stuck = read.next == before and not read.batches
            if is_stuck:
                limit = f"{self._slot_wait_s:g} s"
                self.stop(read, ReadOutcome.FAILED, TransferFailed(f"no memory to receive into was free for {limit}"))
            else:
                self._limit_wait(read)

        self.mover.call_later(self._slot_wait_s, look)

    # ---- on the mover's thread

    def move(self, batch: _Batch, first: int, count: int) -> None:
        """Bring verified blocks of a batch into the pool, and report them."""
        read = batch.read
        if read.is_stopped:
            return  # the slots are freed when the batch ends
        positions = range(first, first + count)
        start = batch.first + first
        targets = [block.local_block for block in read.order.blocks[start : start + count]]
        try:
            ring = self._ring.view(len(self._ring) * read.order.parts, -1)
            slots = [batch.slots[position] * read.order.parts for position in positions]
            self._pool.divided(read.order.parts).move_in(ring, slots, targets, read.order.unused)
        except Exception as error:  # of the device's driver
            self.stop(read, ReadOutcome.FAILED, TransferFailed(f"blocks could not be copied to the device: {error}"))
            return
        read.listener.landed(start, count)
        self._give_back(batch, positions)

    def batch_ended(self, batch: _Batch, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        """Free a batch's slots, which its read writes no more; the last batch ends the read."""
        read = batch.read
        with self._lock:
            read.batches.remove(batch)
            # of a stopped read, blocks may not have been moved, and its end is queued already
            is_complete = not read.batches and read.next == len(read.order.blocks) and not read.is_stopped
        self._give_back(batch, range(len(batch.slots)))
        if outcome is not ReadOutcome.DONE:
            self.stop(read, outcome, cause)
        elif is_complete:
            self._end(read, ReadOutcome.DONE, None)

    def stop(self, read: _RingRead, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        """End a read early, from any thread. Its end is reported after the move that is under way."""
        with self._lock:
            if read.is_stopped:
                return
            read.is_stopped = True
            active = [batch.inner for batch in read.batches if batch.inner is not None]
        for inner in active:
            inner.cancel()
        self.mover.call_soon(lambda: self._end(read, outcome, cause))

    def _end(self, read: _RingRead, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        if not read.has_ended:
            read.has_ended = read.is_stopped = True
            read.listener.ended(outcome, cause)
