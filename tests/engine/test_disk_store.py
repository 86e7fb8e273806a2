"""`DiskStore`: what it keeps, what it gives up, and what it finds after a crash."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest

from pdserve.common.security.block_digest import Gmac
from pdserve.engine.runner.pool import disk_store
from pdserve.engine.runner.pool.block_store import SealedStore
from pdserve.engine.runner.pool.disk_store import DiskStore
from pdserve.engine.runner.pool.segment_files import DiskFolder

BLOCK_BYTES = 100
RECORD_BYTES = BLOCK_BYTES + 26 + 3
"""With a name of 3 bytes."""
NUM_RECORDS = 80


def name_of(number: int) -> bytes:
    return number.to_bytes(3, "big")


def block_of(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(BLOCK_BYTES))


def opened(folder: Path, num_records: int = NUM_RECORDS) -> SealedStore:
    """A store of 8 segments."""
    return SealedStore(DiskStore(DiskFolder(folder), num_records * RECORD_BYTES), Gmac(bytes(32)))


def write(store: SealedStore, *numbers: int) -> list[bytes]:
    return [lost for number in numbers for lost in store.write(name_of(number), block_of(number))]


def has(store: SealedStore, number: int) -> bool:
    """Read a block; what comes back is right."""
    into = memoryview(bytearray(BLOCK_BYTES))
    is_there = store.read(name_of(number), into)
    assert not is_there or into == block_of(number)
    return is_there


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert write(store, 1, 2, 3) == []
    assert [has(store, number) for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert store.store.names() == [name_of(1), name_of(2), name_of(3)]


def test_a_block_of_another_size_is_not_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, 1)
    assert not store.read(name_of(1), memoryview(bytearray(BLOCK_BYTES - 1)))


def test_the_last_of_two_writes_counts_also_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(name_of(1), block_of(7))
    write(store, *range(2, 40))
    write(store, 1)
    assert has(store, 1)
    store.store.close()
    assert has(opened(tmp_path), 1)


def test_it_takes_no_more_room_than_it_may(tmp_path: Path) -> None:
    store = opened(tmp_path)
    lost: set[bytes] = set()
    for number in range(500):
        lost |= set(write(store, number))
        used = sum(path.stat().st_size for path in segments(tmp_path))
        assert used <= NUM_RECORDS * RECORD_BYTES
        assert set(store.store.names()) == {name_of(each) for each in range(number + 1)} - lost
    assert len(store.store.names()) >= NUM_RECORDS * 3 // 4
    assert all(has(store, int.from_bytes(name, "big")) for name in store.store.names())


def test_what_is_read_outlives_what_is_not(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, *range(5))
    for number in range(5, 1000):
        write(store, number)
        assert has(store, number % 5), f"given up by the time of block {number}"
    assert name_of(500) not in store.store.names()


def test_a_new_block_is_not_given_up_for_the_next(tmp_path: Path) -> None:
    """Although all older ones were read, and it was not."""
    store = opened(tmp_path)
    for number in range(300):
        write(store, number)
        assert has(store, number)
    write(store, 1000)
    lost = write(store, *range(1001, 1020))
    assert name_of(1000) not in lost


def test_a_block_larger_than_a_segment_has_one_of_its_own(tmp_path: Path) -> None:
    store = opened(tmp_path)
    large = memoryview(random.Random(5).randbytes(20 * RECORD_BYTES))
    write(store, *range(60))
    store.write(b"big", large)
    write(store, *range(60, 65))
    into = memoryview(bytearray(len(large)))
    assert store.read(b"big", into)
    assert into == large
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= NUM_RECORDS * RECORD_BYTES


def test_a_block_larger_than_the_store_is_not_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, *range(20))
    assert store.write(b"big", memoryview(bytes(NUM_RECORDS * RECORD_BYTES))) == [b"big"]
    assert len(store.store.names()) == 20


def test_clear_gives_up_everything(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, *range(50))
    store.store.clear()
    assert store.store.names() == []
    assert segments(tmp_path) == []
    write(store, 7)
    assert has(store, 7)


@pytest.mark.parametrize("cut", range(RECORD_BYTES + 1))
def test_a_torn_write_costs_that_block(tmp_path: Path, cut: int) -> None:
    """The last record of a process that ended within the write."""
    store = opened(tmp_path)
    write(store, 1, 2, 3)
    [segment] = segments(tmp_path)
    os.truncate(segment, 2 * RECORD_BYTES + cut)
    again = opened(tmp_path)
    assert [has(again, number) for number in (1, 2, 3)] == [True, True, cut == RECORD_BYTES]
    assert write(again, 3, 4) == []
    assert all(has(again, number) for number in (1, 2, 3, 4))
    again.store.close()
    assert all(has(opened(tmp_path), number) for number in (1, 2, 3, 4))


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_a_crash_left_out_are_noticed(tmp_path: Path, seed: int) -> None:
    """Without synchronisation a file may have its length and lack pages: they read as zeros."""
    draws = random.Random(seed)
    store = opened(tmp_path)
    write(store, *range(30))
    if seed % 2:
        store.store.close()
    for segment in segments(tmp_path):
        with segment.open("r+b") as file:
            file.seek(draws.randrange(segment.stat().st_size))
            file.write(bytes(draws.randrange(1, 300)))
    again = opened(tmp_path)
    there = [number for number in range(30) if has(again, number)]
    assert 0 < len(there) < 30
    write(again, *range(30))
    assert all(has(again, number) for number in range(30))


@pytest.mark.parametrize("damage", ["", "missing", "torn", "empty", "changed", "of a longer segment"])
def test_an_index_spares_the_headers_or_counts_for_nothing(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    write(store, *range(35))
    store.store.close()
    index = sorted(tmp_path.glob("*.index"))[0]
    data = index.read_bytes()
    match damage:
        case "missing":
            index.unlink()
        case "torn":
            index.write_bytes(data[:-1])
        case "empty":
            index.write_bytes(b"")
        case "changed":
            index.write_bytes(data.replace(name_of(3), name_of(4), 1))
        case "of a longer segment":
            os.truncate(segments(tmp_path)[0], 5 * RECORD_BYTES)
    reads: list[int] = []
    with monkeypatch.context() as patched:
        real = os.preadv

        def counted(descriptor: int, buffers: list[bytearray], offset: int) -> int:
            reads.append(offset)
            return real(descriptor, buffers, offset)

        patched.setattr(os, "preadv", counted)
        again = opened(tmp_path)
    assert (len(reads) > 0) is (damage != "")
    first = 5 if damage == "of a longer segment" else 10
    assert [has(again, number) for number in range(35)] == [number < first or number >= 10 for number in range(35)]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.kv").write_text("not a number")
    (tmp_path / "00000007.kv").write_text("no record")
    (tmp_path / "lock").write_text("")
    store = opened(tmp_path)
    write(store, 1)
    assert store.store.names() == [name_of(1)]
    assert (tmp_path / "notes.kv").read_text() == "not a number"
    assert has(store, 1)


def test_a_full_disk_makes_the_store_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have filled it: half of what the store may take is there."""
    room, real = NUM_RECORDS // 2 * RECORD_BYTES, os.pwritev

    def limited(descriptor: int, buffers: list[bytes], offset: int) -> int:
        used = sum(path.stat().st_size for path in segments(tmp_path))
        if used + sum(map(len, buffers)) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", limited)
    store = opened(tmp_path)
    lost = set(write(store, *range(200)))
    kept = [number for number in range(200) if name_of(number) not in lost]
    assert len(kept) >= NUM_RECORDS // 4
    assert 199 in kept
    assert all(has(store, number) for number in kept)


def test_a_disk_that_takes_nothing_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    write(store, *range(40))
    tries = []

    def fails(*_: object) -> int:
        tries.append(1)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", fails)
        assert write(store, 100) == [name_of(100)]
        assert write(store, 101) == [name_of(101)]
    assert len(tries) == 1
    assert all(has(store, number) for number in range(40))
    monkeypatch.setattr(disk_store, "FULL_S", 0.0)
    store.store._full_until = 0.0  # type: ignore[attr-defined]
    assert write(store, 102) == []
    assert has(store, 102)


def test_a_partial_write_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = opened(tmp_path), os.pwritev
    write(store, 1)

    def partial(descriptor: int, buffers: list[bytes], offset: int) -> int:
        return real(descriptor, [buffers[0]], offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", partial)
        assert name_of(2) in write(store, 2)
    store.store._full_until = 0.0  # type: ignore[attr-defined]
    write(store, 3)
    assert has(store, 3)
    store.store.close()
    assert has(opened(tmp_path), 3)


def test_reads_while_segments_are_given_up(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, *range(40))
    is_over, failures = threading.Event(), []

    def read() -> None:
        draws = random.Random(1)
        while not is_over.is_set():
            try:
                has(store, draws.randrange(3000))
            except BaseException as error:
                failures.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    write(store, *range(40, 3000))
    is_over.set()
    for reader in readers:
        reader.join()
    assert not failures
