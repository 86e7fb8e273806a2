"""`resolve`: a host's addresses within a bound. The system's resolver has none that a caller could set, and cannot be cut."""

from __future__ import annotations

import ipaddress
import socket
import threading
from concurrent.futures import Future
from typing import Any

SockAddress = tuple[Any, ...]
Addresses = list[tuple[socket.AddressFamily, SockAddress]]

_lookups: dict[tuple[str, int], Future[Addresses]] = {}
"""Names being resolved. Later calls for the same name share the result, so that a name has one thread at most."""
_lock = threading.Lock()


def resolve(host: str, port: int, timeout_s: float) -> Addresses:
    """For TCP, best first. Raises: OSError, TimeoutError among them; UnicodeError for what can be no name."""
    if _is_address(host):
        return _look_up(host, port)
    with _lock:
        lookup = _lookups.get((host, port))
        if lookup is None:
            lookup = _lookups[host, port] = Future()
            # a name that is never resolved must not keep the process from ending
            threading.Thread(target=_answer, args=(lookup, host, port), name=f"resolve-{host}", daemon=True).start()
    try:
        return lookup.result(timeout_s)
    except TimeoutError:
        if lookup.done():
            raise
        raise TimeoutError(f"{host} was not resolved within {timeout_s:g} s") from None


def _answer(lookup: Future[Addresses], host: str, port: int) -> None:
    found, failure = Addresses(), None
    try:
        found = _look_up(host, port)
    except Exception as error:
        failure = error
    # later calls need a newer result
    with _lock:
        del _lookups[host, port]
    if failure is None:
        lookup.set_result(found)
    else:
        lookup.set_exception(failure)


def _look_up(host: str, port: int) -> Addresses:
    return [(family, address) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _is_address(host: str) -> bool:
    """True if it is an address, which needs no resolving."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
