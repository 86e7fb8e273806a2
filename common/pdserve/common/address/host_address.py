"""Hosts and URLs: wildcards, overlaps, the address by which others reach this machine, and forms for logs."""

from __future__ import annotations

import socket
from itertools import chain
from urllib.parse import urlsplit

from pdserve.common.errors import ConfigError

WILDCARDS = ("0.0.0.0", "::", "")
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation, which only the default route leads to."""


def is_wildcard(host: str) -> bool:
    """True if listening on `host` means every address of this machine."""
    return host in WILDCARDS


def overlap(host: str, other: str) -> bool:
    """True if listening on one host takes a port from the other: they share an address, or one is a wildcard."""
    if host == other or is_wildcard(host) or is_wildcard(other):
        return True
    return not _addresses(host).isdisjoint(_addresses(other))


def _addresses(host: str) -> set[str]:
    """Empty for a name that does not resolve."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def own_address() -> str:
    """The first address beyond loopback to which this machine's name resolves, IPv4 before IPv6, else that of its default route.

    Raises: ConfigError when there is none.
    """
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    addresses = [str(info[4][0]) for info in sorted(found, key=lambda info: info[0] is not socket.AF_INET)]
    routed = (address for host in _ELSEWHERE if (address := routed_address(host)) is not None)
    for address in chain(addresses, routed):
        if not address.startswith(("127.", "fe80:")) and address != "::1":
            return address
    raise ConfigError(
        f"this machine's name {name!r} stands for {addresses}, which no peer can reach, and there is no default route: "
        "set advertise_host"
    )


def routed_address(host: str) -> str | None:
    """The address of this machine from which packets go to `host`, an IP address; None without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def loopback_of(address: str) -> str:
    """host:port for clients on this machine: loopback in place of a wildcard."""
    host, _, port = address.rpartition(":")
    return f"{'[::1]' if ':' in host else '127.0.0.1'}:{port}" if is_wildcard(host.strip("[]")) else address


def host_and_port(host: str, port: int) -> str:
    """`host:port`, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_MASK = "***"


def masked_url(url: str) -> str:
    """The URL with `***` in place of user, password, query and fragment, each of which may be a secret.

    `***` alone for text that cannot be taken apart: any piece of it may be part of a password.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return _MASK
    if not parts.scheme or not host:
        return _MASK
    place = f"[{host}]" if ":" in host else host
    if port is not None:
        place = f"{place}:{port}"
    if "@" in parts.netloc:
        place = f"{_MASK}@{place}"
    rest = f"?{_MASK}" if parts.query or parts.fragment else ""
    return f"{parts.scheme}://{place}{parts.path}{rest}"
