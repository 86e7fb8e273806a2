"""gRPC's name for a caller's end of a connection, the host in it, and the network that a host counts in."""

from __future__ import annotations

import pytest

from pdserve.common.address.peer_address import network_of, peer_host
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
        ("ipv6:[2001:db8::1]:7", "2001:db8::1", False),
        ("vsock:2:5000", "vsock:2:5000", False),
        ("", "", False),
    ],
)
def test_the_host_of_a_caller(peer: str, host: str, loopback: bool) -> None:
    assert peer_host(peer) == host
    assert is_loopback(peer_host(peer)) is loopback


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("somewhere", "somewhere"),
    ],
)
def test_the_network_of_a_host(host: str, network: str) -> None:
    assert network_of(host) == network
