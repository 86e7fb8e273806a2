"""Worker ids, addresses of workers (`host:port`, and no other target that gRPC would accept), and the host of a caller."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import unquote

from pdserve.common.errors import InvalidRequest

PEER_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253}):([0-9]{1,5})")

WORKER_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SHOWN_CHARS = 100


def verify_worker_id(field: str, worker_id: str) -> None:
    """Refuse an invalid worker id: ids are part of logs, metrics and keys. Raises: InvalidRequest."""
    if WORKER_ID.fullmatch(worker_id) is None:
        raise InvalidRequest(
            f"{field} is {worker_id[:_SHOWN_CHARS]!r}, 1 to 128 letters, digits, `_`, `.` or `-` are needed", field
        )


def verify_peer_address(field: str, address: str) -> None:
    """Refuse paths of sockets, targets of other schemes, and ports that are none. Raises: InvalidRequest."""
    found = PEER_ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[1]) < 65536:
        raise InvalidRequest(f"{field} is {address[:_SHOWN_CHARS]!r}, host:port is needed", field)


def grpc_target(address: str) -> str:
    """The target for gRPC: always a host name or address, also where the host is called `unix`."""
    return f"dns:///{address}"


def peer_host(peer: str) -> str:
    """peer: as `ServicerContext.peer` gives it. Returns an IP address; `localhost` for a socket of this machine.

    Any other name is returned unchanged, and is no loopback address.
    """
    scheme, _, rest = peer.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return "localhost"
    if scheme not in ("ipv4", "ipv6"):
        return peer
    return unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]


def network_of(host: str) -> str:
    """The unit of limits per caller: an IPv4 address, or the /64 of an IPv6 address, since one machine may own a whole /64."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
