"""`RingConnector`: the contract of connectors over a pool on a device, and what only a ring promises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import BlockToRead, ReadOrder, ReadOutcome
from pdserve.kv_transfer.landing_ring import RingConnector
from pdserve.kv_transfer.memory.device_pool import DevicePool, host_pool
from pdserve.kv_transfer.memory.pool_memory import HostPool
from tests.support.run.waiting import HANG_S, wait_until
from tests.support.transfers.local_connector import LocalConnector, LocalNetwork
from tests.support.transfers.transfer_fakes import FakeConnector

from .connector_contract import ConnectorContract, TokenContract
from .contract_link import Link
from .recorded_read import BLOCK_BYTES, RecordedRead, make_pool, start_read
from .tcp_link import TcpLink
from .test_local_connector import LocalLink

CONTRACT_SLOTS, NUM_SLOTS = 256, 64
SHARE, BATCH = NUM_SLOTS // 4, NUM_SLOTS // 16


class _Reachable(DevicePool):
    """A pool on a device whose memory NIXL registers as the host's, which it is here."""

    device_id = None


def _on_device(pool: HostPool) -> DevicePool:
    """The pool's memory, used as if it were a device's."""
    rows = torch.frombuffer(pool.view, dtype=torch.uint8).view(pool.num_blocks, pool.block_bytes)
    return _Reachable(rows, CONTRACT_SLOTS, 4, HANG_S)


def _with_ring(
    connector: Any, pool: HostPool, slot_wait_s: float = HANG_S, num_slots: int = NUM_SLOTS
) -> RingConnector:
    device = _on_device(pool)
    ring = device.new_ring(num_slots, pinned=True)
    return RingConnector(connector, device, ring, host_pool(ring), slot_wait_s)


class RingEnds:
    """A `Link` whose pools are on devices, and whose receiver reads into a ring."""

    def __init__(
        self, kind: Callable[..., Any], source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float
    ) -> None:
        devices = [_on_device(source_pool), _on_device(receiver_pool)]
        rings = [device.new_ring(CONTRACT_SLOTS, pinned=True) for device in devices]
        landings = [host_pool(ring) for ring in rings]
        self._link = kind(devices[0], receiver_pool, read_stall_s, tuple(landings))
        self.source, self.receiver = (
            RingConnector(inner, device, ring, landing, HANG_S)
            for inner, device, ring, landing in zip(
                (self._link.source, self._link.receiver), devices, rings, landings, strict=True
            )
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def close(self) -> None:
        self.receiver.close()
        self.source.close()
        self._link.close()
        assert self.receiver.num_free == self.source.num_free == CONTRACT_SLOTS, "slots are still out of use"


class TestRingOverLocal(ConnectorContract, TokenContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return RingEnds(LocalLink, source_pool, receiver_pool, read_stall_s)


@pytest.mark.slow
class TestRingOverTcp(ConnectorContract, TokenContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return RingEnds(TcpLink, source_pool, receiver_pool, read_stall_s)


@pytest.mark.slow
class TestRingOverNixl(ConnectorContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        nixl_link = pytest.importorskip("tests.kv_transfer.data_plane.nixl_link", exc_type=ImportError)
        return RingEnds(nixl_link.NixlLink, source_pool, receiver_pool, read_stall_s)


class Bench:
    """A ring over a connector whose reads the test controls."""

    def __init__(self, slot_wait_s: float = HANG_S) -> None:
        self.inner = FakeConnector()
        self.pool = make_pool()
        self.ring = _with_ring(self.inner, self.pool, slot_wait_s)
        self.ring.serve(_on_device(self.pool))

    def read(self, num_blocks: int, metadata: bytes = b"peer", first: int = 0, **options: Any) -> RecordedRead:
        blocks = [BlockToRead(index, index, first + index, index) for index in range(num_blocks)]
        recorded = RecordedRead(num_blocks)
        recorded.read = self.ring.read(ReadOrder(metadata, bytes(16), blocks, **options), recorded)
        return recorded

    def arrive(self, number: int) -> None:
        """The bytes of the inner read `number` are in the ring, verified."""
        for block in self.inner.reads[number].blocks:
            self.ring._ring[block.local_block] = block.index + 1
        self.inner.reads[number].land()
        self.inner.reads[number].end()

    def has_bytes(self, num_blocks: int) -> bool:
        return all(bytes(self.pool.block(index)) == bytes([index + 1]) * BLOCK_BYTES for index in range(num_blocks))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    for read in made.inner.reads:
        read.end(ReadOutcome.CANCELLED)
    made.ring.close()
    assert made.ring.num_free == NUM_SLOTS


def test_one_peer_holds_a_quarter_of_the_ring(bench: Bench) -> None:
    large = bench.read(40)
    assert [len(read.blocks) for read in bench.inner.reads] == [BATCH] * 4
    small = bench.read(3, b"other", first=100)
    assert len(bench.inner.reads) == 5
    bench.arrive(4)
    assert small.wait_ended() is ReadOutcome.DONE
    number = 0
    while large.num_landed < 40:
        wait_until(partial(lambda count: len(bench.inner.reads) > count, number))
        if number != 4:
            bench.arrive(number)
        number += 1
        large.wait_landed(min(40, BATCH * (number - (number > 4))))
    assert large.wait_ended() is ReadOutcome.DONE
    assert bench.has_bytes(40)


def test_a_cancelled_read_ends_while_its_slots_may_still_be_written(bench: Bench) -> None:
    read = bench.read(6)
    read.cancel()
    assert read.wait_ended() is ReadOutcome.CANCELLED
    assert [inner.num_cancels for inner in bench.inner.reads] == [1, 1]
    assert bench.ring.num_free == NUM_SLOTS - 6
    bench.arrive(0)  # too late
    bench.inner.reads[1].end(ReadOutcome.CANCELLED)
    wait_until(lambda: bench.ring.num_free == NUM_SLOTS)
    assert not any(bench.pool.view)


def test_a_read_whose_slots_never_come_back_delays_no_other_peer() -> None:
    bench = Bench(slot_wait_s=0.1)
    stuck = bench.read(SHARE)
    stuck.cancel()
    stuck.wait_ended()
    assert "no memory to receive into was free for 0.1 s" in bench.read(1).wait_failed()
    others = [bench.read(SHARE, f"peer {number}".encode()) for number in range(3)]
    for number in range(4, 16):
        wait_until(partial(lambda number: len(bench.inner.reads) > number, number))
        bench.arrive(number)
    assert [other.wait_ended() for other in others] == [ReadOutcome.DONE] * 3
    for inner in bench.inner.reads[:4]:
        inner.end(ReadOutcome.CANCELLED)
    bench.ring.close()


def test_slow_peers_leave_room_for_those_that_come_later(bench: Bench) -> None:
    for number in range(4):
        bench.read(SHARE, f"slow peer {number}".encode())
    held = [SHARE, SHARE, BATCH, BATCH]
    assert bench.ring.num_free == NUM_SLOTS - sum(held)
    read = bench.read(2 * BATCH, b"quick peer", first=100)
    for batches in (1, 2):
        wait_until(partial(lambda number: len(bench.inner.reads) == number, sum(held) // BATCH + batches))
        bench.arrive(-1)
    assert read.wait_ended() is ReadOutcome.DONE


def test_one_failed_batch_ends_the_read(bench: Bench) -> None:
    read = bench.read(10)
    bench.arrive(1)
    read.wait_landed(BATCH)
    bench.inner.reads[0].end(ReadOutcome.FAILED, TransferFailed("the wire broke"))
    assert read.wait_failed() == "the wire broke"
    assert bench.inner.reads[2].num_cancels == 1


def test_a_move_that_fails_fails_its_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("an uncorrectable memory error")

    monkeypatch.setattr(bench.ring._pool, "move_in", fail)
    read = bench.read(2)
    bench.arrive(0)
    assert "copied to the device: an uncorrectable memory error" in read.wait_failed()
    monkeypatch.undo()
    again = bench.read(2)
    bench.arrive(1)
    assert again.wait_ended() is ReadOutcome.DONE


def test_blocks_outside_the_pool_are_refused(bench: Bench) -> None:
    assert "index 0 cannot be read into block 256" in bench.read(1, first=256).wait_failed()
    assert "index 0 cannot be read into block -1" in bench.read(1, first=-1).wait_failed()
    assert not bench.inner.reads


class _Step:
    """An event that the test completes."""

    def __init__(self) -> None:
        self.is_done = threading.Event()

    def synchronize(self) -> None:
        assert self.is_done.wait(HANG_S)


def test_nothing_is_moved_before_the_step_of_an_earlier_owner_is_done(bench: Bench) -> None:
    step = _Step()
    read = bench.read(2, unused=step)
    bench.arrive(0)
    assert not any(bench.pool.view)
    step.is_done.set()
    assert read.wait_ended() is ReadOutcome.DONE
    assert bench.has_bytes(2)


def test_only_a_ring_can_wait_for_a_step() -> None:
    network = LocalNetwork()
    connector = LocalConnector(network)
    connector.serve(make_pool())
    with pytest.raises(ValueError, match="only a ring"):
        connector.read(ReadOrder(b"local:0", bytes(16), [], unused=_Step()), RecordedRead(0))
    connector.close()


def test_a_closed_ring_reads_nothing(bench: Bench) -> None:
    bench.ring.close()
    assert start_read(bench.ring, b"peer", bytes(16), [BlockToRead(0, 0, 0)]).wait_ended() is ReadOutcome.CANCELLED
