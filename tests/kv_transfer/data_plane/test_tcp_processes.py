"""The TCP connector against a source in another process that is stopped, continued and killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pdserve.kv_transfer.connector import ReadOrder, ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_settings import TcpSettings

from .recorded_read import make_pool, start_read
from .source_process import BLOCK_BYTES, NUM_BLOCKS, SignalOnLanding, SourceProcess

READ_STALL_S = 0.5

pytestmark = pytest.mark.process


@pytest.fixture
def source() -> Iterator[SourceProcess]:
    process = SourceProcess("tcp")
    yield process
    process.close()


@pytest.fixture
def pool() -> HostPool:
    return make_pool(num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)


@pytest.fixture
def receiver(pool: HostPool) -> Iterator[TcpConnector]:
    connector = TcpConnector(TcpSettings(read_stall_s=READ_STALL_S, request_bytes=4 * BLOCK_BYTES))
    connector.serve(pool)
    yield connector
    connector.close()


def test_read_from_another_process(source: SourceProcess, receiver: TcpConnector, pool: HostPool) -> None:
    read = start_read(receiver, source.metadata, source.token, source.blocks)
    assert read.wait_ended() is ReadOutcome.DONE
    assert pool.view == source.pool.view


def test_i13_stopped_then_continued_source_changes_no_byte(
    source: SourceProcess, receiver: TcpConnector, pool: HostPool
) -> None:
    read = SignalOnLanding(source, signal.SIGSTOP)
    receiver.read(ReadOrder(source.metadata, source.token, source.blocks), read)
    read.wait_landed(1)
    assert read.wait_failed()
    assert read.num_landed < NUM_BLOCKS
    after = bytes(pool.view)
    source.signal(signal.SIGCONT)
    time.sleep(0.3)
    assert pool.view == after
    for position in read.landed_blocks:
        assert pool.block(position) == source.pool.block(position)
    # The source is as good as before: its token still opens, over new connections.
    again = start_read(receiver, source.metadata, source.token, source.blocks)
    assert again.wait_ended() is ReadOutcome.DONE
    assert pool.view == source.pool.view


@pytest.mark.slow
def test_killed_source_fails_the_read(source: SourceProcess, receiver: TcpConnector, pool: HostPool) -> None:
    read = SignalOnLanding(source, signal.SIGKILL)
    receiver.read(ReadOrder(source.metadata, source.token, source.blocks), read)
    assert read.wait_failed()
    for position in read.landed_blocks:
        assert pool.block(position) == source.pool.block(position)


def test_noise_is_as_the_other_process_drew_it() -> None:
    assert make_pool(3, 1, 64).view == np.random.default_rng(3).integers(256, size=64, dtype=np.uint8).tobytes()
