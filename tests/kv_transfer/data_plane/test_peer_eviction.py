"""Resources of a peer are dropped when too many peers rest or it is gone, and return with it; no read is affected."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from pdserve.common.errors import ConfigError, TransferFailed
from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import BlockToRead, ReadOrder, ReadOutcome
from pdserve.kv_transfer.connector_set import MAX_WORKERS, ConnectorSet, PeerEndpoints
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.heads.head_groups import WHOLE
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.nixl.nixl_settings import NixlSettings
from pdserve.kv_transfer.pull.block_reader import BlockReader
from pdserve.kv_transfer.pull.connection import Connection
from pdserve.kv_transfer.pull.peer_connections import PeerLimits
from tests.support.run.waiting import HANG_S

from .recorded_read import RecordedRead, Transfer, make_pool, start_read

TOKEN = bytes(16)
MAX_RESTING = 2


class World:
    """Wires that bring zeros, and which of them are open."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.open: list[str] = []
        self.num_made: dict[str, int] = {}
        self.held: set[str] = set()
        """Peers whose wires bring nothing until they are let go."""

    def connect(self, address: str) -> Connection:
        with self.changed:
            self.open.append(address)
            self.num_made[address] = self.num_made.get(address, 0) + 1
            self.changed.notify_all()
        return _Wire(self, address)

    def let_go(self, address: str) -> None:
        with self.changed:
            self.held.discard(address)
            self.changed.notify_all()

    def wait_open(self, *addresses: str) -> None:
        """Until exactly these have an open wire."""
        with self.changed:
            assert self.changed.wait_for(lambda: sorted(self.open) == sorted(addresses), HANG_S), self.open

    def wait_still_open(self, *addresses: str) -> None:
        """Until these have a wire, the first that was made for them."""
        with self.changed:
            assert self.changed.wait_for(lambda: set(addresses) <= set(self.open), HANG_S), self.open
            assert all(self.num_made[address] == 1 for address in addresses)


class _Wire:
    def __init__(self, world: World, address: str) -> None:
        self._world, self._address = world, address

    def fetch(self, token: bytes, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        with self._world.changed:
            assert self._world.changed.wait_for(lambda: self._address not in self._world.held, HANG_S)
        yield len(blocks)

    def interrupt(self) -> bool:
        return False

    def close(self) -> None:
        with self._world.changed:
            self._world.open.remove(self._address)
            self._world.changed.notify_all()


class Reader:
    def __init__(self, max_resting: int | None) -> None:
        self.world, self.pool = World(), make_pool()
        self.events = EventThread("test-events")
        limits = PeerLimits(
            max_readers=1, window_blocks=8, longest_window_blocks=8, in_flight_blocks=8, idle_close_s=600.0
        )
        self.reader = BlockReader[str](
            "test-read", self.pool, limits, self.events, lambda address, _: self.world.connect(address), max_resting
        )

    def begin(self, address: str) -> RecordedRead:
        blocks = [BlockToRead(index, XXH3.of(self.pool.block(0), index), index) for index in range(4)]
        recorded = RecordedRead(len(blocks))
        recorded.read = self.reader.read(lambda: address, ReadOrder(b"", TOKEN, blocks), recorded)
        return recorded

    def read(self, address: str) -> None:
        assert self.begin(address).wait_ended() is ReadOutcome.DONE

    def close(self) -> None:
        self.reader.close()
        self.events.close()


@pytest.fixture
def make_reader() -> Iterator[Callable[[int | None], Reader]]:
    made: list[Reader] = []

    def make(max_resting: int | None = MAX_RESTING) -> Reader:
        made.append(Reader(max_resting))
        return made[-1]

    yield make
    for reader in made:
        reader.close()
        assert reader.world.open == []


def test_the_peers_that_have_rested_longest_go_and_are_met_again(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader()
    for address in ("a", "b", "c", "d"):
        reader.read(address)
    reader.read("e")
    reader.world.wait_open("c", "d", "e")  # the one that was read from, and two at rest
    reader.read("a")
    assert reader.world.num_made["a"] == 2, "met again, over a wire of its own"
    reader.read("a")
    assert reader.world.num_made["a"] == 2


def test_a_peer_with_a_read_under_way_stays_however_many_come(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader(0)
    reader.world.held = {"a", "b"}
    reads = [reader.begin("a"), reader.begin("b")]
    reader.world.wait_still_open("a", "b")
    for address in ("c", "d", "c", "d"):
        reader.read(address)
    reader.world.wait_still_open("a", "b")
    reader.reader.close_idle("a")
    for address, read in zip(("a", "b"), reads, strict=True):
        reader.world.let_go(address)
        assert read.wait_ended() is ReadOutcome.DONE
    reader.reader.close_idle("b")
    reader.reader.close_idle("c")
    reader.reader.close_idle("d")
    reader.world.wait_open()


def test_without_a_bound_all_stay_until_one_is_forgotten(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader(None)
    for address in ("a", "b", "c"):
        reader.read(address)
    reader.world.wait_open("a", "b", "c")
    reader.reader.close_idle("b")
    reader.reader.close_idle("never seen")
    reader.world.wait_open("a", "c")
    reader.read("b")
    reader.world.wait_open("a", "b", "c")


def test_retiring_races_with_reads_and_no_read_is_lost(make_reader: Callable[..., Reader]) -> None:
    reader = make_reader(1)
    over = threading.Event()

    def retire() -> None:
        for address in itertools.cycle("abc"):
            if over.is_set():
                return
            reader.reader.close_idle(address)

    retiring = threading.Thread(target=retire)
    retiring.start()
    try:
        for number in range(200):
            reader.read("abc"[number % 3])
    finally:
        over.set()
        retiring.join()


def test_another_life_of_a_worker_ends_the_one_before() -> None:
    lives = PeerEndpoints()
    assert lives.reached("p", 1, "nixl", b"one") == {}
    assert lives.reached("p", 1, "tcp", b"uno") == {}
    assert lives.begun("p", 1) == lives.begun("q", 9) == lives.lost("p", 2) == {}
    assert lives.begun("p", 2) == {("nixl", (0, 0)): b"one", ("tcp", (0, 0)): b"uno"}
    assert lives.begun("p", 2) == {}
    lives.reached("p", 2, "nixl", b"two")
    assert lives.reached("p", 3, "nixl", b"three") == {("nixl", (0, 0)): b"two"}
    assert lives.lost("p", 3) == {("nixl", (0, 0)): b"three"}
    for number in range(MAX_WORKERS):
        lives.reached(f"w{number}", 1, "nixl", b"")
    assert lives.begun("w0", 2) == {("nixl", (0, 0)): b""}
    lives.reached("last", 1, "nixl", b"")
    lives.reached("more", 1, "nixl", b"")
    assert lives.begun("w1", 2) == {}, "the one that was read from longest ago is forgotten"


def test_an_epoch_has_one_endpoint_per_connector() -> None:
    lives = PeerEndpoints()
    lives.reached("p", 1, "nixl", b"one")
    lives.landed("p", 1, "nixl")
    for _ in range(2):
        with pytest.raises(TransferFailed, match="source p has named another endpoint of its connector nixl before"):
            lives.reached("p", 1, "nixl", b"two")
    assert lives.reached("p", 1, "nixl", b"one") == {}
    assert lives.reached("p", 2, "nixl", b"two") == {("nixl", (0, 0)): b"one"}


def test_an_endpoint_from_which_nothing_landed_is_replaced_and_freed() -> None:
    lives = PeerEndpoints()
    lives.reached("p", 1, "nixl", b"wrong")
    lives.reached("p", 1, "nixl", b"of rank 1", (1, 0))
    lives.landed("p", 1, "tcp")
    lives.landed("p", 2, "nixl")
    lives.landed("q", 1, "nixl")
    assert lives.reached("p", 1, "nixl", b"right") == {("nixl", (0, 0)): b"wrong"}
    lives.landed("p", 1, "nixl")
    with pytest.raises(TransferFailed, match="another endpoint"):
        lives.reached("p", 1, "nixl", b"wrong")
    assert lives.lost("p", 1) == {("nixl", (0, 0)): b"right", ("nixl", (1, 0)): b"of rank 1"}


class Keeper:
    """A connector that keeps something for each peer."""

    name = "keeper"
    metadata = b""

    def __init__(self) -> None:
        self.forgotten: list[bytes] = []

    def forget(self, metadata: bytes) -> None:
        self.forgotten.append(metadata)


def test_connectors_forget_lives_that_are_over() -> None:
    keeper = Keeper()
    connectors = ConnectorSet([keeper])  # type: ignore[list-item]
    connectors.reached("p", 1, "keeper", b"one", WHOLE)
    connectors.reached("p", 1, "gone connector", b"?", WHOLE)
    connectors.meet("p", 1)
    assert keeper.forgotten == []
    connectors.meet("p", 2)
    assert keeper.forgotten == [b"one"]
    connectors.reached("p", 2, "keeper", b"two", WHOLE)
    connectors.lost("p", 1)
    assert keeper.forgotten == [b"one"]
    connectors.lost("p", 2)
    assert keeper.forgotten == [b"one", b"two"]


def test_agents_of_peers_that_rest_are_destroyed_and_made_again() -> None:
    """Over real NIXL."""
    pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
    from pdserve.kv_transfer.nixl.nixl import NixlConnector
    from pdserve.kv_transfer.nixl.nixl_agent import Agent, UcxAgent

    alive: set[str] = set()
    changed = threading.Condition()

    class CountedAgent(UcxAgent):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self._name = name
            with changed:
                alive.add(name)

        def destroy(self) -> None:
            super().destroy()
            with changed:
                alive.discard(self._name)
                changed.notify_all()

    def make_agent(name: str) -> Agent:
        return CountedAgent(name)

    def wait_alive(count: int) -> None:
        with changed:
            assert changed.wait_for(lambda: len(alive) == count, HANG_S), alive

    sources = [NixlConnector() for _ in range(3)]
    pools = [make_pool(seed=number) for number in range(3)]
    receiver, target = NixlConnector(NixlSettings(max_resting_peers=1), make_agent), make_pool()
    receiver.serve(target)
    try:
        for source, pool in zip(sources, pools, strict=True):
            source.serve(pool)

        def read(number: int) -> None:
            _read(receiver, sources[number], pools[number], target)

        for number in (0, 1):
            read(number)
        wait_alive(3)  # the receiver's own, and one for each peer: the second was not at rest when it was read from
        read(2)
        wait_alive(3)
        read(0)
        receiver.forget(sources[0].metadata)
        receiver.forget(b"nonsense")
        wait_alive(2)
        read(0)
        wait_alive(3)
    finally:
        for connector in (receiver, *sources):
            connector.close()
    assert not alive


def _read(receiver: object, source: object, pool: HostPool, target: HostPool) -> None:
    transfer = Transfer(source, pool, range(8))  # type: ignore[arg-type]
    blocks = transfer.blocks(range(8), range(8))
    read = start_read(receiver, source.metadata, transfer.token, blocks)  # type: ignore[arg-type, attr-defined]
    assert read.wait_ended() is ReadOutcome.DONE
    assert all(target.block(number) == pool.block(number) for number in range(8))
    transfer.close()


def test_a_bound_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError):
        NixlSettings(max_resting_peers=-1)
