"""The source's side of the TCP connector: one thread accepts, one thread per connection answers."""

from __future__ import annotations

import logging
import socket
import threading
import time

from pdserve.common import clock
from pdserve.common.security.tls_roles import WORKERS
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.memory.pool_memory import NoRoom, PoolMemory
from pdserve.kv_transfer.pull.read_grants import InFlightSend, ReadGrant, ReadGrants, ReadRefusal
from pdserve.kv_transfer.tcp.tcp_connections import SourceConnections
from pdserve.kv_transfer.tcp.tcp_frames import MalformedFrame, ReadAnswer, ReadRequest
from pdserve.kv_transfer.tcp.tcp_settings import TcpSettings
from pdserve.kv_transfer.tcp.tcp_stream import Listener, Stream, StreamBroken, TcpStream
from pdserve.kv_transfer.tcp.tls_stream import HandshakeFailed, TlsStream
from pdserve.kv_transfer.totals import Totals

logger = logging.getLogger(__name__)

_WARN_EACH_S = 60.0
_WARNED_PEERS = 256
_ACCEPT_RETRY_S = 0.1

Reader = tuple[str, ...]
"""Identity of a reader: its address, and with TLS the names in its certificate, which a renewal keeps."""


class TcpSource:
    """Answers granted reads of peers from the pool. Listens from construction until `close`.

    Raises: ConfigError if the address is not available.
    """

    def __init__(self, pool: PoolMemory, settings: TcpSettings, events: EventThread) -> None:
        self.counters = Totals()
        self._pool = pool
        self._settings = settings
        self._grants = ReadGrants(pool.num_blocks, events, settings.fence_after_s)
        self._listener = Listener(settings.host, settings.port)
        self.port = self._listener.port
        self._connections = SourceConnections(settings, events)
        self._lock = threading.Lock()
        self._closed = False
        self._warned_at: dict[str, float] = {}
        self._accepting = threading.Thread(target=self._accept, name=f"tcp-accept-{self.port}", daemon=True)
        self._accepting.start()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def num_refused_connections(self) -> int:
        """As `SourceConnections.num_refused`."""
        return self._connections.num_refused

    def grant(self, token: bytes, parts: int = 1) -> ReadGrant:
        return self._grants.open(token, parts)

    def close(self) -> None:
        """End all grants and connections, join all threads, free the port. Idempotent."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        self._listener.wake()
        self._accepting.join()
        self._listener.close()
        self._grants.close()
        self._connections.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted = self._listener.accept()
            except OSError as error:
                # most likely no descriptor is left; ending connections free some
                logger.warning("cannot accept a connection: %s", error)
                time.sleep(_ACCEPT_RETRY_S)
                continue
            if accepted is None:
                return
            self._on_accept(*accepted)

    def _on_accept(self, sock: socket.socket, peer: str) -> None:
        try:
            stream = TcpStream(sock, self._settings.first_request_s, self._settings.send_stall_s)
        except OSError as error:  # the peer has disconnected
            logger.debug("connection from %s: %s", peer, error)
            sock.close()
            return
        thread = threading.Thread(
            target=self._serve, args=(stream, peer), name=f"tcp-serve-{self.port}-{peer}", daemon=True
        )
        try:
            if not self._connections.admit(stream, peer, thread):
                stream.close()
        except RuntimeError as error:
            logger.warning("no thread for a connection from %s: %s", peer, error)
            stream.close()

    def _serve(self, stream: TcpStream, peer: str) -> None:
        frame = bytearray(ReadRequest.NUM_BYTES)
        patience_s = self._settings.first_request_s
        try:
            secured = self._secure(stream)
            reader = (peer, *secured.peer_names) if isinstance(secured, TlsStream) else (peer,)
            while secured.wait_readable(patience_s):
                secured.receive([memoryview(frame)])
                self._answer(stream, secured, reader, ReadRequest.decode(frame))
                patience_s = 2 * self._settings.idle_close_s
        except HandshakeFailed as error:
            self.counters.add(failed_handshakes=1)
            self._warn(peer, f"failed the TLS handshake ({error})")
        except StreamBroken as error:
            logger.debug("connection from %s: %s", peer, error)
        except MalformedFrame as error:
            self.counters.add(malformed_frames=1)
            self._warn(peer, f"sent an invalid frame ({error})")
        except NoRoom as error:
            self.counters.add(sends_without_room=1)
            self._warn(peer, f"was not served ({error})")
        except Exception:
            logger.exception("connection from %s", peer)
        finally:
            self._connections.leave(stream)

    def _secure(self, stream: TcpStream) -> Stream:
        """Start TLS if configured; the handshake blocks only this connection's thread."""
        tls = self._settings.tls
        if tls is None:
            return stream
        secured = TlsStream(stream, tls.server.context, self._settings.first_request_s)
        peers = tls.server.current.peers
        if peers is not None and (objection := peers.objection(secured.peer_uris, WORKERS)) is not None:
            raise HandshakeFailed(objection)
        return secured

    def _answer(self, connection: TcpStream, stream: Stream, reader: Reader, request: ReadRequest) -> None:
        allowed = self._allow(stream, reader, request)
        if isinstance(allowed, ReadRefusal):
            self.counters.add(refused_reads=1)
            stream.send([memoryview(ReadAnswer.to_request(request, allowed).encode())])
            return
        try:
            if not self._connections.settle(connection):
                raise StreamBroken("too many connections")
            # in pieces, since blocks of a device are copied to memory that all peers share
            head = [memoryview(ReadAnswer.to_request(request).encode())]
            pool = self._pool.divided(allowed.grant.parts)
            for first in range(0, request.count, pool.most_lent):
                with pool.lend(allowed.blocks[first : first + pool.most_lent], reader) as views:
                    stream.send([*head, *views])
                head = []
            self.counters.add(blocks_sent=request.count)
        finally:
            self._grants.end(allowed)

    def _allow(self, stream: Stream, reader: Reader, request: ReadRequest) -> InFlightSend | ReadRefusal:
        # a part of a block is smaller than a block
        block_bytes = min(self._pool.block_bytes, max(1, request.block_bytes))
        if request.count > max(1, self._settings.max_request_bytes // block_bytes):
            return ReadRefusal.TOO_MANY
        sending = self._grants.begin(request.token, request.first_index, request.count, stream.shutdown, reader)
        if isinstance(sending, InFlightSend) and request.block_bytes * sending.grant.parts != self._pool.block_bytes:
            # only the holder of a token gets information about the pool
            self._grants.end(sending)
            return ReadRefusal.WRONG_BLOCK_BYTES
        return sending

    def _warn(self, peer: str, what: str) -> None:
        now = clock.monotonic()
        with self._lock:
            if now - self._warned_at.get(peer, float("-inf")) < _WARN_EACH_S:
                return
            if len(self._warned_at) >= _WARNED_PEERS:
                self._warned_at.clear()
            self._warned_at[peer] = now
        logger.warning(
            "%s %s; its connection is closed. Further ones from there within %g s are only counted.",
            peer,
            what,
            _WARN_EACH_S,
        )
