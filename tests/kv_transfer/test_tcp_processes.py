"""The TCP connector against a source in another process that is stopped, continued and killed."""

from __future__ import annotations

import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.kv_transfer.connector import BlockToRead, PoolMemory, ReadOutcome
from pdserve.kv_transfer.digest import block_digests
from pdserve.kv_transfer.tcp import TcpConnector
from pdserve.kv_transfer.tcp_settings import TcpSettings

from .recorded_read import RecordedRead, make_pool, start_read

SEED, NUM_BLOCKS, BLOCK_BYTES = 11, 512, 128 << 10
READ_STALL_S = 0.5

pytestmark = pytest.mark.process


class SourceProcess:
    def __init__(self) -> None:
        self.token = secrets.token_bytes(16)
        self.pool = make_pool(SEED, NUM_BLOCKS, BLOCK_BYTES)
        arguments = [str(SEED), str(NUM_BLOCKS), str(BLOCK_BYTES), self.token.hex()]
        script = Path(__file__).with_name("stopped_source.py")
        self._process = subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.metadata = self._process.stdout.readline().strip()
        digests = block_digests(self.pool, range(NUM_BLOCKS))
        self.blocks = [BlockToRead(index, digests[index], index) for index in range(NUM_BLOCKS)]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.kill()
        self._process.stdout.close()
        self._process.wait()


@pytest.fixture
def source() -> Iterator[SourceProcess]:
    process = SourceProcess()
    yield process
    process.close()


@pytest.fixture
def pool() -> PoolMemory:
    return make_pool(num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)


@pytest.fixture
def receiver(pool: PoolMemory) -> Iterator[TcpConnector]:
    connector = TcpConnector(TcpSettings(read_stall_s=READ_STALL_S, request_bytes=4 * BLOCK_BYTES))
    connector.serve(pool)
    yield connector
    connector.close()


class _SignalOnLanding(RecordedRead):
    """Signals the source from the transport thread as soon as something has landed: in the middle of the read."""

    def __init__(self, source: SourceProcess, number: signal.Signals) -> None:
        super().__init__(NUM_BLOCKS)
        self._source = source
        self._signal = number

    def landed(self, first: int, count: int) -> None:
        if not self.ranges:
            self._source.signal(self._signal)
        super().landed(first, count)


def test_read_from_another_process(source: SourceProcess, receiver: TcpConnector, pool: PoolMemory) -> None:
    read = start_read(receiver, source.metadata, source.token, source.blocks)
    assert read.wait_ended() is ReadOutcome.DONE
    assert pool.view == source.pool.view


def test_i13_stopped_then_continued_source_changes_no_byte(
    source: SourceProcess, receiver: TcpConnector, pool: PoolMemory
) -> None:
    read = _SignalOnLanding(source, signal.SIGSTOP)
    receiver.read(source.metadata, source.token, source.blocks, read)
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


def test_killed_source_fails_the_read(source: SourceProcess, receiver: TcpConnector, pool: PoolMemory) -> None:
    read = _SignalOnLanding(source, signal.SIGKILL)
    receiver.read(source.metadata, source.token, source.blocks, read)
    assert read.wait_failed()
    for position in read.landed_blocks:
        assert pool.block(position) == source.pool.block(position)


def test_noise_is_as_the_other_process_drew_it() -> None:
    assert make_pool(3, 1, 64).view == random.Random(3).randbytes(64)
