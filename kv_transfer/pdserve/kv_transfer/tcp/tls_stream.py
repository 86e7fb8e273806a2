"""`TlsStream`: TLS over a `TcpStream`, which limits stalls and can be shut down by another thread.

OpenSSL works on memory here, not on the socket: pieces of `_PIECE_BYTES` are encrypted in one call without the GIL and sent in
another, while an `SSLSocket` would make a system call per record of 16 KiB. Received bytes are decrypted into the caller's views,
one record per call, which is OpenSSL's limit.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any, cast

from pdserve.common import clock
from pdserve.common.security.tls import certificate_uris, tls_problem
from pdserve.kv_transfer.tcp.tcp_stream import StreamBroken, TcpStream

_PIECE_BYTES = 128 << 10
"""Bytes encrypted per call, and received per call."""
_RECORD_BYTES = (16 << 10) + 512
"""Largest TLS record, including header and padding."""


class HandshakeFailed(StreamBroken):
    """The peer has no accepted certificate, rejects ours, or does not use TLS."""


class TlsStream:
    """A `Stream`. The handshake is made at construction, by the thread that then uses it."""

    def __init__(
        self, stream: TcpStream, context: ssl.SSLContext, handshake_s: float, server_name: str | None = None
    ) -> None:
        """server_name: the name in the server's certificate; None at the server. handshake_s: limit of the handshake.

        Raises: HandshakeFailed, or StreamBroken if the peer disconnected or took too long. The caller then closes `stream`.
        """
        self._stream = stream
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        is_server = server_name is None
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, is_server, server_name)
        # a source receives only short requests, and may have many connections
        self._received = memoryview(bytearray(_RECORD_BYTES if is_server else _PIECE_BYTES))
        self._shake_hands(handshake_s)

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The names in the peer's certificate, each prefixed by its kind (`DNS:`, `IP Address:`, `URI:`), sorted."""
        certificate = cast(dict[str, Any], self._ssl.getpeercert() or {})
        return tuple(sorted(f"{kind}:{name}" for kind, name in certificate.get("subjectAltName", ())))

    @property
    def peer_uris(self) -> tuple[str, ...]:
        """The URIs among the names in the peer's certificate."""
        return certificate_uris(cast(dict[str, Any], self._ssl.getpeercert() or {}))

    def send(self, views: Sequence[memoryview]) -> None:
        """As `Stream.send`."""
        num_sent = 0
        for view in views:
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                while piece:
                    piece = piece[self._encrypt(piece, num_sent) :]
                if self._outgoing.pending >= _PIECE_BYTES:
                    self._flush(num_sent)
            num_sent += len(view)
        self._flush(num_sent)

    def receive(self, views: Sequence[memoryview]) -> None:
        """As `Stream.receive`."""
        num_missing = sum(map(len, views))
        num_received = 0
        for view in views:
            rest = view
            while rest:
                num_bytes = self._decrypt(rest, num_received)
                if num_bytes == 0:
                    self._take_in(num_missing - num_received, num_received)
                rest = rest[num_bytes:]
                num_received += num_bytes

    def wait_readable(self, timeout_s: float) -> bool:
        """As `Stream.wait_readable`."""
        return bool(self._ssl.pending() or self._incoming.pending) or self._stream.wait_readable(timeout_s)

    def shutdown(self) -> None:
        """As `Stream.shutdown`."""
        self._stream.shutdown()

    def close(self) -> None:
        """As `Stream.close`, without a TLS close message: every frame has its length, so truncation is detected."""
        self._stream.close()

    def _shake_hands(self, handshake_s: float) -> None:
        deadline = clock.monotonic() + handshake_s
        while True:
            try:
                self._ssl.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(0)
            except ssl.SSLError as error:
                self._say_why()
                raise HandshakeFailed(tls_problem(error)) from error
            else:
                self._flush(0)
                return
            if not self._stream.wait_readable(max(0.0, deadline - clock.monotonic())):
                raise StreamBroken(f"no handshake within {handshake_s:g} s", is_stall=True)
            self._incoming.write(self._received[: self._stream.receive_some(self._received)])

    def _say_why(self) -> None:
        """Send OpenSSL's alert, if the peer is still connected."""
        try:
            self._flush(0)
        except StreamBroken:
            return

    def _encrypt(self, piece: memoryview, num_sent: int) -> int:
        try:
            return self._ssl.write(piece)
        except ssl.SSLError as error:
            raise StreamBroken(tls_problem(error), num_sent) from error

    def _decrypt(self, view: memoryview, num_received: int) -> int:
        """Decrypt up to one record into the view; returns its bytes, 0 if more must be received first. Raises: StreamBroken."""
        if self._stream.is_shut:
            raise StreamBroken("cut off", num_received)
        try:
            num_bytes = cast(int, self._ssl.read(len(view), view))  # with a buffer, `read` returns a count
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            raise StreamBroken(tls_problem(error), num_received) from error
        if num_bytes == 0:
            raise StreamBroken("closed by the peer", num_received)
        return num_bytes

    def _take_in(self, num_missing: int, num_received: int) -> None:
        """Receive encrypted bytes. num_missing: bytes that the caller still needs."""
        self._flush(num_received)  # OpenSSL may have written a protocol message
        # Encrypted bytes are at least as many as decrypted ones, so at least this many will arrive, even if a part of a record #
        # has been received; one long wait for them is worthwhile.
        certain = min(num_missing - _RECORD_BYTES, len(self._received))
        try:
            if certain > 0:
                self._stream.receive([self._received[:certain]])
                self._incoming.write(self._received[:certain])
            else:
                self._incoming.write(self._received[: self._stream.receive_some(self._received)])
        except StreamBroken as error:
            raise StreamBroken(str(error), num_received, error.is_stall) from error

    def _flush(self, num_moved: int) -> None:
        if not self._outgoing.pending:
            return
        try:
            self._stream.send([memoryview(self._outgoing.read())])
        except StreamBroken as error:
            raise StreamBroken(str(error), num_moved, error.is_stall) from error
