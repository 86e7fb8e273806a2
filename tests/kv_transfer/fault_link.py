"""A TCP forwarder between a reader and a source that stops, goes on, and turns bits over when it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading

_CHUNK_BYTES = 2048


class FaultLink:
    """Listens on loopback and forwards each connection to `port`. Faults concern what the source sends.

    `serve_only` counts bytes over all connections, the frames' too.
    """

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._changed = threading.Condition()
        self._bytes_to_serve: int | None = None
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
        except OSError:
            pass
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
