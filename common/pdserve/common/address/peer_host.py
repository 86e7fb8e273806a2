"""The caller's host, from gRPC's name of the caller's end of a connection."""

from __future__ import annotations

from urllib.parse import unquote


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
