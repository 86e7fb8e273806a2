"""The small parts below the connectors: digests, runs of blocks, the event thread, the states of a read."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import xxhash

from pdserve.common.errors import InternalError, TransferFailed
from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import BlockToRead, ReadOutcome
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.pull.digest import block_digests
from pdserve.kv_transfer.pull.read_queue import LEGAL_MOVES, QUICK_S, SLOW_S, QueuedRead, ReadQueue, ReadState, Window
from tests.support.run.waiting import HANG_S, wait_until

from .recorded_read import RecordedRead, make_pool


def test_digest_is_xxh3_64() -> None:
    pool = make_pool(seed=1)
    assert XXH3.name == "xxh3_64"
    assert XXH3.of(memoryview(b""), 0) == 0x2D06800538D394C2
    assert block_digests(pool, [3, 1]) == [xxhash.xxh3_64(pool.block(n)).intdigest() for n in (3, 1)]
    with pytest.raises(IndexError):
        block_digests(pool, [pool.num_blocks])


def test_digest_holds_no_gil() -> None:
    data = memoryview(bytes(64 << 20))
    may_run, ran = threading.Event(), threading.Event()

    def run() -> None:
        may_run.wait()
        ran.set()

    other = threading.Thread(target=run)
    other.start()
    usual_s = sys.getswitchinterval()
    # from now on this thread loses the interpreter only where it gives it away
    sys.setswitchinterval(10 * HANG_S)
    try:
        may_run.set()
        give_up_at = time.monotonic() + HANG_S
        while not ran.is_set() and time.monotonic() < give_up_at:
            XXH3.of(data, 0)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(usual_s)
        other.join()


@pytest.mark.parametrize(
    ("blocks", "sizes"),
    [
        ([], []),
        ([5], [1]),
        ([5, 6, 7], [3]),
        ([7, 6, 5], [1, 1, 1]),
        ([1, 2, 9, 3, 4, 5], [2, 1, 3]),
        ([4, 4], [1, 1]),
        ([255], [1]),
    ],
)
def test_block_runs_merge_neighbours(blocks: list[int], sizes: list[int]) -> None:
    pool = make_pool(seed=1)
    runs = pool.views(blocks)
    assert [len(run) // pool.block_bytes for run in runs] == sizes
    assert b"".join(runs) == b"".join(pool.block(number) for number in blocks)


@pytest.mark.parametrize("blocks", [[-1], [256], [254, 255, 256], [0, -1]])
def test_block_runs_stay_in_the_pool(blocks: list[int]) -> None:
    with pytest.raises(IndexError):
        make_pool().views(blocks)


def test_event_thread_keeps_order_and_drops_timers_at_close() -> None:
    events = EventThread("tcp-events")
    calls: list[str] = []

    def fail() -> None:
        raise RuntimeError("a call-back with a bug")

    events.call_later(60.0, lambda: calls.append("never"))
    events.call_later(0.02, lambda: calls.append("later"))
    events.call_soon(lambda: calls.append("soon"))
    events.call_soon(fail)
    wait_until(lambda: len(calls) >= 2)
    events.call_soon(lambda: calls.append("last"))
    events.close()
    events.close()
    events.call_soon(lambda: calls.append("after"))
    assert calls == ["soon", "later", "last", "after"]


def make_queue(in_flight_blocks: int = 64, longest_blocks: int = 8) -> ReadQueue:
    """Windows of 8 blocks at first; what should run on another thread runs here."""
    return ReadQueue(8, longest_blocks, in_flight_blocks, lambda read: None, lambda call: call())


def add_read(queue: ReadQueue, num_blocks: int) -> tuple[QueuedRead, RecordedRead]:
    recorded = RecordedRead(num_blocks)
    with queue.changed:
        blocks = [BlockToRead(index, 0, index) for index in range(num_blocks)]
        return queue.add(bytes(16), blocks, recorded), recorded


def take(queue: ReadQueue) -> Window:
    with queue.changed:
        window = queue.take()
    assert window is not None
    return window


def finish(queue: ReadQueue, window: Window) -> None:
    queue.finish(window, [(window.first, window.count)], [])


def test_reads_take_turns() -> None:
    queue = make_queue()
    (long, _), (short, heard) = add_read(queue, 40), add_read(queue, 8)
    windows = [take(queue) for _ in range(4)]
    assert [window.read for window in windows] == [long, short, long, long]
    finish(queue, windows[1])
    assert heard.outcome is ReadOutcome.DONE


def test_read_has_so_much_in_flight_and_no_more() -> None:
    queue = make_queue(in_flight_blocks=16)
    long, _ = add_read(queue, 40)
    first, _ = take(queue), take(queue)
    with queue.changed:
        assert queue.take() is None
    other, _ = add_read(queue, 20)
    assert take(queue).read is other, "one read's limit holds up no other"
    finish(queue, first)
    assert {take(queue).read for _ in range(2)} == {long, other}
    with queue.changed:
        assert queue.take() is None


def test_windows_grow_while_they_come_quickly_and_shrink_when_they_do_not() -> None:
    queue = make_queue(longest_blocks=20)
    _, heard = add_read(queue, 100)
    sizes: list[int] = []
    for seconds in (QUICK_S / 2, QUICK_S / 2, QUICK_S / 2, QUICK_S * 2, SLOW_S * 2, SLOW_S * 2, SLOW_S * 2):
        window = take(queue)
        sizes.append(window.count)
        queue.pace(window, seconds)
        finish(queue, window)
    assert sizes == [8, 16, 20, 20, 20, 10, 6], "never longer than the longest, nor cut shorter than at first"
    assert queue.window_blocks == 8
    assert heard.wait_ended() is ReadOutcome.DONE
    assert sorted(heard.landed_blocks) == list(range(100)), "however they were cut"


def test_window_that_is_shorter_than_others_says_nothing() -> None:
    queue = make_queue(longest_blocks=16)
    add_read(queue, 4)
    window = take(queue)
    queue.pace(window, 0.0)
    queue.pace(window, SLOW_S * 2)
    assert queue.window_blocks == 8


def test_window_that_did_not_begin_is_next_again() -> None:
    queue = make_queue()
    _, heard = add_read(queue, 24)
    window = take(queue)
    queue.give_back(window)
    assert take(queue) is window
    for done in (window, take(queue), take(queue)):
        finish(queue, done)
    assert heard.wait_ended() is ReadOutcome.DONE


def test_cancelled_read_ends_with_its_last_window() -> None:
    queue = make_queue()
    read, heard = add_read(queue, 40)
    windows = [take(queue), take(queue)]
    read.cancel()
    assert heard.outcome is None, "two windows still write into the pool"
    queue.give_back(windows[0])
    assert heard.outcome is None
    queue.fail(windows[1], [], TransferFailed("late"))
    assert heard.wait_ended() is ReadOutcome.CANCELLED


@pytest.mark.parametrize("start", ReadState)
@pytest.mark.parametrize("to", ReadState)
def test_read_moves_along_legal_edges_only(start: ReadState, to: ReadState) -> None:
    read, _ = add_read(make_queue(), 1)
    read.state = start
    if to in LEGAL_MOVES[start]:
        read.move(to)
        assert read.state is to
    else:
        with pytest.raises(InternalError):
            read.move(to)
        assert read.state is start
