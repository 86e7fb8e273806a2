"""The TCP connector's settings and metadata: what they accept, and that they accept nothing else (I11)."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import ConfigError, TransferFailed
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress, TcpSettings, is_plain_host


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.1.2.3", "::1", "fe80::1", "localhost", "prefill-0", "prefill_0.pdserve.svc.cluster.local"]
)
def test_plain_hosts(host: str) -> None:
    assert is_plain_host(host)
    address = TcpAddress(host, 1234)
    assert TcpAddress.from_metadata(address.to_metadata()) == address


@pytest.mark.parametrize(
    "host",
    [
        *(
            "",
            " ",
            ".",
            "a..b",
            "-a",
            "a-",
            "a b",
            "a/b",
            "a@b",
            "a:80",
            "http://a",
            "../a",
            "a\n",
            "a\0",
            "é",
            "x" * 64,
        ),
        *("0.0.0.0", "::", "224.0.0.1", "ff02::1", "fe80::1%eth0", "127.1", "2130706433", "0x7f000001", "1.2.3.0x4"),
        *("010.0.0.1", "a." * 130 + "a"),
    ],
)
def test_i11_anything_else_is_no_host(host: str) -> None:
    assert not is_plain_host(host)
    with pytest.raises(TransferFailed):
        TcpAddress.from_metadata(TcpAddress(host, 1234).to_metadata())


@pytest.mark.parametrize(
    "metadata",
    [
        b'{"host":"127.0.0.1","port":0}',
        b'{"host":"127.0.0.1","port":65536}',
        b'{"host":"127.0.0.1","port":-1}',
        b'{"host":"127.0.0.1","port":"80"}',
        b'{"host":"127.0.0.1","port":80.5}',
        b'{"host":"127.0.0.1"}',
        b'{"host":["127.0.0.1"],"port":80}',
        b'{"host":"127.0.0.1","port":80,"version":2}',
        b'{"host":"127.0.0.1","port":80}}',
        b"[" * 900,
    ],
)
def test_i11_metadata_that_is_no_address(metadata: bytes) -> None:
    with pytest.raises(TransferFailed):
        TcpAddress.from_metadata(metadata)


@pytest.mark.parametrize(
    "changes",
    [
        {"sockets_per_peer": 0},
        {"request_bytes": 0},
        {"read_window_bytes": 1 << 10},
        {"longest_request_bytes": 1 << 10},
        {"max_request_bytes": 1 << 10},
        {"read_stall_s": 0.0},
    ],
)
def test_settings_that_cannot_work(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TcpSettings(**changes)
