"""TCP connections that move bytes between buffers, with a limit of each stall; another thread can shut them down.

Only this file makes and uses sockets; `tls_stream.py` adds TLS.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from pdserve.common import clock
from pdserve.common.errors import ConfigError

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
_LISTEN_BACKLOG = 128


class StreamBroken(Exception):
    """The stream was closed by the peer, shut down, stalled, or failed; it cannot be used again.

    num_bytes: bytes moved by the failed call. is_stall: True if the peer sent or accepted nothing in time.
    """

    def __init__(self, message: str, num_bytes: int = 0, is_stall: bool = False) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes
        self.is_stall = is_stall


class Stream(Protocol):
    """A stream of bytes: `TcpStream`, or `TlsStream` over one."""

    def send(self, views: Sequence[memoryview]) -> None:
        """Send all bytes of all views, in order. Raises StreamBroken."""

    def receive(self, views: Sequence[memoryview]) -> None:
        """Fill all views, in order. Raises StreamBroken; bytes received before are in the views."""

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait for a byte or the stream's end; False when neither arrived in time. Raises StreamBroken."""

    def shutdown(self) -> None:
        """Make the sending or receiving thread raise StreamBroken. From any thread; may be called again."""

    def close(self) -> None:
        """Close the socket. Called by the thread that uses it."""


class TcpStream:
    """One thread sends and receives; any thread may `shutdown`.

    stall_s: seconds without a received byte after which `receive` raises. send_stall_s: the same for `send`.
    """

    def __init__(self, sock: socket.socket, stall_s: float, send_stall_s: float) -> None:
        self._sock = sock
        self._stall_s = stall_s
        self._send_stall_s = send_stall_s
        self.is_shut = False
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        # Blocking calls with the kernel's timeouts: one call moves megabytes without the GIL, while a socket # with a Python
        # timeout would return at each packet. A call returns at least four times in stall_s, so a stall # is detected after at most
        # 1.25 * stall_s.
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _kernel_time(stall_s / 4))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _kernel_time(send_stall_s / 4))

    def send(self, views: Sequence[memoryview]) -> None:
        """As `Stream.send`."""
        self._move(views, self._sock.sendmsg, self._send_stall_s)

    def receive(self, views: Sequence[memoryview]) -> None:
        """As `Stream.receive`."""
        self._move(views, self._receive_all, self._stall_s)

    def receive_some(self, view: memoryview) -> int:
        """Receive at least one byte and all bytes that have arrived, into the view; returns their number. Raises: StreamBroken."""
        since = clock.monotonic()
        while not (num_bytes := self._try(lambda views: self._sock.recv_into(views[0]), [view], 0)):
            self._check_stall(since, self._stall_s, 0)
        return num_bytes

    def wait_readable(self, timeout_s: float) -> bool:
        """As `Stream.wait_readable`."""
        return _polled(self._readable, timeout_s)

    def shutdown(self) -> None:
        """As `Stream.shutdown`."""
        self.is_shut = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """As `Stream.close`."""
        self._sock.close()

    def _receive_all(self, views: Sequence[memoryview]) -> int:
        if len(views) == 1:
            return self._sock.recv_into(views[0], 0, socket.MSG_WAITALL)
        return self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]

    def _move(
        self, views: Sequence[memoryview], move_some: Callable[[Sequence[memoryview]], int], stall_s: float
    ) -> None:
        rest = list(views)
        position = num_moved = 0
        last_progress = clock.monotonic()
        while position < len(rest):
            num_bytes = self._try(move_some, rest[position : position + _IOV_MAX], num_moved)
            if num_bytes == 0:
                self._check_stall(last_progress, stall_s, num_moved)
                continue
            last_progress = clock.monotonic()
            num_moved += num_bytes
            while position < len(rest) and num_bytes >= len(rest[position]):
                num_bytes -= len(rest[position])
                position += 1
            if num_bytes:
                rest[position] = rest[position][num_bytes:]

    def _try(
        self, move_some: Callable[[Sequence[memoryview]], int], views: Sequence[memoryview], num_moved: int
    ) -> int:
        """Make one call to the kernel; returns 0 if no byte moved before its timeout. Raises: StreamBroken."""
        if self.is_shut:
            # after a shutdown the kernel still returns received bytes
            raise StreamBroken("cut off", num_moved)
        try:
            num_bytes = move_some(views)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamBroken("cut off" if self.is_shut else str(error), num_moved) from error
        if num_bytes == 0:
            raise StreamBroken("cut off" if self.is_shut else "closed by the peer", num_moved)
        return num_bytes

    @staticmethod
    def _check_stall(since: float, stall_s: float, num_moved: int) -> None:
        if clock.monotonic() - since >= stall_s:
            raise StreamBroken(f"no byte moved for {stall_s:g} s", num_moved, is_stall=True)


def dial(host: str, port: int, connect_timeout_s: float, stall_s: float, send_stall_s: float) -> TcpStream:
    """Connect. Raises: StreamBroken. The timeout applies to resolving a name, and to each of its addresses."""
    try:
        sock = _connected(resolve(host, port, connect_timeout_s), connect_timeout_s)
    except (OSError, UnicodeError) as error:
        raise StreamBroken(str(error)) from error
    return TcpStream(sock, stall_s, send_stall_s)


def _connected(addresses: Addresses, timeout_s: float) -> socket.socket:
    """A socket connected to the first address that answers. Raises: OSError of the last address."""
    failure = OSError("the name has no address")
    for family, address in addresses:
        sock = None
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            sock.connect(address)
        except OSError as error:
            failure = error
            if sock is not None:
                sock.close()
        else:
            return sock
    raise failure


class Listener:
    """A listening socket; any thread can end its `accept`."""

    def __init__(self, host: str, port: int) -> None:
        """Raises: ConfigError if the address is not available."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._sock = socket.create_server((host, port), family=family, backlog=_LISTEN_BACKLOG)
        except (OSError, UnicodeError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        self._sock.setblocking(False)
        self._wake_receiver, self._wake_sender = socket.socketpair()

    @property
    def port(self) -> int:
        port: int = self._sock.getsockname()[1]
        return port

    def accept(self) -> tuple[socket.socket, str] | None:
        """The next connection and its peer's host; None after `wake`. Raises: OSError if accepting failed."""
        while True:
            _wait_readable([self._sock, self._wake_receiver], None)
            if _wait_readable([self._wake_receiver], 0):
                return None
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            return sock, str(address[0])

    def wake(self) -> None:
        """End `accept` for good."""
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")

    def close(self) -> None:
        """Free the port. No thread may be in `accept`."""
        self._sock.close()
        self._wake_receiver.close()
        self._wake_sender.close()


def _wait_readable(socks: Sequence[socket.socket], timeout_s: float | None) -> bool:
    poll = select.poll()
    try:
        for sock in socks:
            poll.register(sock, select.POLLIN)
    except (OSError, ValueError) as error:
        raise StreamBroken(str(error)) from error
    return _polled(poll, timeout_s)


def _polled(poll: select.poll, timeout_s: float | None) -> bool:
    try:
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))
    except (OSError, ValueError) as error:
        raise StreamBroken(str(error)) from error


def _kernel_time(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))


SockAddress = tuple[Any, ...]
Addresses = list[tuple[socket.AddressFamily, SockAddress]]

_lookups: dict[tuple[str, int], Future[Addresses]] = {}
"""Names being resolved. Later calls for a name share the result, so that each name has at most one thread."""
_lock = threading.Lock()


def resolve(host: str, port: int, timeout_s: float) -> Addresses:
    """A host's addresses for TCP, best first, within a time that the system's resolver does not bound.

    Raises: OSError, TimeoutError among them; UnicodeError for what can be no name.
    """
    if _is_address(host):
        return _look_up(host, port)
    with _lock:
        lookup = _lookups.get((host, port))
        if lookup is None:
            lookup = _lookups[host, port] = Future()
            # a daemon thread, so that an unresolved name does not prevent the process from ending
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
    """True for an IP address, which needs no resolver."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
