"""A server that speaks the data plane's frames as far as a test's script wants, and then does worse."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from pdserve.kv_transfer.tcp.tcp_frames import ReadAnswer, ReadRequest
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress

Script = Callable[[ReadRequest], bytes | None]
"""Request -> bytes to send; None: nothing, and hang up."""


class HostileSource:
    """Answers each request with what `script` returns. `num_connections` and `num_requests` count what came."""

    def __init__(self, script: Script) -> None:
        self.num_connections = 0
        self.num_requests = 0
        self._script = script
        self._threads: list[threading.Thread] = []
        self._socks: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.metadata = TcpAddress("127.0.0.1", self._listener.getsockname()[1]).to_metadata()
        self._start(self._accept)

    def close(self) -> None:
        for sock in [self._listener, *self._socks]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # The accepting thread is first, and starts no other once it has ended.
        for thread in self._threads:
            thread.join()
        for sock in [self._listener, *self._socks]:
            sock.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="hostile", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock = self._listener.accept()[0]
                self.num_connections += 1
                self._socks.append(sock)
                self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while len(frame := sock.recv(ReadRequest.NUM_BYTES, socket.MSG_WAITALL)) == ReadRequest.NUM_BYTES:
                self.num_requests += 1
                reply = self._script(ReadRequest.decode(frame))
                if reply is None:
                    break
                sock.sendall(reply)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def honest_answer(request: ReadRequest) -> bytes:
    """The answer of a source whose blocks are all zero."""
    return ReadAnswer.to_request(request).encode() + bytes(request.count * request.block_bytes)
