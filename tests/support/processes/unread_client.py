"""`UnreadClient`: a raw connection that sends what it is given and reads nothing, and the frames of HTTP/2 that it may send."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

from tests.support.run.waiting import HANG_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM = ACK = 1
END_HEADERS = 4
_RECEIVE_BUFFER_BYTES = 2048
SEND_S = 5.0
"""Seconds after which a client gives up sending to a server that reads no more."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def header_block(path: str, *more: tuple[str, str]) -> bytes:
    """The headers of a gRPC call, as literals without an index."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
    fields += [("te", "trailers"), ("content-type", "application/grpc"), *more]
    return b"".join(b"\0" + _string(name) + _string(value) for name, value in fields)


def _string(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127
    return bytes((len(data),)) + data


OPENING = PREFACE + frame(SETTINGS, 0, 0)


class UnreadClient:
    """A connection with a small receive buffer, which is never emptied."""

    def __init__(self, address: str) -> None:
        """address: host:port."""
        host, _, port = address.rpartition(":")
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self.socket.settimeout(HANG_S)
        self.socket.connect((host, int(port)))

    def __enter__(self) -> UnreadClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> int:
        """Send until the server takes nothing for `SEND_S`, or closes the connection; the number of bytes that it took."""
        self.socket.settimeout(SEND_S)
        rest = memoryview(data)
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[self.socket.send(rest[: 1 << 16]) :]
        return len(data) - len(rest)


@contextlib.contextmanager
def unread(address: str, contents: Sequence[bytes]) -> Iterator[list[int]]:
    """One client per content, all sending at a time. They stay connected in the block, which gets the bytes sent by each."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(UnreadClient(address)) for _ in contents]
        sent = [0] * len(clients)

        def send(place: int) -> None:
            sent[place] = clients[place].send(contents[place])

        threads = [threading.Thread(target=send, args=(place,)) for place in range(len(clients))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield sent
