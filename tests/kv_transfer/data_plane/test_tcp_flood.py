"""A source's port under a flood: connections that say nothing take no place of those that read, nor a token of theirs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve.common.security.tls import TlsIdentity
from pdserve.kv_transfer.connector import ReadOutcome
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.pull.read_grants import ReadRefusal
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_connections import SourceConnections
from pdserve.kv_transfer.tcp.tcp_frames import ReadAnswer, ReadRequest
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress, TcpSettings
from pdserve.kv_transfer.tcp.tcp_stream import TcpStream
from tests.support.processes.tls_authority import Authority
from tests.support.run.waiting import HANG_S, wait_until

from .recorded_read import BLOCK_BYTES, IN_TIME_S, NUM_BLOCKS, Transfer, make_pool, same_bytes, start_read
from .tcp_link import small_settings

SEED = 9
NUM_SILENT = 512


@pytest.fixture(params=["in the clear", "TLS"])
def identity(request: pytest.FixtureRequest, authority: Authority) -> TlsIdentity | None:
    return authority.identity() if request.param == "TLS" else None


@contextlib.contextmanager
def serving(**changes: Any) -> Iterator[tuple[TcpConnector, Transfer]]:
    source = TcpConnector(small_settings(**changes))
    source.serve(make_pool(seed=SEED))
    try:
        yield source, Transfer(source, make_pool(seed=SEED), range(NUM_BLOCKS))
    finally:
        source.close()


def connect(source: TcpConnector, local_host: str = "127.0.0.1") -> socket.socket:
    address = TcpAddress.from_metadata(source.metadata)
    return socket.create_connection((address.host, address.port), HANG_S, (local_host, 0))


def ask(sock: socket.socket, token: bytes, index: int = 0) -> ReadRefusal | bytes:
    """The block, or why not."""
    request = ReadRequest(1, token, index, 1, BLOCK_BYTES)
    sock.sendall(request.encode())
    answer = ReadAnswer.decode(sock.recv(ReadAnswer.NUM_BYTES, socket.MSG_WAITALL), request)
    return answer.refusal or sock.recv(BLOCK_BYTES, socket.MSG_WAITALL)


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.few(1)
def test_reads_go_on_beside_512_silent_connections(identity: TlsIdentity | None) -> None:
    with serving(tls=identity) as (source, transfer):
        receiver, pool = TcpConnector(small_settings(tls=identity)), make_pool()
        receiver.serve(pool)
        silent = []
        reads = []
        for number in range(NUM_SILENT):
            silent.append(connect(source))
            if number % 128 == 127:
                blocks = transfer.blocks(range(64), range(64))
                reads.append(start_read(receiver, source.metadata, transfer.token, blocks))
        assert [read.wait_ended() for read in reads] == [ReadOutcome.DONE] * 4
        # one that comes now finds a place, too
        fresh = TcpConnector(small_settings(tls=identity))
        fresh.serve(pool)
        blocks = transfer.blocks(range(64), range(64))
        assert start_read(fresh, source.metadata, transfer.token, blocks).wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, pool, blocks)
        assert source.num_connections <= TcpSettings().max_newcomers + 8
        assert source.num_refused_connections >= NUM_SILENT - TcpSettings().max_newcomers
        for connector in (receiver, fresh):
            connector.close()
        for sock in silent:
            sock.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("sent", [b"", b"P", ReadRequest(1, bytes(16), 0, 1, BLOCK_BYTES).encode()])
def test_newcomers_go_in_time_whatever_they_say(sent: bytes) -> None:
    with serving(first_request_s=0.5) as (source, _), connect(source) as sock:
        began = time.monotonic()
        sock.sendall(sent)
        if len(sent) > 1:
            sock.recv(ReadAnswer.NUM_BYTES, socket.MSG_WAITALL)  # refused: the token is unknown
        assert is_closed(sock)
        assert time.monotonic() - began < IN_TIME_S
        assert source.num_refused_connections == 0


def trickle(sock: socket.socket, sent: bytes) -> None:
    for number in range(len(sent)):
        sock.sendall(sent[number : number + 1])
        time.sleep(0.1)


def test_a_connection_that_trickles_goes_in_time_too() -> None:
    """Each byte begins a new wait of the socket; the connection's own time goes on."""
    request = ReadRequest(1, bytes(16), 0, 1, BLOCK_BYTES).encode()
    with serving(first_request_s=0.5) as (source, _), connect(source) as sock:
        with pytest.raises(ConnectionError):  # before all of it is sent
            trickle(sock, request[:-1])
        assert is_closed(sock)
        assert source.num_connections == 0


def test_connections_that_read_outlive_a_flood() -> None:
    with serving(max_newcomers=4) as (source, transfer), connect(source) as kept:
        assert ask(kept, transfer.token) == bytes(transfer.pool.block(0))
        silent = [connect(source) for _ in range(32)]
        wait_until(lambda: source.num_refused_connections >= 28)
        assert ask(kept, transfer.token, 1) == bytes(transfer.pool.block(1))
        for sock in silent:
            sock.close()


def test_no_address_has_all_places_of_those_that_read() -> None:
    with serving(max_connections_per_host=2) as (source, transfer):
        one, two, three = (connect(source) for _ in range(3))
        assert ask(one, transfer.token) == ask(two, transfer.token) == bytes(transfer.pool.block(0))
        three.sendall(ReadRequest(1, transfer.token, 0, 1, BLOCK_BYTES).encode())
        assert is_closed(three)
        other = Transfer(source, make_pool(seed=SEED), range(NUM_BLOCKS))
        with connect(source, "127.0.0.2") as elsewhere:
            assert ask(elsewhere, other.token) == bytes(transfer.pool.block(0))
        for sock in (one, two, three):
            sock.close()


# A token.


def test_a_token_serves_the_peer_that_reads_first_and_no_other() -> None:
    with serving() as (source, transfer):
        with connect(source) as first, connect(source) as second:
            assert ask(first, transfer.token) == ask(second, transfer.token) == bytes(transfer.pool.block(0))
        with connect(source, "127.0.0.2") as thief:
            assert ask(thief, transfer.token) is ReadRefusal.OTHER_READER
            assert ask(thief, transfer.token, 5) is ReadRefusal.OTHER_READER
        with connect(source) as again:
            assert ask(again, transfer.token, 5) == bytes(transfer.pool.block(5))
            assert transfer.close().wait(HANG_S)
            assert ask(again, transfer.token, 5) is ReadRefusal.UNKNOWN_TOKEN


def test_under_tls_a_token_is_bound_to_the_names_in_the_certificate(authority: Authority) -> None:
    with serving(tls=authority.identity()) as (source, transfer):

        def read(*names: str) -> str | None:
            receiver = TcpConnector(small_settings(tls=authority.identity(*names)))
            receiver.serve(make_pool())
            blocks = transfer.blocks(range(4), range(4))
            recorded = start_read(receiver, source.metadata, transfer.token, blocks)
            why = recorded.wait_failed() if recorded.wait_ended() is ReadOutcome.FAILED else None
            receiver.close()
            return why

        assert read("127.0.0.1", "decode-1.example") is None
        assert "another peer has read with this token before" in (read("127.0.0.1", "decode-2.example") or "")
        # a renewed certificate has another key and the same names
        assert read("decode-1.example", "127.0.0.1") is None


# Places.


class Places:
    """Connections of made-up hosts, each with a real socket and a thread that waits for its end."""

    def __init__(self, **settings: int) -> None:
        self.events = EventThread("places")
        self.connections = SourceConnections(TcpSettings(**settings), self.events)  # type: ignore[arg-type]
        self.peers: list[socket.socket] = []

    def admit(self, host: str) -> TcpStream:
        listener = socket.create_server(("127.0.0.1", 0))
        self.peers.append(socket.create_connection(listener.getsockname()))
        accepted, _ = listener.accept()
        listener.close()
        stream = TcpStream(accepted, 1.0, 1.0)

        def wait() -> None:
            stream.wait_readable(HANG_S)
            self.connections.leave(stream)

        assert self.connections.admit(stream, host, threading.Thread(target=wait))
        return stream

    def close(self) -> None:
        self.connections.close()
        self.events.close()
        for sock in self.peers:
            sock.close()


def test_newcomers_from_where_nobody_has_read_go_first() -> None:
    places = Places(max_newcomers=3)
    settled = places.admit("10.0.0.1")
    assert places.connections.settle(settled)
    known, *strangers = (places.admit(host) for host in ("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    newest = places.admit("10.0.0.4")
    assert [stream.is_shut for stream in (known, *strangers, newest)] == [False, True, False, False]
    assert not places.connections.settle(strangers[0])
    assert places.connections.settle(known)
    assert places.connections.num_refused == 1
    places.close()


def test_one_host_pushes_out_its_own_newcomers() -> None:
    places = Places(max_newcomers=8, max_newcomers_per_host=2)
    other = places.admit("10.0.0.9")
    mine = [places.admit("10.0.0.1") for _ in range(4)]
    assert [stream.is_shut for stream in (other, *mine)] == [False, True, True, False, False]
    places.close()
    assert len(places.connections) == 0
