"""The connections to one peer, over wires that do what the test tells them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import BlockToRead, ReadOutcome
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.nixl.nixl_agent import AgentRead, ReadStatus, Region
from pdserve.kv_transfer.nixl.nixl_connection import NixlConnection
from pdserve.kv_transfer.nixl.nixl_peer import NixlPeer
from pdserve.kv_transfer.nixl.nixl_settings import HELLO_BYTES, NixlAddress, NixlSettings
from pdserve.kv_transfer.pull.connection import Connection, ConnectionBroken
from pdserve.kv_transfer.pull.peer_connections import PeerConnections, PeerLimits
from pdserve.kv_transfer.totals import Totals
from tests.support.run.waiting import HANG_S, wait_until

from .recorded_read import RecordedRead, make_pool

POOL = make_pool(seed=3)
LIMITS = PeerLimits(max_readers=2, window_blocks=8, longest_window_blocks=8, in_flight_blocks=16, idle_close_s=60.0)


class ScriptedWire:
    """A `Connection` whose blocks are there already, unless it is broken."""

    def __init__(self, is_broken: bool = False) -> None:
        self.is_broken = is_broken
        self.meets: threading.Barrier | None = None
        """Fetches meet here before they break, as their peer has ended."""
        self.may_serve = threading.Event()
        self.may_serve.set()
        self.closing, self.may_close = threading.Event(), threading.Event()

    def fetch(self, token: bytes, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        if self.meets is not None:
            self.meets.wait(HANG_S)
            raise ConnectionBroken("its peer has ended", is_unanswered=True)
        if self.is_broken:
            raise ConnectionBroken("it hangs")
        assert self.may_serve.wait(HANG_S)
        yield len(blocks)

    def interrupt(self) -> bool:
        return True

    def close(self) -> None:
        self.closing.set()
        if self.is_broken:
            assert self.may_close.wait(HANG_S)


class Connections:
    """Connections that connect to the wires given, one after the other."""

    def __init__(self, *wires: ScriptedWire) -> None:
        self._wires = iter(wires)
        self.connecting = threading.Semaphore(0)
        self.may_connect = threading.Semaphore(len(wires))
        self.totals = Totals()
        self.events = EventThread("reader-events")
        self.connections = PeerConnections(
            "peer", POOL, LIMITS, self.totals, self._connect, self.events.call_soon, "reader"
        )

    def _connect(self) -> Connection:
        self.connecting.release()
        assert self.may_connect.acquire(timeout=HANG_S)
        return next(self._wires)

    def read(self, block: int, count: int = 1) -> RecordedRead:
        heard = RecordedRead(count)
        blocks = [BlockToRead(each, XXH3.of(POOL.block(each), each), each) for each in range(block, block + count)]
        self.connections.read(bytes(16), blocks, heard)
        return heard

    def close(self) -> None:
        self.connections.close()
        self.events.close()


def test_a_read_does_not_wait_for_a_lane_that_gives_up_its_wire() -> None:
    hung = ScriptedWire(is_broken=True)
    connections = Connections(hung, ScriptedWire())
    first = connections.read(0)
    assert hung.closing.wait(HANG_S)
    assert connections.read(1).wait_ended() is ReadOutcome.DONE
    assert first.outcome is None, "its wire may still write"
    hung.may_close.set()
    assert first.wait_failed() == "it hangs"
    connections.close()


def test_connections_that_never_served_are_replaced_like_others_when_the_peer_has_ended() -> None:
    """One connection serves all of the first read, while the other one is being made."""
    wires = [ScriptedWire() for _ in range(4)]
    connections = Connections(*wires)
    connections.may_connect = threading.Semaphore(1)
    wires[0].may_serve.clear()
    first = connections.read(0, 2 * LIMITS.window_blocks)
    for _ in range(2):
        assert connections.connecting.acquire(timeout=HANG_S)
    wires[0].may_serve.set()
    assert first.wait_ended() is ReadOutcome.DONE
    connections.may_connect.release(3)
    assert wait_until(lambda: connections.totals["connections"] == 2)
    wires[0].meets = wires[1].meets = threading.Barrier(2)
    assert connections.read(0, 2 * LIMITS.window_blocks).wait_ended() is ReadOutcome.DONE
    assert connections.totals["stale_connections"] == 2
    connections.close()


def test_a_new_connection_that_breaks_fails_its_read() -> None:
    broken = ScriptedWire()
    broken.meets = threading.Barrier(1)
    connections = Connections(broken, ScriptedWire())
    assert connections.read(0).wait_failed() == "its peer has ended"
    connections.close()


class _HangingAgent:
    """An `Agent` whose first read, of what the source says at first, is done at once, and no other ever."""

    metadata = b""

    def __init__(self, name: str) -> None:
        self.num_reads = 0

    def register(self, region: Region) -> None: ...

    def load(self, name: str, metadata: bytes) -> None: ...

    def pair(self, local: Region, remote: Region) -> int:
        return 0

    def read(self, pair: int, local_pieces: Sequence[int], remote_pieces: Sequence[int]) -> AgentRead:
        self.num_reads += 1
        return _HangingRead(ReadStatus.DONE if self.num_reads == 1 else ReadStatus.UNDER_WAY)

    def destroy(self) -> None: ...


class _HangingRead:
    def __init__(self, status: ReadStatus) -> None:
        self._status = status

    def status(self) -> ReadStatus:
        return self._status

    def release(self) -> None: ...


def test_i7_a_nixl_read_that_is_cancelled_before_it_begins_ends_as_soon_as_others() -> None:
    source = NixlAddress("source", b"", 1, POOL.block_bytes, POOL.num_blocks, 1, bytes(HELLO_BYTES))
    settings = NixlSettings(read_stall_s=HANG_S, cancel_drain_s=0.05)
    wire = NixlConnection(
        source, POOL, settings, lambda: NixlPeer(POOL, _HangingAgent), threading.Event(), lambda: None
    )
    for _ in range(2):
        fetching = wire.fetch(bytes(16), [BlockToRead(0, 0, 0)])
        wire.interrupt()
        with pytest.raises(ConnectionBroken, match="cancelled, and not ended in time"):
            next(fetching)
    wire.close()
