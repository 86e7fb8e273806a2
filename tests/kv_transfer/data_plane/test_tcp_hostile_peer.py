"""A source against peers that lie: each loses its connection, others notice nothing (I8, I9)."""

from __future__ import annotations

import logging
import random
import secrets
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from pdserve.kv_transfer.connector import ReadOutcome
from pdserve.kv_transfer.pull.read_grants import ReadRefusal
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_frames import ReadAnswer, ReadRequest
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress
from tests.support.run.waiting import HANG_S, wait_until

from .recorded_read import BLOCK_BYTES, IN_TIME_S, NUM_BLOCKS, Transfer, make_pool, same_bytes, start_read
from .tcp_link import small_settings


@pytest.fixture
def source() -> Iterator[TcpConnector]:
    connector = TcpConnector(small_settings(max_connections=8, max_request_bytes=64 * BLOCK_BYTES))
    connector.serve(make_pool(seed=9))
    yield connector
    connector.close()


@pytest.fixture
def transfer(source: TcpConnector) -> Transfer:
    return Transfer(source, make_pool(seed=9), range(NUM_BLOCKS))


def connect(source: TcpConnector) -> socket.socket:
    address = TcpAddress.from_metadata(source.metadata)
    return socket.create_connection((address.host, address.port), HANG_S)


def hangs_up(sock: socket.socket) -> bool:
    """True if the source ends the connection without sending anything."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def ask(sock: socket.socket, request: ReadRequest) -> ReadAnswer:
    sock.sendall(request.encode())
    return ReadAnswer.decode(sock.recv(ReadAnswer.NUM_BYTES, socket.MSG_WAITALL), request)


def still_serves(source: TcpConnector, transfer: Transfer) -> bool:
    receiver = TcpConnector(small_settings())
    pool = make_pool()
    receiver.serve(pool)
    blocks = transfer.blocks(range(20), range(20))
    read = start_read(receiver, source.metadata, transfer.token, blocks)
    done = read.wait_ended() is ReadOutcome.DONE
    receiver.close()
    return done and same_bytes(transfer, pool, blocks)


GOOD = ReadRequest(1, bytes(16), 0, 1, BLOCK_BYTES).encode()


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl\r\n\r\n", id="another protocol"),
        pytest.param(bytes(1000), id="zeros"),
        pytest.param(random.Random(1).randbytes(100_000), id="noise"),
        pytest.param(b"PDKr\x00\x02" + GOOD[6:], id="another version"),
        pytest.param(b"PDKr\x00\x01\x00\x01" + GOOD[8:], id="reserved bits"),
        pytest.param(ReadAnswer(1, None, 0, 1, 1).encode() * 2, id="an answer"),
        pytest.param(ReadRequest(1, bytes(16), 0, 0, BLOCK_BYTES).encode(), id="no blocks"),
        pytest.param(
            ReadRequest(1, bytes(16), 0xFFFF_FFFF, 0xFFFF_FFFF, BLOCK_BYTES).encode(), id="beyond all indexes"
        ),
    ],
)
def test_i9_garbage_costs_the_connection(source: TcpConnector, transfer: Transfer, sent: bytes) -> None:
    with connect(source) as sock:
        sock.sendall(sent)
        assert hangs_up(sock)
    assert source.source_counters["malformed_frames"] == 1
    assert still_serves(source, transfer)


def test_i6_request_that_never_comes_whole() -> None:
    source = TcpConnector(small_settings(first_request_s=1.0))
    pool = make_pool(seed=9)
    source.serve(pool)
    socks = [connect(source) for _ in range(3)]
    for sock, sent in zip(socks, [b"", GOOD[:1], GOOD[:-1]], strict=True):
        sock.sendall(sent)
    assert all(hangs_up(sock) for sock in socks)
    for sock in socks:
        sock.close()
    assert still_serves(source, Transfer(source, pool, range(NUM_BLOCKS)))
    source.close()


def test_garbage_is_warned_of_once_a_peer(
    source: TcpConnector, transfer: Transfer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="pdserve.kv_transfer"):
        for _ in range(20):
            with connect(source) as sock:
                sock.sendall(b"x" * ReadRequest.NUM_BYTES)
                assert hangs_up(sock)
    assert len(caplog.records) == 1
    assert "127.0.0.1" in caplog.text
    assert source.source_counters["malformed_frames"] == 20


def test_i8_refusals_send_no_block(source: TcpConnector, transfer: Transfer) -> None:
    # 64 blocks are the most that this source sends at once.
    requests = {
        ReadRefusal.UNKNOWN_TOKEN: ReadRequest(1, secrets.token_bytes(16), 0, 1, BLOCK_BYTES),
        ReadRefusal.UNPUBLISHED: ReadRequest(2, transfer.token, NUM_BLOCKS - 1, 2, BLOCK_BYTES),
        ReadRefusal.TOO_MANY: ReadRequest(3, transfer.token, 0, 65, BLOCK_BYTES),
        ReadRefusal.WRONG_BLOCK_BYTES: ReadRequest(4, transfer.token, 0, 1, BLOCK_BYTES + 1),
    }
    with connect(source) as sock:
        for refusal, request in requests.items():
            assert ask(sock, request).refusal is refusal
        # All on one connection: no byte stood between the answers, and it is still good.
        answer = ask(sock, ReadRequest(5, transfer.token, 7, 1, BLOCK_BYTES))
        assert answer.refusal is None
        block = sock.recv(BLOCK_BYTES, socket.MSG_WAITALL)
        assert block == bytes(transfer.pool.block(7))
    assert source.source_counters["refused_reads"] == 4


def test_i8_wrong_block_size_tells_nothing_without_a_token(source: TcpConnector) -> None:
    with connect(source) as sock:
        answer = ask(sock, ReadRequest(1, secrets.token_bytes(16), 0, 1, 17))
    assert answer.refusal is ReadRefusal.UNKNOWN_TOKEN


def read_one(sock: socket.socket, transfer: Transfer) -> bytes:
    assert ask(sock, ReadRequest(1, transfer.token, 3, 1, BLOCK_BYTES)).refusal is None
    return sock.recv(BLOCK_BYTES, socket.MSG_WAITALL)


def test_too_many_connections_that_read(source: TcpConnector, transfer: Transfer) -> None:
    kept = [connect(source) for _ in range(8)]
    assert all(read_one(sock, transfer) == bytes(transfer.pool.block(3)) for sock in kept)
    with connect(source) as sock:
        sock.sendall(ReadRequest(1, transfer.token, 0, 1, BLOCK_BYTES).encode())
        assert hangs_up(sock)
    assert source.num_refused_connections == 1
    for sock in kept:
        sock.close()
    wait_until(lambda: not source.num_connections)
    assert still_serves(source, transfer)


def test_peer_that_resets_during_a_send(source: TcpConnector, transfer: Transfer) -> None:
    for _ in range(5):
        sock = connect(source)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(ReadRequest(1, transfer.token, 0, 64, BLOCK_BYTES).encode())
        sock.close()
    assert still_serves(source, transfer)
    assert transfer.close().wait(HANG_S)


def test_i13_grant_closed_while_a_peer_does_not_read() -> None:
    block_bytes, num_blocks = 1 << 20, 32
    source = TcpConnector(small_settings(fence_after_s=0.2, max_request_bytes=64 << 20))
    pool = make_pool(seed=3, num_blocks=num_blocks, block_bytes=block_bytes)
    source.serve(pool)
    transfer = Transfer(source, pool, range(num_blocks))
    with connect(source) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        answer = ask(sock, ReadRequest(1, transfer.token, 0, num_blocks, block_bytes))
        assert answer.refusal is None
        began = time.monotonic()
        fenced = transfer.close()
        assert not fenced.wait(0.1), "a send is under way: its blocks cannot be given back yet"
        assert fenced.wait(HANG_S)
        assert time.monotonic() - began < IN_TIME_S
        # What the source does with its blocks now is seen by nobody: all that still comes was copied before.
        pool.view[:] = bytes(len(pool.view))
        received = 0
        try:
            while chunk := sock.recv(1 << 20):
                assert any(chunk)
                received += len(chunk)
        except ConnectionResetError:
            pass
        assert received < num_blocks * block_bytes
    source.close()
