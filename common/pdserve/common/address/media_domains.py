"""`MediaDomains`: hosts from which images may be fetched, and the addresses that they may have."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

from pdserve.common.errors import ConfigError

_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*", re.ASCII)
_ENTRY = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:]+)\]|(?P<host>[a-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
DEFAULT_PORTS = {"http": 80, "https": 443}


class _Entry(NamedTuple):
    host: str
    port: int | None
    """None: the default port of the scheme."""


class MediaDomains:
    """Entries are `host`, `host:port`, or an IP address with a port."""

    def __init__(self, entries: Iterable[str], setting: str) -> None:
        """setting: its name. Raises: ConfigError naming an entry that is none of these."""
        self._entries = {_entry(entry, setting) for entry in entries}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def has(self, scheme: str, host: str, port: int | None) -> bool:
        """True if an entry names it. host: in lower case, an IPv6 address without brackets. port: None for the scheme's own."""
        default = DEFAULT_PORTS[scheme]
        asked = port or default
        return _Entry(host, asked) in self._entries or (asked == default and _Entry(host, None) in self._entries)


def may_be_reached(address: str, host: str) -> bool:
    """True for a public address, and for one that the entry itself names. host: of the URL; address: one to which it resolves."""
    found = _address(address)
    return found is not None and (found == _address(host) or _is_public(found))


def _entry(text: str, setting: str) -> _Entry:
    found = _ENTRY.fullmatch(text)
    port = int(found["port"]) if found is not None and found["port"] else None
    address = None if found is None else _address(found["ipv6"] or found["host"])
    is_name = found is not None and address is None and found["host"] is not None and _NAME.fullmatch(found["host"])
    if found is None or not (address is not None or is_name) or (port is not None and not 0 < port < 65536):
        raise ConfigError(
            f"{setting} has {text[:200]!r}: a host in lower case is needed, host:port, or an IP address with a port "
            "([address]:port for IPv6)"
        )
    if address is not None and port is None:
        raise ConfigError(f"{setting} has {text!r}: an IP address needs a port, as in {text}:443")
    return _Entry(found["host"] if address is None else str(address), port)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """False also for addresses of IPv6 that lead to a private one of IPv4."""
    if isinstance(address, ipaddress.IPv6Address):
        if (mapped := address.ipv4_mapped) is not None:
            return _is_public(mapped)
        if address in _NAT64:
            return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        tunnels = [address.sixtofour, *(address.teredo or ())]
        if address.is_site_local or any(inner is not None and not _is_public(inner) for inner in tunnels):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
