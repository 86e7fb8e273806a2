"""Lanes to one peer: each a thread with its own wire, that takes window after window from the peer's queue.

A lane connects before it takes a window, so a read that is cancelled while a connection is being made ends at once.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.block_digest import XXH3, BlockDigest
from pdserve.kv_transfer.connector import BlockToRead, PoolMemory, ReadListener
from pdserve.kv_transfer.pull.connection import Connection, ConnectionBroken
from pdserve.kv_transfer.pull.digest import matching
from pdserve.kv_transfer.pull.read_queue import QueuedRead, ReadQueue, Window

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReadCounters:
    """What came over all lanes of a connector, counted up. Thread-safe."""

    blocks_landed: int = 0
    blocks_reread: int = 0
    connections: int = 0
    stale_connections: int = 0
    failed_windows: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, landed: int = 0, reread: int = 0, connections: int = 0, stale: int = 0, failed: int = 0) -> None:
        with self._lock:
            self.blocks_landed += landed
            self.blocks_reread += reread
            self.connections += connections
            self.stale_connections += stale
            self.failed_windows += failed


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How much one peer gets."""

    max_lanes: int
    """Most lanes at once. They start when there is work for them."""
    window_blocks: int
    """Most blocks in one window at first: what a short read may have to wait for on each lane."""
    longest_window_blocks: int
    """Most blocks in one window while windows come quickly; see `ReadQueue`."""
    in_flight_blocks: int
    """Most blocks of one read in flight."""
    idle_close_s: float
    """A lane that had no work for so long closes its wire and ends."""

    @classmethod
    def of_bytes(
        cls,
        block_bytes: int,
        *,
        max_lanes: int,
        window_bytes: int,
        longest_window_bytes: int,
        in_flight_bytes: int,
        idle_close_s: float,
    ) -> ConnectionLimits:
        """As many whole blocks as go into so many bytes, and at least one."""
        return cls(
            max_lanes=max_lanes,
            window_blocks=max(1, window_bytes // block_bytes),
            longest_window_blocks=max(1, longest_window_bytes // block_bytes),
            in_flight_blocks=max(1, in_flight_bytes // block_bytes),
            idle_close_s=idle_close_s,
        )


class PeerConnections:
    """The lanes to one peer and the queue that they serve. Thread-safe.

    peer: its name, for errors and logs. connect: makes a wire within a bounded time, or raises TransferFailed.
    """

    def __init__(
        self,
        peer: str,
        pool: PoolMemory,
        limits: ConnectionLimits,
        counters: ReadCounters,
        connect: Callable[[], Connection],
        call_soon: Callable[[Callable[[], None]], None],
        thread_name: str,
    ) -> None:
        self.peer = peer
        self.pool = pool
        self.limits = limits
        self.counters = counters
        self.connect = connect
        self.queue = ReadQueue(
            limits.window_blocks, limits.longest_window_blocks, limits.in_flight_blocks, self._interrupt, call_soon
        )
        self.closed = False
        self.lanes: set[_ReaderThread] = set()
        """Those that take windows. One that leaves has still its last words to say: it is in `_threads` until then."""
        self.is_retired = False
        """Lanes leave as soon as they have nothing to do; until a read comes."""
        self.used_at = time.monotonic()
        """When the last read came."""
        self._threads: set[threading.Thread] = set()
        self._call_soon = call_soon
        self._names = (f"{thread_name}-{number}" for number in itertools.count())

    @property
    def is_idle(self) -> bool:
        """No thread runs; so no read is under way."""
        with self.queue.changed:
            return not self._threads

    @property
    def is_resting(self) -> bool:
        """A wire is kept for which there is no read."""
        with self.queue.changed:
            return bool(self.lanes) and not self.queue.num_reads

    def close_idle(self) -> None:
        """Give up wires that have nothing to do at once, others when their reads have ended. Returns at once."""
        with self.queue.changed:
            self.is_retired = True
            self.queue.changed.notify_all()

    def read(
        self, token: bytes, blocks: Sequence[BlockToRead], listener: ReadListener, digest: BlockDigest = XXH3
    ) -> QueuedRead:
        """Begin a read of at least one block, all within the pool. Not after `close`."""
        with self.queue.changed:
            self.is_retired, self.used_at = False, time.monotonic()
            read = self.queue.add(token, blocks, listener, digest)
            num_free = sum(lane.is_free for lane in self.lanes)
            room = self.limits.max_lanes - len(self.lanes)
            for _ in range(min(room, self.queue.num_pending - num_free)):
                self._start_lane()
            return read

    def close(self) -> None:
        """End all reads with CANCELLED, close all wires, join all threads. Idempotent."""
        with self.queue.changed:
            self.closed = True
            threads = list(self._threads)
            self.queue.changed.notify_all()
        self.queue.cancel_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start_lane(self) -> None:
        lane = _ReaderThread(self)
        thread = threading.Thread(target=self._run, args=(lane,), name=next(self._names), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("no thread for a lane to %s: %s", self.peer, error)
            if not self.lanes:
                cause = TransferFailed(f"no thread to read from {self.peer}: {error}")
                self._call_soon(lambda: self.queue.fail_pending(cause))
            return
        self.lanes.add(lane)
        self._threads.add(thread)

    def _run(self, lane: _ReaderThread) -> None:
        try:
            lane.run()
        finally:
            with self.queue.changed:
                self._threads.discard(threading.current_thread())

    def _interrupt(self, read: QueuedRead) -> None:
        for lane in self.lanes:
            lane.interrupt(read)


class _ReaderThread:
    """One wire and the thread that uses it. `_window`, `_interrupted` and `_closes_wire` change under the queue's lock."""

    def __init__(self, lanes: PeerConnections) -> None:
        self._lanes = lanes
        self._queue = lanes.queue
        self._wire: Connection | None = None
        self._window: Window | None = None
        self._interrupted = False
        self._closes_wire = False

    @property
    def is_free(self) -> bool:
        """It moves no window, and will look for one soon. Asked under the queue's lock."""
        return self._window is None and not self._closes_wire

    def interrupt(self, read: QueuedRead) -> None:
        """Stop the window under way if it is one of this read. Called under the queue's lock."""
        if self._window is not None and self._window.read is read and self._wire is not None:
            self._interrupted |= self._wire.interrupt()

    def run(self) -> None:
        cause = TransferFailed(f"reading from {self._lanes.peer} failed")
        try:
            while self._wait_for_work():
                if self._wire is None:
                    self._wire = self._lanes.connect()
                    self._lanes.counters.add(connections=1)
                if (taken := self._take(self._wire)) is not None:
                    self._move(*taken)
        except TransferFailed as error:
            cause = error
        finally:
            self._leave(cause)

    def _wait_for_work(self) -> bool:
        with self._queue.changed:
            if not self._has_work():
                self._queue.changed.wait_for(self._has_work_or_leaves, self._lanes.limits.idle_close_s)
            if self._lanes.closed or not self._queue.num_pending:
                # In the same breath: a read that is added from now on must not count on this lane.
                self._lanes.lanes.discard(self)
                return False
            return True

    def _has_work(self) -> bool:
        return self._lanes.closed or self._queue.num_pending > 0

    def _has_work_or_leaves(self) -> bool:
        return self._has_work() or self._lanes.is_retired

    def _take(self, wire: Connection) -> tuple[Window, Iterator[int]] | None:
        with self._queue.changed:
            window = self._window = self._queue.take()
            if window is not None:
                return window, wire.fetch(window.read.token, window.blocks)
            if not self._lanes.closed and self._queue.num_pending:
                # All that is pending waits for windows in flight on other lanes; their end notifies.
                self._queue.changed.wait(self._lanes.limits.idle_close_s)
            return None

    def _move(self, window: Window, fetching: Iterator[int]) -> None:
        blocks = window.blocks
        verdicts: list[bool] = []
        cause: TransferFailed | None = None
        began = time.monotonic()
        try:
            for received in fetching:
                verdicts += matching(self._lanes.pool, blocks[len(verdicts) : received], window.read.digest)
            self._queue.pace(window, time.monotonic() - began)
        except TransferFailed as error:
            cause = error
        except Exception as error:
            logger.exception("reading from %s failed", self._lanes.peer)
            cause = ConnectionBroken(f"reading from {self._lanes.peer} failed: {error}")
        self._release(is_broken=isinstance(cause, ConnectionBroken))
        if isinstance(cause, ConnectionBroken) and cause.stale:
            self._lanes.counters.add(stale=1)
            self._queue.give_back(window)
        else:
            self._verify(window, verdicts, cause)

    def _release(self, is_broken: bool) -> None:
        # Before the queue hears of the window's end: what that ends must not interrupt this lane's next window.
        with self._queue.changed:
            self._window = None
            is_broken = is_broken or self._interrupted
            self._interrupted = False
            self._closes_wire = is_broken  # which may take long: reads that come meanwhile are for another lane
        if is_broken and self._wire is not None:
            self._wire.close()
            self._wire = None
            with self._queue.changed:
                self._closes_wire = False

    def _verify(self, window: Window, verdicts: Sequence[bool], cause: TransferFailed | None) -> None:
        landed = _runs(verdicts, True, window.first)
        unmatched = _runs(verdicts, False, window.first)
        if cause is None and unmatched and window.is_reread:
            index = window.read.blocks[unmatched[0][0]].index
            cause = TransferFailed(
                f"block {index} from {self._lanes.peer} does not match its digest, nor did it when read before"
            )
        self._lanes.counters.add(
            landed=sum(verdicts),
            reread=0 if cause else len(verdicts) - sum(verdicts),
            failed=1 if cause else 0,
        )
        if cause is not None:
            self._queue.fail(window, landed, cause)
        else:
            rereads = [Window(window.read, first, count, is_reread=True) for first, count in unmatched]
            self._queue.finish(window, landed, rereads)

    def _leave(self, cause: TransferFailed) -> None:
        if self._wire is not None:
            self._wire.close()
        with self._queue.changed:
            if self not in self._lanes.lanes:
                return
            self._lanes.lanes.discard(self)
            is_last = not self._lanes.lanes
            # Another lane may be connected; then the work is its.
            self._queue.changed.notify()
        logger.info("a lane to %s ended: %s", self._lanes.peer, cause)
        if is_last:
            self._queue.fail_pending(cause)


def _runs(verdicts: Sequence[bool], wanted: bool, offset: int) -> list[tuple[int, int]]:
    """(first, count) of each run of `wanted`, with `offset` added to the first."""
    if wanted not in verdicts:
        return []
    runs: list[tuple[int, int]] = []
    position = offset
    for verdict, group in itertools.groupby(verdicts):
        count = sum(1 for _ in group)
        if verdict is wanted:
            runs.append((position, count))
        position += count
    return runs
