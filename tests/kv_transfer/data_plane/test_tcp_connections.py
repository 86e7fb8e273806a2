"""Connections of the TCP connector: kept, replaced, closed when idle, bounded when they cannot be made."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.common.errors import ConfigError
from pdserve.kv_transfer.connector import BlockConnector, BlockToRead, ReadOutcome
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress, TcpSettings
from tests.support.run.waiting import HANG_S, wait_until

from .conftest import connector_threads
from .contract_link import WINDOW_BLOCKS
from .recorded_read import BLOCK_BYTES, IN_TIME_S, Transfer, make_pool, start_read
from .tcp_link import small_settings

MakeConnector = Callable[..., TcpConnector]


@pytest.fixture
def make_connector() -> Iterator[MakeConnector]:
    connectors: list[TcpConnector] = []

    def make(**changes: Any) -> TcpConnector:
        connector = TcpConnector(small_settings(**changes))
        connectors.append(connector)
        connector.serve(make_pool(seed=2))
        return connector

    yield make
    for connector in connectors:
        connector.close()


def read_some(receiver: BlockConnector, source: BlockConnector, count: int = 4) -> ReadOutcome:
    transfer = Transfer(source, make_pool(seed=2), range(count))
    read = start_read(receiver, source.metadata, transfer.token, transfer.blocks(range(count), range(count)))
    return read.wait_ended()


def test_connections_are_used_again(make_connector: MakeConnector) -> None:
    source, receiver = make_connector(), make_connector()
    for _ in range(20):
        assert read_some(receiver, source, 4 * WINDOW_BLOCKS) is ReadOutcome.DONE
    assert receiver.read_counters["connections"] <= 2
    assert source.num_connections <= 2


def test_one_window_needs_one_connection(make_connector: MakeConnector) -> None:
    source, receiver = make_connector(), make_connector()
    for _ in range(5):
        assert read_some(receiver, source, WINDOW_BLOCKS) is ReadOutcome.DONE
    assert receiver.read_counters["connections"] == 1


def test_peer_that_restarted_is_reached_again(make_connector: MakeConnector) -> None:
    receiver, source = make_connector(), make_connector()
    assert read_some(receiver, source) is ReadOutcome.DONE
    source.close()
    again = make_connector(port=TcpAddress.from_metadata(source.metadata).port)
    assert again.metadata == source.metadata
    assert read_some(receiver, again) is ReadOutcome.DONE
    assert receiver.read_counters["stale_connections"] == 1


def test_idle_connections_close(make_connector: MakeConnector) -> None:
    source, receiver = make_connector(), make_connector(idle_close_s=0.05)
    assert read_some(receiver, source, 4 * WINDOW_BLOCKS) is ReadOutcome.DONE
    assert wait_until(lambda: source.num_connections == 0)
    assert wait_until(lambda: not [name for name in connector_threads() if name.startswith("tcp-read")])
    assert read_some(receiver, source) is ReadOutcome.DONE


def test_source_closes_idle_connections_too(make_connector: MakeConnector) -> None:
    source, receiver = make_connector(idle_close_s=0.05), make_connector()
    assert read_some(receiver, source) is ReadOutcome.DONE
    assert wait_until(lambda: source.num_connections == 0)
    assert read_some(receiver, source) is ReadOutcome.DONE


def test_i6_connection_that_cannot_be_made_fails_in_time(make_connector: MakeConnector) -> None:
    receiver = make_connector(connect_timeout_s=0.3)
    # A full backlog: the kernel answers no further SYN, as from a host that is gone.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(address)
        metadata = TcpAddress("127.0.0.1", address[1]).to_metadata()
        began = time.monotonic()
        reads = [start_read(receiver, metadata, bytes(16), [BlockToRead(0, 0, 0)]) for _ in range(3)]
        assert all("no connection" in read.wait_failed() for read in reads)
        assert time.monotonic() - began < IN_TIME_S / 2
        for sock in waiting:
            sock.close()


def test_cancel_while_connecting_ends_at_once(make_connector: MakeConnector) -> None:
    receiver = make_connector(connect_timeout_s=2 * HANG_S)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        metadata = TcpAddress("127.0.0.1", full.getsockname()[1]).to_metadata()
        read = start_read(receiver, metadata, bytes(16), [BlockToRead(0, 0, 0)])
        time.sleep(0.05)
        read.cancel()
        assert read.wait_ended() is ReadOutcome.CANCELLED
        for sock in waiting:
            sock.close()


def test_blocks_larger_than_a_window(make_connector: MakeConnector) -> None:
    half = BLOCK_BYTES // 2
    source, receiver = (
        make_connector(request_bytes=half, longest_request_bytes=half, read_window_bytes=half) for _ in range(2)
    )
    assert read_some(receiver, source, 50) is ReadOutcome.DONE


def test_port_that_is_taken_is_a_config_error(make_connector: MakeConnector) -> None:
    port = TcpAddress.from_metadata(make_connector().metadata).port
    connector = TcpConnector(TcpSettings(port=port))
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        connector.serve(make_pool())
    connector.close()


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_host_that_is_not_here_is_a_config_error(host: str) -> None:
    connector = TcpConnector(TcpSettings(host=host))
    with pytest.raises(ConfigError, match="cannot listen"):
        connector.serve(make_pool())
    connector.close()


def test_wildcard_needs_a_host_to_tell_peers() -> None:
    connector = TcpConnector(TcpSettings(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="advertise_host"):
        connector.serve(make_pool())
    connector.close()


@pytest.mark.parametrize(
    ("host", "advertise_host"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "localhost"), ("::1", None)]
)
def test_hosts_by_other_names(host: str, advertise_host: str | None) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    source = TcpConnector(TcpSettings(host=host, advertise_host=advertise_host))
    receiver = TcpConnector(TcpSettings())
    try:
        source.serve(make_pool(seed=2))
    except ConfigError as error:
        pytest.skip(f"{error}")
    receiver.serve(make_pool())
    assert read_some(receiver, source) is ReadOutcome.DONE
    receiver.close()
    source.close()
