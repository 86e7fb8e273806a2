"""Pieces of one window over NIXL: how many are posted at once, and what happens to them when one fails or hangs."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from pdserve.common.errors import ConfigError
from pdserve.kv_transfer.connector import BlockToRead
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_agent import AgentRead, ReadStatus, Region
from pdserve.kv_transfer.nixl.nixl_connection import NixlConnection
from pdserve.kv_transfer.nixl.nixl_peer import NixlPeer
from pdserve.kv_transfer.nixl.nixl_settings import HELLO_BYTES, NixlAddress, NixlSettings
from pdserve.kv_transfer.pull.connection import ConnectionBroken
from tests.support.engine.pretend_pool import PretendedPool, digest_on_device, on_device
from tests.support.run.waiting import HANG_S, wait_until

from .recorded_read import make_pool

BLOCK_BYTES = 256 << 10
"""Two blocks are one piece."""
POOL = make_pool(None, 16, BLOCK_BYTES)
BLOCKS = [BlockToRead(index, 0, index, index) for index in range(11)]


class _Read:
    def __init__(self, pieces: Sequence[int], status: ReadStatus, looks: float) -> None:
        """looks: looks at it after which it is done."""
        self.pieces = list(pieces)
        self.now = status
        self.is_released = False
        self._looks = looks

    def status(self) -> ReadStatus:
        self._looks -= 1
        if self._looks < 0:
            self.now = ReadStatus.DONE
        return self.now

    def release(self) -> None:
        assert self.now is ReadStatus.DONE
        assert not self.is_released
        self.is_released = True


class _Agent:
    """An `Agent` whose reads of blocks end when the test says so."""

    metadata = b""

    def __init__(self, status: ReadStatus) -> None:
        self.status = status
        """With which reads begin."""
        self.num_that_end = 0
        """Reads that are done after a few looks."""
        self.posted: list[_Read] = []
        self.is_destroyed = False
        self._num_pairs = 0

    def register(self, region: Region) -> None: ...

    def load(self, name: str, metadata: bytes) -> None: ...

    def pair(self, local: Region, remote: Region) -> int:
        self._num_pairs += 1
        return self._num_pairs - 1

    def read(self, pair: int, local_pieces: Sequence[int], remote_pieces: Sequence[int]) -> AgentRead:
        if pair == 0:  # the first bytes that are read from a source
            return _Read(remote_pieces, ReadStatus.DONE, math.inf)
        looks = 5 if len(self.posted) < self.num_that_end else math.inf
        self.posted.append(_Read(remote_pieces, self.status, looks))
        return self.posted[-1]

    def destroy(self) -> None:
        self.is_destroyed = True


def connect(agent: _Agent, most_posted: int = 99, **changes: float) -> NixlConnection:
    """most_posted: as for memory of a device."""
    source = NixlAddress("source", b"", 1, BLOCK_BYTES, POOL.num_blocks, 1, bytes(HELLO_BYTES))
    settings = NixlSettings(**({"read_stall_s": HANG_S} | changes))  # type: ignore[arg-type]
    peer = NixlPeer(POOL, lambda name: agent)
    made = NixlConnection(source, POOL, settings, lambda: peer, threading.Event(), lambda: None)
    assert made._most_posted == 2, "in memory of the host"
    made._most_posted = most_posted
    return made


def test_pieces_that_a_processor_copies_are_copied_one_by_one() -> None:
    """A copy displaces what is to be digested from the cache."""
    agent = _Agent(ReadStatus.DONE)
    found = [(received, len(agent.posted)) for received in connect(agent).fetch(bytes(16), BLOCKS)]
    assert found == [(2, 1), (4, 2), (6, 3), (8, 4), (10, 5), (11, 6)]
    assert all(read.is_released for read in agent.posted)


def test_in_memory_of_the_host_one_piece_is_posted_ahead() -> None:
    agent = _Agent(ReadStatus.UNDER_WAY)
    agent.num_that_end = 6
    found = [(received, len(agent.posted)) for received in connect(agent, most_posted=2).fetch(bytes(16), BLOCKS)]
    assert all(posted - (received + 1) // 2 <= 1 for received, posted in found)
    assert (found[-1][0], len(agent.posted)) == (11, 6)


def test_pieces_that_hardware_moves_are_all_posted_at_once_and_taken_as_they_come() -> None:
    agent = _Agent(ReadStatus.UNDER_WAY)
    fetching = connect(agent).fetch(bytes(16), BLOCKS)
    arrived: list[int] = []
    reading = threading.Thread(target=lambda: arrived.append(next(fetching)))
    reading.start()
    wait_until(lambda: len(agent.posted) == 6)
    assert [read.pieces for read in agent.posted] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    agent.posted[1].now = agent.posted[2].now = agent.posted[4].now = ReadStatus.DONE
    agent.posted[0].now = ReadStatus.DONE
    reading.join(HANG_S)
    assert arrived == [6], "what arrived after the first piece is taken with it"
    agent.posted[3].now = agent.posted[5].now = ReadStatus.DONE
    assert list(fetching) == [11]
    assert all(read.is_released for read in agent.posted)


def test_one_piece_that_fails_breaks_the_connection_and_releases_none_that_is_under_way() -> None:
    agent = _Agent(ReadStatus.UNDER_WAY)
    connection = connect(agent)
    fetching = connection.fetch(bytes(16), BLOCKS)
    connection.interrupt()
    with pytest.raises(ConnectionBroken, match="blocks 0 to 1 from source: cancelled, and not ended in time"):
        next(fetching)
    fetching = connection.fetch(bytes(16), BLOCKS)
    agent.status = ReadStatus.FAILED
    with pytest.raises(ConnectionBroken, match="blocks 0 to 1 from source failed"):
        next(fetching)
    assert not any(read.is_released for read in agent.posted)
    connection.close()
    assert agent.is_destroyed, "the fence of all pieces"


def test_a_piece_that_hangs_behind_others_is_given_up_in_time() -> None:
    agent = _Agent(ReadStatus.UNDER_WAY)
    agent.num_that_end = 3
    connection = connect(agent, read_stall_s=0.1)
    fetching = connection.fetch(bytes(16), BLOCKS)
    received = 0
    with pytest.raises(ConnectionBroken, match=r"reading blocks 6 to 7 from source: nothing for 0.1 s"):
        for received in fetching:  # noqa: B007
            pass
    assert received == 6
    connection.close()


# Memory of a device.


@pytest.fixture
def no_ucx_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("UCX_PROTO_EMULATION_ENABLE", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"):
        monkeypatch.setenv(variable, "")  # so that it is as before after the test
        monkeypatch.delenv(variable)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)


class _EnvironAgent(_Agent):
    def __init__(self, name: str) -> None:
        super().__init__(ReadStatus.DONE)
        made.append(dict(os.environ))


made: list[dict[str, str]] = []


def serve(pool: HostPool | PretendedPool) -> dict[str, str]:
    """The environment in which the connector's agent was made."""
    connector = NixlConnector(make_agent=_EnvironAgent)
    try:
        connector.serve(pool)
    finally:
        connector.close()
    return made[-1]


def device_pool() -> PretendedPool:
    return PretendedPool(on_device(make_pool(None, 2, BLOCK_BYTES)), 1, 1, HANG_S, digest_on_device)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Devices that became current, and in which threads."""
    entered: list[tuple[int, str]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: entered.append((device, threading.current_thread().name))
    )
    return entered


def test_each_thread_that_uses_an_agent_of_a_device_enters_it(entered: list[tuple[int, str]]) -> None:
    def run(name: str, call: Callable[[], object]) -> None:
        thread = threading.Thread(target=call, name=name)
        thread.start()
        thread.join(HANG_S)

    peers: list[NixlPeer] = []
    agent = _Agent(ReadStatus.DONE)
    source = NixlAddress("source", b"", 1, BLOCK_BYTES, POOL.num_blocks, 1, bytes(HELLO_BYTES))
    run("spares", lambda: peers.append(NixlPeer(device_pool(), lambda name: agent)))
    run("reader", lambda: peers[0].connect(source, HANG_S, source.block_bytes))
    peers[0].destroy(threading.Event(), HANG_S)
    assert entered == [(0, "spares"), (0, "reader"), (0, "nixl-destroy")]
    connect(agent).close()
    assert len(entered) == 3, "memory of the host"


@pytest.mark.usefixtures("no_ucx_variables", "entered")
def test_ucx_reads_between_processes_of_a_device_without_nvlink() -> None:
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY" not in serve(POOL)
    assert serve(device_pool())["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "y"


@pytest.mark.usefixtures("entered")
def test_pieces_of_a_device_have_many_blocks() -> None:
    """Each is digested by launches and a wait, whatever its size."""
    agent = _Agent(ReadStatus.DONE)
    pool = PretendedPool(on_device(make_pool(None, 80, BLOCK_BYTES)), 1, 1, HANG_S, digest_on_device)
    source = NixlAddress("source", b"", 1, BLOCK_BYTES, pool.num_blocks, 1, bytes(HELLO_BYTES))
    peer = NixlPeer(pool, lambda name: agent)
    connection = NixlConnection(source, pool, NixlSettings(), lambda: peer, threading.Event(), lambda: None)
    blocks = [BlockToRead(index, 0, index, index) for index in range(70)]
    assert list(connection.fetch(bytes(16), blocks)) == [64, 70]
    assert [len(read.pieces) for read in agent.posted] == [64, 6], "16 MiB, and the rest"
    connection.close()


@pytest.mark.usefixtures("no_ucx_variables", "entered")
def test_ucx_emulates_nothing_for_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "UCX_PROTO_EMULATION_ENABLE" not in serve(POOL)
    assert serve(device_pool())["UCX_PROTO_EMULATION_ENABLE"] == "n"
    monkeypatch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")
    assert serve(device_pool())["UCX_PROTO_EMULATION_ENABLE"] == "y", "the environment decides"


@pytest.mark.usefixtures("no_ucx_variables", "entered")
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "max_split_size_mb:64, expandable_segments:True")
    serve(POOL)
    with pytest.raises(ConfigError, match=f"{variable} is 'max_split_size_mb:64, expandable_segments:True'.*set exp"):
        serve(device_pool())
    monkeypatch.setenv(variable, "expandable_segments:False")
    serve(device_pool())
