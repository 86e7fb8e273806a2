"""A reader against a source that lies: each read fails with a reason, and nothing that it sent lands (I3, I8, I9)."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import BlockToRead, ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.pull.read_grants import ReadRefusal
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_frames import ReadAnswer, ReadRequest
from tests.support.run.waiting import HANG_S

from .hostile_source import HostileSource, Script, honest_answer
from .recorded_read import BLOCK_BYTES, RecordedRead, make_pool, start_read
from .tcp_link import small_settings

ZERO_DIGEST = XXH3.of(memoryview(bytes(BLOCK_BYTES)), 0)


@pytest.fixture
def pool() -> HostPool:
    return make_pool(seed=5)


@pytest.fixture
def receiver(pool: HostPool) -> Iterator[TcpConnector]:
    connector = TcpConnector(small_settings(sockets_per_peer=1, read_stall_s=HANG_S))
    connector.serve(pool)
    yield connector
    connector.close()


@pytest.fixture
def impatient(pool: HostPool) -> Iterator[TcpConnector]:
    """A receiver for sources that fall silent."""
    connector = TcpConnector(small_settings(sockets_per_peer=1, read_stall_s=0.2))
    connector.serve(pool)
    yield connector
    connector.close()


@pytest.fixture
def hostile() -> Iterator[Callable[[Script], HostileSource]]:
    sources: list[HostileSource] = []

    def make(script: Script) -> HostileSource:
        sources.append(HostileSource(script))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


def read_zeros(receiver: TcpConnector, source: HostileSource, first: int = 0, count: int = 4) -> RecordedRead:
    blocks = [BlockToRead(index, ZERO_DIGEST, index) for index in range(first, first + count)]
    return start_read(receiver, source.metadata, secrets.token_bytes(16), blocks)


def altered_answer(**changes: Any) -> Script:
    """The honest answer, with other values in its header."""

    def script(request: ReadRequest) -> bytes:
        answer = ReadAnswer.to_request(request)
        changed = {name: change(answer) if callable(change) else change for name, change in changes.items()}
        return dataclasses.replace(answer, **changed).encode() + bytes(request.count * request.block_bytes)

    return script


def test_honest_source_for_comparison(receiver: TcpConnector, hostile: Callable[[Script], HostileSource]) -> None:
    read = read_zeros(receiver, hostile(honest_answer), count=30)
    assert read.wait_ended() is ReadOutcome.DONE


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(lambda _: b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", id="another protocol"),
        pytest.param(lambda _: bytes(ReadAnswer.NUM_BYTES), id="zeros"),
        pytest.param(lambda _: b"\xff" * 100_000, id="garbage"),
        pytest.param(lambda r: b"PDKa\x00\x02" + ReadAnswer.to_request(r).encode()[6:], id="another version"),
        pytest.param(lambda r: b"PDKa\x00\x01\x00\x63" + ReadAnswer.to_request(r).encode()[8:], id="unknown status"),
        pytest.param(lambda r: r.encode() + bytes(r.count * r.block_bytes), id="a request for an answer"),
        pytest.param(altered_answer(serial=lambda a: a.serial + 1), id="another serial"),
        pytest.param(altered_answer(first_index=lambda a: a.first_index + 1), id="other blocks"),
        pytest.param(altered_answer(count=lambda a: a.count + 1), id="too many blocks"),
        pytest.param(altered_answer(count=lambda a: a.count - 1), id="too few blocks"),
        pytest.param(altered_answer(count=0xFFFF_FFFF), id="a vast number of blocks"),
        pytest.param(altered_answer(block_bytes=lambda a: a.block_bytes * 2), id="larger blocks"),
        pytest.param(altered_answer(block_bytes=0xFFFF_FFFF_FFFF_FFFF), id="vast blocks"),
        pytest.param(altered_answer(refusal=ReadRefusal.UNKNOWN_TOKEN), id="a refusal with blocks"),
    ],
)
def test_i9_wrong_header_fails_the_read(
    receiver: TcpConnector, pool: HostPool, hostile: Callable[[Script], HostileSource], script: Script
) -> None:
    before = bytes(pool.view)
    read = read_zeros(receiver, hostile(script))
    assert read.wait_failed()
    assert read.ranges == []
    assert bytes(pool.view) == before, "no byte is written before the header is known to be right"


@pytest.mark.parametrize("num_bytes", [0, 1, ReadAnswer.NUM_BYTES - 1, ReadAnswer.NUM_BYTES])
def test_truncated_before_the_blocks(
    impatient: TcpConnector, pool: HostPool, hostile: Callable[[Script], HostileSource], num_bytes: int
) -> None:
    before = bytes(pool.view)
    assert "no byte moved" in read_zeros(impatient, hostile(lambda r: honest_answer(r)[:num_bytes])).wait_failed()
    assert bytes(pool.view) == before


def test_truncated_within_a_block(impatient: TcpConnector, hostile: Callable[[Script], HostileSource]) -> None:
    whole = 3 * BLOCK_BYTES + ReadAnswer.NUM_BYTES
    read = read_zeros(impatient, hostile(lambda r: honest_answer(r)[: whole + 100]))
    assert "no byte moved" in read.wait_failed()
    assert read.ranges == []


def test_hang_up_without_a_word_on_a_new_connection(
    receiver: TcpConnector, hostile: Callable[[Script], HostileSource]
) -> None:
    source = hostile(lambda _: None)
    assert "closed by the peer" in read_zeros(receiver, source).wait_failed()
    assert source.num_connections == 1, "a new connection that breaks is not stale; it is not tried again"


def test_every_answer_twice(receiver: TcpConnector, hostile: Callable[[Script], HostileSource]) -> None:
    source = hostile(lambda r: honest_answer(r) * 2)
    assert read_zeros(receiver, source).wait_ended() is ReadOutcome.DONE
    # The second copy stands where the next answer should; its serial is that of the last request.
    assert "serial" in read_zeros(receiver, source).wait_failed()
    assert read_zeros(receiver, source).wait_ended() is ReadOutcome.DONE


def test_i8_bytes_of_another_request(
    receiver: TcpConnector, pool: HostPool, hostile: Callable[[Script], HostileSource]
) -> None:
    source = hostile(lambda r: ReadAnswer.to_request(r).encode() + b"\x01" * (r.count * r.block_bytes))
    read = read_zeros(receiver, source, count=3)
    assert "does not match its digest" in read.wait_failed()
    assert read.ranges == []
    assert source.num_requests == 2, "asked once more, for all three at once"


def test_silent_source_does_not_hold_up_others(
    receiver: TcpConnector, hostile: Callable[[Script], HostileSource]
) -> None:
    silent = read_zeros(receiver, hostile(lambda _: b""))
    assert read_zeros(receiver, hostile(honest_answer)).wait_ended() is ReadOutcome.DONE
    assert silent.outcome is None
    silent.cancel()
    assert silent.wait_ended() is ReadOutcome.CANCELLED


def test_stale_connection_is_replaced_once(receiver: TcpConnector, hostile: Callable[[Script], HostileSource]) -> None:
    scripts: list[Script] = [honest_answer, lambda _: None, honest_answer, lambda _: None, lambda _: None]
    answers = iter(scripts)
    source = hostile(lambda request: next(answers)(request))
    assert read_zeros(receiver, source).wait_ended() is ReadOutcome.DONE
    assert read_zeros(receiver, source).wait_ended() is ReadOutcome.DONE
    assert receiver.read_counters["stale_connections"] == 1
    assert read_zeros(receiver, source).wait_failed()
    assert source.num_connections == 3
