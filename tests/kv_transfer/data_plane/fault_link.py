"""A TCP forwarder between a reader and a source that refuses, stops, crawls, resets and turns bits over when told to."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

_CHUNK_BYTES = 2048


class FaultLink:
    """Listens on loopback and forwards each connection to `port`. Faults concern what the source sends.

    `serve_only` counts bytes over all connections, the frames' too.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._changed = threading.Condition()
        self._bytes_to_serve: int | None = None
        self._bytes_to_reset: int | None = None
        self._bytes_per_s: float | None = None
        self._refuses = False
        self._to_reset: set[socket.socket] = set()
        self._flips = 0
        self._closed = False
        self._socks: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def serve_only(self, num_bytes: int | None) -> None:
        """Forward so many more bytes; None: all."""
        with self._changed:
            self._bytes_to_serve = num_bytes
            self._changed.notify_all()

    def refuse(self, refuses: bool = True) -> None:
        """Reset new connections as soon as they are made, as a port does behind which nobody listens any more."""
        with self._changed:
            self._refuses = refuses

    def reset_after(self, num_bytes: int) -> None:
        """Once: reset the connection on which so many more bytes have been forwarded."""
        with self._changed:
            self._bytes_to_reset = num_bytes

    def slow_to(self, bytes_per_s: float) -> None:
        """Forward no faster."""
        with self._changed:
            self._bytes_per_s = bytes_per_s

    def flip_one_bit(self) -> None:
        """In the last byte of the next chunk, which no frame is short enough to end with."""
        with self._changed:
            self._flips = 1

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for sock in self._socks:
            sock.close()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="fault-link", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                reader = self._listener.accept()[0]
            except OSError:
                return
            with self._changed:
                refuses = self._refuses
            if refuses:
                _reset(reader)
                continue
            try:
                source = socket.create_connection(self._target, 5.0)
            except OSError:
                reader.close()
                continue
            source.settimeout(None)
            with self._changed:
                self._socks |= {reader, source}
                if self._closed:
                    return
            self._start(self._forward, reader, source, False)
            self._start(self._forward, source, reader, True)

    def _forward(self, origin: socket.socket, target: socket.socket, is_faulty: bool) -> None:
        try:
            while chunk := origin.recv(_CHUNK_BYTES):
                data = bytearray(chunk)
                while data:
                    allowed = self._allow(data) if is_faulty else len(data)
                    target.sendall(data[:allowed])
                    del data[:allowed]
                    if is_faulty and self._is_reset(allowed):
                        # the other direction's thread waits on this socket: it wakes, and resets it
                        self._to_reset.add(target)
                        target.shutdown(socket.SHUT_RD)
                        return
        except OSError:
            pass
        if origin in self._to_reset:
            _reset(origin)
        for sock in (origin, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _allow(self, data: bytearray) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._bytes_to_serve != 0 or self._closed)
            if self._flips and len(data) > 512:
                self._flips = 0
                data[-1] ^= 1
            if self._bytes_to_serve is None or self._closed:
                return len(data)
            allowed = min(len(data), self._bytes_to_serve)
            self._bytes_to_serve -= allowed
            return allowed

    def _is_reset(self, num_bytes: int) -> bool:
        with self._changed:
            bytes_per_s = self._bytes_per_s
            resets = False
            if self._bytes_to_reset is not None:
                self._bytes_to_reset -= num_bytes
                resets = self._bytes_to_reset <= 0
                self._bytes_to_reset = None if resets else self._bytes_to_reset
        if bytes_per_s is not None:
            time.sleep(num_bytes / bytes_per_s)
        return resets


def _reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN. No other thread may be waiting on it: the RST would wait for that thread."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
