"""The TCP connector over TLS: who is refused, at what cost to the others, and what either side is told."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.common.security.tls import TlsIdentity
from pdserve.common.security.tls_roles import ServiceRole
from pdserve.kv_transfer.connector import ReadOutcome
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_frames import ReadAnswer, ReadRequest
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress
from tests.support.processes.tls_authority import HOST, Authority, role_uri
from tests.support.run.waiting import HANG_S, wait_until

from .fault_link import FaultLink
from .recorded_read import BLOCK_BYTES, IN_TIME_S, NUM_BLOCKS, Transfer, make_pool, same_bytes, start_read
from .tcp_link import small_settings

MakeConnector = Callable[..., TcpConnector]
SOURCE_SEED = 9


@pytest.fixture(scope="module")
def identity(authority: Authority) -> TlsIdentity:
    return authority.identity()


@pytest.fixture
def make_connector() -> Iterator[MakeConnector]:
    connectors: list[TcpConnector] = []

    def make(tls: TlsIdentity | None, seed: int | None = SOURCE_SEED, **changes: Any) -> TcpConnector:
        connectors.append(TcpConnector(small_settings(tls=tls, **changes)))
        connectors[-1].serve(make_pool(seed=seed))
        return connectors[-1]

    yield make
    for connector in connectors:
        connector.close()


@pytest.fixture
def source(make_connector: MakeConnector, identity: TlsIdentity) -> TcpConnector:
    return make_connector(identity)


@pytest.fixture
def transfer(source: TcpConnector) -> Transfer:
    return Transfer(source, make_pool(seed=SOURCE_SEED), range(NUM_BLOCKS))


def connect(source: TcpConnector) -> socket.socket:
    address = TcpAddress.from_metadata(source.metadata)
    return socket.create_connection((address.host, address.port), HANG_S)


def hangs_up(sock: socket.socket) -> bool:
    """True if the source ends the connection; an alert of TLS may come before."""
    try:
        return len(sock.recv(1000, socket.MSG_WAITALL)) < 100
    except ConnectionResetError:
        return True


def says_nothing_more(secured: ssl.SSLSocket) -> bool:
    try:
        return secured.recv(1) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def failure(receiver: TcpConnector, metadata: bytes, transfer: Transfer) -> str:
    """Message of a read that has to fail, without a block."""
    read = start_read(receiver, metadata, transfer.token, transfer.blocks(range(4), range(4)))
    message = read.wait_failed()
    assert read.num_landed == 0
    return message


def still_serves(source: TcpConnector, transfer: Transfer, identity: TlsIdentity) -> bool:
    receiver, pool = TcpConnector(small_settings(tls=identity)), make_pool()
    receiver.serve(pool)
    blocks = transfer.blocks(range(20), range(20))
    done = start_read(receiver, source.metadata, transfer.token, blocks).wait_ended() is ReadOutcome.DONE
    receiver.close()
    return done and same_bytes(transfer, pool, blocks)


# The source's side.


def client_context(authority: Authority, shown: Authority | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority.ca_file)
    if shown is not None:
        files = shown.issue()
        context.load_cert_chain(files.cert, files.key)
    return context


@pytest.mark.parametrize("shown", ["nothing", "another CA's"])
def test_i8_a_token_opens_nothing_without_a_certificate_of_the_ca(
    shown: str,
    source: TcpConnector,
    transfer: Transfer,
    identity: TlsIdentity,
    authority: Authority,
    other_authority: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = client_context(authority, other_authority if shown == "another CA's" else None)
    request = ReadRequest(1, transfer.token, 0, 1, BLOCK_BYTES).encode()
    with context.wrap_socket(connect(source), server_hostname=HOST) as secured:
        # a client has shaken hands before it hears what the server thinks of its certificate
        with contextlib.suppress(OSError):
            secured.sendall(request)
        assert says_nothing_more(secured)
    assert still_serves(source, transfer, identity)
    assert (source.source_counters["failed_handshakes"], source.source_counters["malformed_frames"]) == (1, 0)
    assert f"{HOST} failed the TLS handshake (TLS: " in caplog.text


def test_an_older_tls_is_refused(source: TcpConnector, authority: Authority) -> None:
    context = client_context(authority, authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with connect(source) as sock, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(sock, server_hostname=HOST)


PLAIN = {
    "a frame of ours": ReadRequest(1, bytes(16), 0, 1, BLOCK_BYTES).encode(),
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl\r\n\r\n",
    "zeros": bytes(1000),
    "noise": random.Random(1).randbytes(100_000),
    "a record too long": b"\x16\x03\x01\xff\xff" + bytes(1000),
    "an alert": b"\x15\x03\x03\x00\x02\x02\x28",
    "no hello": b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",
}


@pytest.mark.parametrize("sent", PLAIN)
def test_i9_who_speaks_no_tls_loses_the_connection(
    sent: str, source: TcpConnector, transfer: Transfer, identity: TlsIdentity
) -> None:
    with connect(source) as sock:
        sock.sendall(PLAIN[sent])
        assert hangs_up(sock)
    assert still_serves(source, transfer, identity)
    assert (source.source_counters["failed_handshakes"], source.source_counters["malformed_frames"]) == (1, 0)


def test_failed_handshakes_are_warned_of_once_a_peer(source: TcpConnector, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pdserve.kv_transfer"):
        for _ in range(20):
            with connect(source) as sock:
                sock.sendall(PLAIN["another protocol"])
                assert hangs_up(sock)
    assert len(caplog.records) == 1
    assert source.source_counters["failed_handshakes"] == 20


def test_i6_a_handshake_that_never_ends_holds_up_nobody(
    make_connector: MakeConnector, identity: TlsIdentity, authority: Authority
) -> None:
    source = make_connector(identity, first_request_s=1.0)
    transfer = Transfer(source, make_pool(seed=SOURCE_SEED), range(NUM_BLOCKS))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        client_context(authority, authority).wrap_bio(incoming, outgoing, server_hostname=HOST).do_handshake()
    hello = outgoing.read()
    socks = [connect(source) for _ in range(4)]
    began = time.monotonic()
    for sock, sent in zip(socks, [b"", hello[:1], hello[:-1], hello], strict=True):
        sock.sendall(sent)
    assert still_serves(source, transfer, identity)
    socks[3].recv(100_000)  # the source's part, to which no answer follows
    assert all(hangs_up(sock) for sock in socks)
    assert time.monotonic() - began < IN_TIME_S
    for sock in socks:
        sock.close()
    assert still_serves(source, transfer, identity)


def test_close_does_not_wait_for_a_handshake(make_connector: MakeConnector, identity: TlsIdentity) -> None:
    source = make_connector(identity, first_request_s=2 * HANG_S)
    with connect(source) as sock:
        sock.sendall(b"\x16")
        wait_until(lambda: source.num_connections)
        began = time.monotonic()
        source.close()
        assert time.monotonic() - began < IN_TIME_S


def test_handshakes_take_no_place_of_connections_that_read(
    make_connector: MakeConnector, identity: TlsIdentity, authority: Authority
) -> None:
    source = make_connector(identity, max_connections=2, max_newcomers=4, first_request_s=HANG_S)
    transfer = Transfer(source, make_pool(seed=SOURCE_SEED), range(NUM_BLOCKS))
    held = [connect(source) for _ in range(6)]
    wait_until(lambda: source.num_refused_connections >= 2)
    assert still_serves(source, transfer, identity)
    assert hangs_up(held[0]), "the oldest has given way"
    for sock in held:
        sock.close()


def test_i9_garbage_under_tls_costs_the_connection(
    source: TcpConnector, transfer: Transfer, identity: TlsIdentity, authority: Authority
) -> None:
    context = client_context(authority, authority)
    with context.wrap_socket(connect(source), server_hostname=HOST) as secured:
        for number in (1, 2):
            secured.sendall(ReadRequest(number, transfer.token, number, 1, BLOCK_BYTES).encode())
            head = secured.recv(ReadAnswer.NUM_BYTES)
            assert len(head) == ReadAnswer.NUM_BYTES
            block = b""
            while len(block) < BLOCK_BYTES:
                block += secured.recv(BLOCK_BYTES)
            assert block == transfer.pool.block(number)
        secured.sendall(bytes(ReadRequest.NUM_BYTES))
        assert says_nothing_more(secured)
    assert source.source_counters["malformed_frames"] == 1
    assert still_serves(source, transfer, identity)


# The reader's side.


@pytest.fixture
def receiver(make_connector: MakeConnector, identity: TlsIdentity) -> TcpConnector:
    return make_connector(identity, seed=None, connect_timeout_s=0.5)


def test_a_source_of_another_ca_is_not_read(
    make_connector: MakeConnector, receiver: TcpConnector, transfer: Transfer, other_authority: Authority
) -> None:
    stranger = make_connector(other_authority.identity())
    message = failure(receiver, stranger.metadata, transfer)
    assert f"no connection to {HOST}:" in message
    assert "TLS: self-signed certificate in certificate chain" in message
    assert stranger.source_counters["blocks_sent"] == 0


def test_a_source_under_another_name_is_read_only_where_the_name_is_expected(
    make_connector: MakeConnector, receiver: TcpConnector, authority: Authority
) -> None:
    source = make_connector(authority.identity("pdserve.internal"))
    transfer = Transfer(source, make_pool(seed=SOURCE_SEED), range(NUM_BLOCKS))
    assert "not valid for '127.0.0.1'" in failure(receiver, source.metadata, transfer)
    assert still_serves(source, transfer, authority.identity(server_name="pdserve.internal"))
    assert not still_serves(source, transfer, authority.identity(server_name="other.internal"))


def test_readers_with_and_sources_without_tls_do_not_meet(
    make_connector: MakeConnector, receiver: TcpConnector, source: TcpConnector, transfer: Transfer
) -> None:
    plain_source, plain_receiver = make_connector(None), make_connector(None, seed=None)
    assert failure(receiver, plain_source.metadata, transfer)
    assert failure(plain_receiver, source.metadata, transfer)


def test_i6_a_source_that_does_not_shake_hands_fails_the_read_in_time(
    receiver: TcpConnector, transfer: Transfer
) -> None:
    with socket.create_server((HOST, 0)) as silent:
        began = time.monotonic()
        message = failure(receiver, TcpAddress(HOST, silent.getsockname()[1]).to_metadata(), transfer)
        assert time.monotonic() - began < IN_TIME_S
    assert "no handshake within 0.5 s" in message


def test_i3_a_bit_that_turns_over_under_way_breaks_the_connection_and_lands_nowhere(
    receiver: TcpConnector, source: TcpConnector, transfer: Transfer
) -> None:
    faults = FaultLink(TcpAddress.from_metadata(source.metadata).port)
    metadata = TcpAddress(HOST, faults.port).to_metadata()
    blocks = transfer.blocks(range(64), range(64))
    assert start_read(receiver, metadata, transfer.token, blocks).wait_ended() is ReadOutcome.DONE
    faults.flip_one_bit()
    assert "TLS: " in start_read(receiver, metadata, transfer.token, blocks).wait_failed()
    assert receiver.read_counters["blocks_reread"] == 0, "no digest had to notice it"
    assert start_read(receiver, metadata, transfer.token, blocks).wait_ended() is ReadOutcome.DONE
    receiver.close()
    faults.close()


def test_windows_of_many_records(identity: TlsIdentity) -> None:
    block_bytes, num_blocks = 3 << 18, 12
    pools = [make_pool(3, num_blocks, block_bytes), make_pool(None, num_blocks, block_bytes)]
    connectors = [
        TcpConnector(
            small_settings(
                tls=identity, request_bytes=4 << 20, longest_request_bytes=4 << 20, read_window_bytes=8 << 20
            )
        )
        for _ in pools
    ]
    for connector, pool in zip(connectors, pools, strict=True):
        connector.serve(pool)
    source, receiver = connectors
    transfer = Transfer(source, pools[0], random.Random(1).sample(range(num_blocks), num_blocks))
    blocks = transfer.blocks(range(num_blocks), random.Random(2).sample(range(num_blocks), num_blocks))
    for _ in range(3):
        assert start_read(receiver, source.metadata, transfer.token, blocks).wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, pools[1], blocks)
        pools[1].view[:] = bytes(len(pools[1].view))
    assert receiver.read_counters["blocks_reread"] == 0
    for connector in connectors:
        connector.close()


# Roles.


def role_identity(authority: Authority, role: str, shown: str | None = None) -> TlsIdentity:
    """A service of this role, which asks its peers for roles. shown: what its certificate says instead."""
    files, role_of = authority.issue(uris=[role_uri(role)]), ServiceRole(role)
    identity = files.identity(role=role_of)
    if shown is not None:
        other = authority.issue(uris=[role_uri(shown)] if shown else []).identity()
        other.server.peers, other.client.peers = identity.server.peers, identity.client.peers
        return other
    return identity


ROLE_OF_A_WORKER = "no role spiffe://pdserve.internal/pdserve/prefill or spiffe://pdserve.internal/pdserve/decode"


@pytest.mark.parametrize("shown", ["router", ""])
@pytest.mark.parametrize(("role", "reader"), [("prefill", "decode"), ("prefill", "prefill"), ("decode", "prefill")])
def test_i8_only_workers_certificates_read(
    make_connector: MakeConnector,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
    role: str,
    reader: str,
    shown: str,
) -> None:
    source = make_connector(role_identity(authority, role))
    transfer = Transfer(source, make_pool(seed=SOURCE_SEED), range(NUM_BLOCKS))
    assert still_serves(source, transfer, role_identity(authority, reader))
    assert not still_serves(source, transfer, role_identity(authority, "decode", shown))
    assert ROLE_OF_A_WORKER in caplog.text
    assert source.source_counters["failed_handshakes"] >= 1


@pytest.mark.parametrize("shown", ["router", ""])
def test_blocks_are_read_from_workers_certificates_alone(
    make_connector: MakeConnector, authority: Authority, shown: str
) -> None:
    source = make_connector(role_identity(authority, "prefill", shown))
    receiver = make_connector(role_identity(authority, "decode"), seed=None)
    transfer = Transfer(source, make_pool(seed=SOURCE_SEED), range(NUM_BLOCKS))
    assert f"TLS: its certificate has {ROLE_OF_A_WORKER}" in failure(receiver, source.metadata, transfer)
