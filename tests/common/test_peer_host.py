"""gRPC's name for a caller's end of a connection, and the host in it."""

from __future__ import annotations

import pytest

from pdserve.common.address.peer_address import peer_host
from pdserve.common.security.deployment_key import is_loopback


@pytest.mark.parametrize(
    ("peer", "host", "loopback"),
    [
        ("ipv4:127.0.0.1:41234", "127.0.0.1", True),
        ("ipv4:10.0.0.2:41234", "10.0.0.2", False),
        ("ipv6:%5B::1%5D:41234", "::1", True),
        ("ipv6:[::1]:41234", "::1", True),
        ("ipv6:%5Bfe80::1%25eth0%5D:41234", "fe80::1", False),
        ("unix:/run/socket", "localhost", True),
        ("vsock:2:5000", "vsock:2:5000", False),
        ("", "", False),
    ],
)
def test_the_host_of_a_caller(peer: str, host: str, loopback: bool) -> None:
    assert peer_host(peer) == host
    assert is_loopback(peer_host(peer)) is loopback
