"""Changed frames at both ends of the TCP data plane: a refusal or a closed connection, and others read on."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from pdserve.kv_transfer.connector import ReadOutcome
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_frames import ReadAnswer, ReadRequest
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress
from tests.support.inputs.fuzz_cases import Fuzzer
from tests.support.run.waiting import HANG_S

from .hostile_source import HostileSource
from .recorded_read import BLOCK_BYTES, NUM_BLOCKS, Transfer, make_pool, same_bytes, start_read
from .tcp_link import small_settings

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(0)]

LOOK_EVERY = 50


def _still_serves(source: TcpConnector, transfer: Transfer) -> bool:
    receiver, pool = TcpConnector(small_settings()), make_pool()
    receiver.serve(pool)
    blocks = transfer.blocks(range(20), range(20))
    try:
        read = start_read(receiver, source.metadata, transfer.token, blocks)
        return read.wait_ended() is ReadOutcome.DONE and same_bytes(transfer, pool, blocks)
    finally:
        receiver.close()


def test_requests_to_a_source(fuzzer: Fuzzer) -> None:
    pool = make_pool(seed=9)
    source = TcpConnector(small_settings(max_request_bytes=64 * BLOCK_BYTES))
    source.serve(pool)
    transfer = Transfer(source, pool, range(NUM_BLOCKS))
    address = TcpAddress.from_metadata(source.metadata)
    threads = threading.active_count()
    try:
        for number in fuzzer.cases():
            good = ReadRequest(number, transfer.token, fuzzer.draw.randrange(NUM_BLOCKS), 1, BLOCK_BYTES).encode()
            with (
                contextlib.suppress(OSError),
                socket.create_connection((address.host, address.port), HANG_S) as sock,
            ):
                sock.sendall(fuzzer.bytes(good * fuzzer.draw.choice((1, 1, 3))))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            if number % LOOK_EVERY == 1:
                assert _still_serves(source, transfer), str(fuzzer)
        fuzzer.check_memory()
        assert _still_serves(source, transfer)
        assert threading.active_count() < threads + 20
    finally:
        source.close()


def test_answers_of_a_source(fuzzer: Fuzzer) -> None:
    """A read either has the bytes that were promised, or did not land."""
    pool = make_pool(seed=9)
    honest = TcpConnector(small_settings())
    honest.serve(pool)
    transfer = Transfer(honest, pool, range(NUM_BLOCKS))

    def answer(asked: ReadRequest) -> bytes | None:
        first = transfer.blocks(range(asked.first_index, asked.first_index + asked.count), range(asked.count))
        content = b"".join(bytes(pool.view[block.location]) for block in first)
        whole = ReadAnswer(asked.serial, None, asked.first_index, asked.count, asked.block_bytes).encode() + content
        return fuzzer.bytes(whole) if fuzzer.draw.random() < 0.9 else None

    source = HostileSource(answer)
    receiver, target = TcpConnector(small_settings(sockets_per_peer=1, read_stall_s=0.2)), make_pool()
    receiver.serve(target)
    try:
        for _ in fuzzer.cases():
            blocks = transfer.blocks(range(4), range(4))
            read = start_read(receiver, source.metadata, transfer.token, blocks)
            outcome = read.wait_ended()
            assert outcome is not ReadOutcome.DONE or same_bytes(transfer, target, blocks), str(fuzzer)
        fuzzer.check_memory()
    finally:
        receiver.close()
        source.close()
        honest.close()
