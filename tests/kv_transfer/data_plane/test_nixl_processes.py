"""The NIXL connector against a source in another process that is stopped, continued and killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)

from pdserve.kv_transfer.connector import BlockToRead, ReadOrder, ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_settings import NixlAddress, NixlSettings
from tests.support.run.waiting import HANG_S

from .recorded_read import make_pool, start_read
from .source_process import BLOCK_BYTES, NUM_BLOCKS, SignalOnLanding, SourceProcess

READ_STALL_S = 0.5
SHARED_MEMORY, TCP = "^tcp", "tcp"

pytestmark = pytest.mark.process


@pytest.fixture(params=[SHARED_MEMORY, TCP], ids=["shared-memory", "tcp"])
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Transports that UCX may use, in this process and in the source."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture
def source(transports: str) -> Iterator[SourceProcess]:
    process = SourceProcess("nixl")
    yield process
    process.close()


@pytest.fixture
def pool() -> HostPool:
    return make_pool(num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)


@pytest.fixture
def receiver(pool: HostPool, transports: str) -> Iterator[NixlConnector]:
    connector = NixlConnector(NixlSettings(read_stall_s=READ_STALL_S))
    connector.serve(pool)
    connector.meet("prefill-1", 1)
    yield connector
    connector.close()


def test_read_from_another_process(source: SourceProcess, receiver: NixlConnector, pool: HostPool) -> None:
    read = start_read(receiver, source.metadata, source.token, source.blocks)
    assert read.wait_ended() is ReadOutcome.DONE
    assert pool.view == source.pool.view
    assert receiver.agent_counters["condemned"] == 0


@pytest.mark.few(1)
def test_i13_stopped_then_continued_source_changes_no_byte(
    source: SourceProcess, receiver: NixlConnector, pool: HostPool, transports: str
) -> None:
    read = SignalOnLanding(source, signal.SIGSTOP)
    receiver.read(ReadOrder(source.metadata, source.token, source.blocks), read)
    read.wait_landed(1)
    outcome = read.wait_ended()
    # The memory of a stopped process can still be read; its sockets are silent.
    assert outcome is (ReadOutcome.FAILED if transports == TCP else ReadOutcome.DONE)
    # Each agent that had a window of it under way hangs by itself.
    assert receiver.agent_counters["condemned"] in ((1, 2) if transports == TCP else (0,))
    # What its blocks are used for from now on stays as it is, whatever the source still had to say.
    pool.view[:] = bytes(len(pool.view))
    source.signal(signal.SIGCONT)
    time.sleep(0.3)
    assert not any(pool.view)
    if transports == TCP:
        return  # UCX at the source may have aborted: nixl_agent.py
    # The source is as good as before.
    again = start_read(receiver, source.metadata, source.token, source.blocks)
    assert again.wait_ended() is ReadOutcome.DONE
    assert pool.view == source.pool.view


@pytest.mark.few(1)
def test_i13_cancelled_read_of_a_stopped_source_ends_only_when_it_is_fenced(
    source: SourceProcess, receiver: NixlConnector, pool: HostPool
) -> None:
    read = SignalOnLanding(source, signal.SIGSTOP)
    read.read = receiver.read(ReadOrder(source.metadata, source.token, source.blocks), read)
    read.wait_landed(1)
    read.cancel()
    read.wait_ended()
    pool.view[:] = bytes(len(pool.view))
    source.signal(signal.SIGCONT)
    time.sleep(0.3)
    assert not any(pool.view)


@pytest.mark.slow
def test_killed_source_fails_the_read(source: SourceProcess, receiver: NixlConnector, pool: HostPool) -> None:
    read = SignalOnLanding(source, signal.SIGKILL)
    receiver.read(ReadOrder(source.metadata, source.token, source.blocks), read)
    read.wait_ended()
    for position in read.landed_blocks:
        assert pool.block(position) == source.pool.block(position)
    # And whoever comes later is told, for nobody is there.
    blocks = [BlockToRead(block.index, block.digest, block.local_block, block.location) for block in source.blocks[:4]]
    assert start_read(receiver, source.metadata, source.token, blocks).wait_failed()


@pytest.mark.slow
def test_a_killed_source_is_given_up_and_its_next_life_is_read_from(
    source: SourceProcess, receiver: NixlConnector, pool: HostPool
) -> None:
    assert start_read(receiver, source.metadata, source.token, source.blocks).wait_ended() is ReadOutcome.DONE
    agent = NixlAddress.from_metadata(source.metadata).agent
    readers = [thread for thread in threading.enumerate() if thread.name.startswith(f"nixl-read-{agent}")]
    assert 1 <= len(readers) <= NixlSettings().agents_per_peer
    source.signal(signal.SIGKILL)
    receiver.forget(source.metadata)
    for reader in readers:
        reader.join(HANG_S)
        assert not reader.is_alive(), "an agent of the dead source was not given up"
    next_life = SourceProcess("nixl")
    pool.view[:] = bytes(len(pool.view))
    try:
        read = start_read(receiver, next_life.metadata, next_life.token, next_life.blocks)
        assert read.wait_ended() is ReadOutcome.DONE
        assert pool.view == next_life.pool.view
        assert receiver.agent_counters["condemned"] == 0
    finally:
        next_life.close()


@pytest.mark.few(1)
def test_i8_blocks_that_the_source_uses_for_something_else_are_never_taken(
    source: SourceProcess, receiver: NixlConnector
) -> None:
    """A token opens nothing here. A stale reference still yields nothing: the digest is of what was published."""
    stale = [
        BlockToRead(block.index, block.digest, block.local_block, (block.location + 1) % 8)
        for block in source.blocks[:8]
    ]
    read = start_read(receiver, source.metadata, source.token, stale)
    assert "digest" in read.wait_failed()
    assert read.landed_blocks == set()


LIES: list[tuple[dict[str, object], str]] = [
    ({"block_bytes": 2 * BLOCK_BYTES}, "another size"),
    ({"num_blocks": 1 << 40}, "names no memory"),
    ({"num_blocks": 2 * NUM_BLOCKS}, "has no 1024 pieces"),
    ({"address": -5}, "names no memory"),
    ({"address": 4096}, "has no 512 pieces"),
    ({"agent": "x" * 1_000_000}, "has 1000"),
    ({"agent": "x" * 1000}, "names no agent"),
    ({"agent": "somebody"}, "belongs to another agent"),
    ({"agent_metadata": b""}, "0 bytes of its agent"),
    ({"agent_metadata": b"nixlSerDes|Agent"}, "cannot be reached"),
    ({"hello": b"short"}, "names no agent"),
    ({"hello": b"h" * 16}, "another epoch"),
    ({"version": 2}, "version 2"),
]


@pytest.mark.few(1)
def test_i9_what_a_lying_source_says_fails_the_read(source: SourceProcess, receiver: NixlConnector) -> None:
    address = NixlAddress.from_metadata(source.metadata)
    for changes, message in LIES:
        metadata = msgspec.structs.replace(address, **changes).to_metadata()
        assert message in start_read(receiver, metadata, source.token, source.blocks[:4]).wait_failed(), changes
    block = source.blocks[0]
    for location in (NUM_BLOCKS, 0xFFFF_FFFF):
        lie = BlockToRead(block.index, block.digest, block.local_block, location)
        assert "outside its pool" in start_read(receiver, source.metadata, source.token, [lie]).wait_failed()
    read = start_read(receiver, source.metadata, source.token, source.blocks[:4])
    assert read.wait_ended() is ReadOutcome.DONE, "a lie cost an honest read"


@pytest.mark.parametrize("status", [0, 3])
def test_no_finalizer_changes_the_exit_status(status: int) -> None:
    """Where rdma-core is installed, those of NIXL's own libraries crash; `abort` stands for them where it is not."""
    program = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.abort, ctypes.c_void_p), None)
from pdserve.kv_transfer.nixl.nixl_agent import UcxAgent
agents = [UcxAgent("left"), UcxAgent("ended")]
agents[1].destroy()
print("whole")
sys.exit(int(sys.argv[1]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(status)], stdout=subprocess.PIPE, timeout=HANG_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (status, b"whole\n")
