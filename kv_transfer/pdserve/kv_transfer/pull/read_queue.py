"""Reads from one peer: cut into windows, served round robin, ended exactly once.

blocks of a read   |-- window --|-- window --|-- window --|      a window: consecutive indexes, <= window_blocks
queue of a peer    read A, read B, read C, A, B, C ...           one window each turn, so none waits for another

Each window costs a request, an answer and wake-ups of threads. Windows therefore grow while they arrive within `QUICK_S`, and
shrink when they take longer than `SLOW_S`: this bounds the wait of a short read in time on a slow network, and in bytes on a fast
one.

READING --(all landed)--------------------------------> ENDED  (DONE)
READING --(cancel, failure)--> DRAINING --(no window in flight)--> ENDED  (CANCELLED, FAILED)
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pdserve.common import clock
from pdserve.common.errors import InternalError, TransferFailed
from pdserve.common.security.block_digest import XXH3, BlockDigest
from pdserve.kv_transfer.connector import BlockToRead, ReadListener, ReadOutcome
from pdserve.kv_transfer.event_thread import run_guarded

QUICK_S = 2.5e-3
SLOW_S = 10e-3


class ReadState(enum.Enum):
    READING = "reading"
    DRAINING = "draining"
    ENDED = "ended"


LEGAL_MOVES: dict[ReadState, frozenset[ReadState]] = {
    ReadState.READING: frozenset({ReadState.DRAINING, ReadState.ENDED}),
    ReadState.DRAINING: frozenset({ReadState.ENDED}),
    ReadState.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive blocks of one read that are sent in one answer."""

    read: QueuedRead
    first: int
    """Position of its first block in `read.blocks`."""
    count: int
    is_reread: bool = False
    """True if the blocks were read before and their digests did not match; they are not read a third time."""

    @property
    def blocks(self) -> Sequence[BlockToRead]:
        return self.read.blocks[self.first : self.first + self.count]


@dataclass(eq=False)
class QueuedRead:
    """A `BlockRead` of a `ReadQueue`. Its fields change only under the queue's lock."""

    _queue: ReadQueue
    token: bytes
    blocks: Sequence[BlockToRead]
    listener: ReadListener
    digest: BlockDigest
    began_at: float = field(default_factory=clock.monotonic, init=False)
    state: ReadState = field(default=ReadState.READING, init=False)
    outcome: ReadOutcome = field(default=ReadOutcome.DONE, init=False)
    cause: TransferFailed | None = field(default=None, init=False)
    pending: deque[Window] = field(default_factory=deque, init=False)
    in_flight: int = field(default=0, init=False)

    def cancel(self) -> None:
        """As `BlockRead.cancel`."""
        self._queue.cancel(self)

    def move(self, to: ReadState) -> None:
        if to not in LEGAL_MOVES[self.state]:
            raise InternalError(f"a read cannot change from {self.state.value} to {to.value}")
        self.state = to


class ReadQueue:
    """The reads from one peer. Thread-safe; listeners are called on reader threads or by `call_soon`, never locked.

    window_blocks: most blocks in one window at first, and on a slow network.
    longest_window_blocks: most blocks in one window on a fast network.
    in_flight_blocks: most blocks of one read in flight; a read with none in flight may always begin a window.
    interrupt: makes readers of a window of this read stop soon; called under the queue's lock; must not block.
    call_soon: runs a call on another thread.
    """

    def __init__(
        self,
        window_blocks: int,
        longest_window_blocks: int,
        in_flight_blocks: int,
        interrupt: Callable[[QueuedRead], None],
        call_soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self.changed = threading.Condition()
        self.window_blocks = window_blocks
        """Current limit of blocks in one window. Changes under the lock."""
        self._shortest_blocks = window_blocks
        self._longest_blocks = longest_window_blocks
        self._in_flight_blocks = in_flight_blocks
        self._interrupt = interrupt
        self._call_soon = call_soon
        self._turns: deque[QueuedRead] = deque()
        self._reads: set[QueuedRead] = set()

    @property
    def num_pending(self) -> int:
        """Number of windows that no reader has taken. Called under the lock."""
        return sum(-(-window.count // self.window_blocks) for read in self._turns for window in read.pending)

    @property
    def num_reads(self) -> int:
        """Number of reads that have not ended. Called under the lock."""
        return len(self._reads)

    def add(
        self, token: bytes, blocks: Sequence[BlockToRead], listener: ReadListener, digest: BlockDigest = XXH3
    ) -> QueuedRead:
        """Begin a read of at least one block. Called under the lock."""
        read = QueuedRead(self, token, blocks, listener, digest)
        read.pending.extend(_successive(read))
        self._reads.add(read)
        self._turns.append(read)
        self.changed.notify(self.num_pending)
        return read

    def take(self) -> Window | None:
        """The next window to read; None if none may begin. Called under the lock."""
        for _ in range(len(self._turns)):
            read = self._turns.popleft()
            window = read.pending[0]
            count = min(window.count, self.window_blocks)
            if read.in_flight and read.in_flight + count > self._in_flight_blocks:
                self._turns.append(read)
                continue
            read.pending.popleft()
            if count < window.count:
                read.pending.appendleft(replace(window, first=window.first + count, count=window.count - count))
                window = replace(window, count=count)
            read.in_flight += window.count
            if read.pending:
                self._turns.append(read)
            return window
        return None

    def pace(self, window: Window, seconds: float) -> None:
        """Adapt the window size to the duration of a window; windows shorter than usual are ignored."""
        with self.changed:
            if window.count == self.window_blocks and seconds < QUICK_S:
                self.window_blocks = min(2 * window.count, self._longest_blocks)
            elif window.count >= self.window_blocks and seconds > SLOW_S:
                self.window_blocks = max(self.window_blocks // 2, self._shortest_blocks)

    def give_back(self, window: Window) -> None:
        """Return a window of which no byte arrived; it becomes the next of its read, unless the read has ended."""
        self._settle(window, [window], None)

    def finish(self, window: Window, landed: Sequence[tuple[int, int]], unmatched: Sequence[Window]) -> None:
        """Report the landed blocks of a window, and queue blocks with a wrong digest again."""
        for first, count in landed:
            self._report(window.read, first, count)
        self._settle(window, unmatched, None)

    def fail(self, window: Window, landed: Sequence[tuple[int, int]], cause: TransferFailed) -> None:
        """Fail a window that did not arrive completely; nothing writes into its blocks any more."""
        for first, count in landed:
            self._report(window.read, first, count)
        self._settle(window, (), cause)

    def fail_pending(self, cause: TransferFailed) -> None:
        """Fail every read with waiting windows, because the peer cannot be reached."""
        with self.changed:
            ended = [read for read in list(self._turns) if self._drain(read, ReadOutcome.FAILED, cause)]
        for read in ended:
            self._notify_end(read)

    def cancel(self, read: QueuedRead) -> None:
        """End a read; no effect if it is ending."""
        with self.changed:
            ended = self._drain(read, ReadOutcome.CANCELLED, None)
        if ended:
            self._call_soon(lambda: self._notify_end(read))

    def cancel_all(self) -> None:
        with self.changed:
            reads = list(self._reads)
        for read in reads:
            self.cancel(read)

    def _report(self, read: QueuedRead, first: int, count: int) -> None:
        # a draining read needs no reports; checked without the lock, since a late report is harmless
        if read.state is ReadState.READING or read.outcome is ReadOutcome.FAILED:
            run_guarded(lambda: read.listener.landed(first, count))

    def _settle(self, window: Window, again: Sequence[Window], cause: TransferFailed | None) -> None:
        read = window.read
        with self.changed:
            read.in_flight -= window.count
            ended = False
            if cause is not None:
                ended = self._drain(read, ReadOutcome.FAILED, cause)
            elif again and read.state is ReadState.READING:
                if not read.pending:
                    self._turns.append(read)
                read.pending.extendleft(reversed(again))
            if not ended:
                ended = self._end_if_over(read)
            if self._turns:
                # windows that were returned, or that waited for the limit of bytes in flight
                self.changed.notify_all()
        if ended:
            self._notify_end(read)

    def _drain(self, read: QueuedRead, outcome: ReadOutcome, cause: TransferFailed | None) -> bool:
        if read.state is not ReadState.READING:
            return False
        read.move(ReadState.DRAINING)
        read.outcome, read.cause = outcome, cause
        if read.pending:
            self._turns.remove(read)
            read.pending.clear()
        self._interrupt(read)
        return self._end_if_over(read)

    def _end_if_over(self, read: QueuedRead) -> bool:
        if read.in_flight or read.pending:
            return False
        read.move(ReadState.ENDED)
        self._reads.discard(read)
        return True

    def _notify_end(self, read: QueuedRead) -> None:
        run_guarded(lambda: read.listener.ended(read.outcome, read.cause))


def _successive(read: QueuedRead) -> list[Window]:
    """Ranges of the read with consecutive indexes."""
    windows: list[Window] = []
    first = 0
    for position in range(1, len(read.blocks) + 1):
        if position == len(read.blocks) or read.blocks[position].index != read.blocks[position - 1].index + 1:
            windows.append(Window(read, first, position - first))
            first = position
    return windows
