"""Connections to one peer, each with a reader thread that takes windows from the peer's queue.

A reader connects before it takes a window, so that a read that is cancelled while a connection is being made ends at once.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from pdserve.common import clock
from pdserve.common.errors import TransferFailed
from pdserve.common.security.block_digest import XXH3, BlockDigest
from pdserve.kv_transfer.connector import BlockToRead, ReadListener
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.kv_transfer.pull.connection import Connection, ConnectionBroken
from pdserve.kv_transfer.pull.digest import matching
from pdserve.kv_transfer.pull.read_queue import QueuedRead, ReadQueue, Window
from pdserve.kv_transfer.totals import Totals

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """Limits for one peer."""

    max_readers: int
    """Most reader threads at once. A thread starts when there is work for it."""
    window_blocks: int
    """Most blocks in one window at first; a short read may wait for one window per reader."""
    longest_window_blocks: int
    """Most blocks in one window while windows arrive quickly; see `ReadQueue`."""
    in_flight_blocks: int
    """Most blocks of one read in flight."""
    idle_close_s: float
    """Seconds without work after which a reader closes its connection and ends."""

    def for_parts(self, parts: int) -> PeerLimits:
        """The same bytes in parts of blocks."""
        return replace(
            self,
            window_blocks=self.window_blocks * parts,
            longest_window_blocks=self.longest_window_blocks * parts,
            in_flight_blocks=self.in_flight_blocks * parts,
        )


class PeerConnections:
    """The reader threads of one peer and the queue that they serve. Thread-safe.

    peer: its name, for errors and logs. connect: makes a connection within a bounded time, or raises TransferFailed.
    """

    def __init__(
        self,
        peer: str,
        pool: PoolMemory,
        limits: PeerLimits,
        counters: Totals,
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
        self.readers: set[_ReaderThread] = set()
        """Readers that take windows. An ending reader is only in `_threads` until its thread ends."""
        self.is_retired = False
        """True if readers end as soon as they have no work; reset by the next read."""
        self.used_at = clock.monotonic()
        """`clock.monotonic()` of the last call of `read`."""
        self._threads: set[threading.Thread] = set()
        self._call_soon = call_soon
        self._names = (f"{thread_name}-{number}" for number in itertools.count())

    @property
    def is_idle(self) -> bool:
        """True if no thread runs, so that no read is active."""
        with self.queue.changed:
            return not self._threads

    @property
    def is_resting(self) -> bool:
        """True if connections are open and no read is active."""
        with self.queue.changed:
            return bool(self.readers) and not self.queue.num_reads

    def close_idle(self) -> None:
        """Close idle connections now, and others after their reads. Returns at once."""
        with self.queue.changed:
            self.is_retired = True
            self.queue.changed.notify_all()

    def read(
        self, token: bytes, blocks: Sequence[BlockToRead], listener: ReadListener, digest: BlockDigest = XXH3
    ) -> QueuedRead:
        """Begin a read of at least one block, all within the pool. Must not follow `close`."""
        with self.queue.changed:
            self.is_retired, self.used_at = False, clock.monotonic()
            read = self.queue.add(token, blocks, listener, digest)
            num_free = sum(reader.is_free for reader in self.readers)
            room = self.limits.max_readers - len(self.readers)
            for _ in range(min(room, self.queue.num_pending - num_free)):
                self._start_reader()
            return read

    def close(self) -> None:
        """End all reads with CANCELLED, close all connections, join all threads. Idempotent."""
        with self.queue.changed:
            self.closed = True
            threads = list(self._threads)
            self.queue.changed.notify_all()
        self.queue.cancel_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start_reader(self) -> None:
        reader = _ReaderThread(self)
        thread = threading.Thread(target=self._run, args=(reader,), name=next(self._names), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("no thread for a reader to %s: %s", self.peer, error)
            if not self.readers:
                cause = TransferFailed(f"no thread to read from {self.peer}: {error}")
                self._call_soon(lambda: self.queue.fail_pending(cause))
            return
        self.readers.add(reader)
        self._threads.add(thread)

    def _run(self, reader: _ReaderThread) -> None:
        try:
            reader.run()
        finally:
            with self.queue.changed:
                self._threads.discard(threading.current_thread())

    def _interrupt(self, read: QueuedRead) -> None:
        for reader in self.readers:
            reader.interrupt(read)


class _ReaderThread:
    """One connection and its thread. `_window`, `_interrupted` and `_closes_connection` change under the queue's lock."""

    def __init__(self, connections: PeerConnections) -> None:
        self._connections = connections
        self._queue = connections.queue
        self._connection: Connection | None = None
        self._connected_at = 0.0
        self._has_served = False
        """True if the connection has delivered a window."""
        self._window: Window | None = None
        self._interrupted = False
        self._closes_connection = False

    @property
    def is_free(self) -> bool:
        """True if the reader has no window and will take one soon. Called under the queue's lock."""
        return self._window is None and not self._closes_connection

    def interrupt(self, read: QueuedRead) -> None:
        """Stop the current window if it belongs to this read. Called under the queue's lock."""
        if self._window is not None and self._window.read is read and self._connection is not None:
            self._interrupted |= self._connection.interrupt()

    def run(self) -> None:
        cause = TransferFailed(f"reading from {self._connections.peer} failed")
        try:
            while self._wait_for_work():
                if self._connection is None:
                    self._connection = self._connections.connect()
                    self._connected_at, self._has_served = clock.monotonic(), False
                    self._connections.counters.add(connections=1)
                if (taken := self._take(self._connection)) is not None:
                    self._move(*taken)
        except TransferFailed as error:
            cause = error
        finally:
            self._leave(cause)

    def _wait_for_work(self) -> bool:
        with self._queue.changed:
            if not self._has_work():
                self._queue.changed.wait_for(self._has_work_or_leaves, self._connections.limits.idle_close_s)
            if self._connections.closed or not self._queue.num_pending:
                # under the same lock, so that a read that is added later does not count this reader as free
                self._connections.readers.discard(self)
                return False
            return True

    def _has_work(self) -> bool:
        return self._connections.closed or self._queue.num_pending > 0

    def _has_work_or_leaves(self) -> bool:
        return self._has_work() or self._connections.is_retired

    def _take(self, connection: Connection) -> tuple[Window, Iterator[int]] | None:
        with self._queue.changed:
            window = self._window = self._queue.take()
            if window is not None:
                return window, connection.fetch(window.read.token, window.blocks)
            if not self._connections.closed and self._queue.num_pending:
                # every pending read waits for windows in flight at other readers, whose end notifies
                self._queue.changed.wait(self._connections.limits.idle_close_s)
            return None

    def _move(self, window: Window, fetching: Iterator[int]) -> None:
        blocks = window.blocks
        verdicts: list[bool] = []
        cause: TransferFailed | None = None
        began = clock.monotonic()
        try:
            for received in fetching:
                verdicts += matching(self._connections.pool, blocks[len(verdicts) : received], window.read.digest)
            self._queue.pace(window, clock.monotonic() - began)
        except TransferFailed as error:
            cause = error
        except Exception as error:
            logger.exception("reading from %s failed", self._connections.peer)
            cause = ConnectionBroken(f"reading from {self._connections.peer} failed: {error}")
        is_stale = isinstance(cause, ConnectionBroken) and cause.is_unanswered and self._is_kept(window.read)
        self._has_served |= cause is None
        self._release(is_broken=isinstance(cause, ConnectionBroken))
        if is_stale:
            self._connections.counters.add(stale_connections=1)
            self._queue.give_back(window)
        else:
            self._verify(window, verdicts, cause)

    def _is_kept(self, read: QueuedRead) -> bool:
        """True if the peer may have ended since the connection was known to work, so that its end says nothing of the peer now.

        Connections that are made during the read must serve before their end is forgiven, so a read does not try forever.
        """
        return self._has_served or self._connected_at < read.began_at

    def _release(self, is_broken: bool) -> None:
        # before the queue records the window's end, so that a read that ends by it does not interrupt this reader's next window
        with self._queue.changed:
            self._window = None
            is_broken = is_broken or self._interrupted
            self._interrupted = False
            self._closes_connection = (
                is_broken  # closing may take long; another reader serves reads that arrive meanwhile
            )
        if is_broken and self._connection is not None:
            self._connection.close()
            self._connection = None
            with self._queue.changed:
                self._closes_connection = False

    def _verify(self, window: Window, verdicts: Sequence[bool], cause: TransferFailed | None) -> None:
        landed = _runs(verdicts, True, window.first)
        unmatched = _runs(verdicts, False, window.first)
        if cause is None and unmatched and window.is_reread:
            index = window.read.blocks[unmatched[0][0]].index
            cause = TransferFailed(
                f"block {index} from {self._connections.peer} does not match its digest, nor did it when read before"
            )
        self._connections.counters.add(
            blocks_landed=sum(verdicts),
            blocks_reread=0 if cause else len(verdicts) - sum(verdicts),
            failed_windows=1 if cause else 0,
        )
        if cause is not None:
            self._queue.fail(window, landed, cause)
        else:
            rereads = [Window(window.read, first, count, is_reread=True) for first, count in unmatched]
            self._queue.finish(window, landed, rereads)

    def _leave(self, cause: TransferFailed) -> None:
        if self._connection is not None:
            self._connection.close()
        with self._queue.changed:
            if self not in self._connections.readers:
                return
            self._connections.readers.discard(self)
            is_last = not self._connections.readers
            # another connected reader may take the work
            self._queue.changed.notify()
        logger.info("a reader to %s ended: %s", self._connections.peer, cause)
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
