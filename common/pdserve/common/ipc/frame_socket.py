"""`FrameSocket`: one end of a socket pair in an event loop. Each message is its length, then its bytes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from pdserve.common.errors import PeerError
from pdserve.common.ipc.frames import LENGTH, packed_length, verify_length

READ_BYTES = 1 << 18
"""Bytes that are read at once, so that the loop's other callbacks get their turn."""
MAX_UNSENT_BYTES = 1 << 29
"""Above this a peer counts as one that reads no more; two messages of the longest kind fit."""
log = logging.getLogger(__name__)


class FrameSocket:
    """Reads in the event loop. Any thread writes, at once if the peer keeps up, so that no other thread has to wake up for it."""

    def __init__(
        self, connected: socket.socket, on_message: Callable[[bytes], None], on_end: Callable[[], None]
    ) -> None:
        """Takes the socket over. on_message: called in the event loop; any error in it ends the connection.

        on_end: called once, when the peer has ended, or its messages cannot be read, or it reads none; not after `close`.
        """
        self._loop = asyncio.get_running_loop()
        self._socket = connected
        self._socket.setblocking(False)
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._sending = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent_bytes = 0
        self._has_ended = False
        self._loop.add_reader(self._socket, self._read)

    def send(self, payload: bytes) -> None:
        """Send a message, in order; never blocks. Without effect after the end. Raises: PeerError for one that is too long."""
        head = packed_length(payload)
        with self._sending:
            if self._has_ended:
                return
            sent = 0
            if not self._unsent:
                try:
                    sent = self._socket.sendmsg([head, payload])
                except BlockingIOError:
                    pass
                except OSError:
                    return  # the reader finds the end
                if sent == len(head) + len(payload):
                    return
                self._call_soon(self._begin_writing)
            rest = memoryview(head + payload)[sent:]
            self._unsent.append(rest)
            self._num_unsent_bytes += len(rest)
            if self._num_unsent_bytes > MAX_UNSENT_BYTES:
                log.error("a process reads no messages: %d bytes wait for it", self._num_unsent_bytes)
                self._cut()

    def close(self) -> None:
        """Send no more, and read no more. May be called again."""
        with self._sending:
            if self._has_ended:
                return
            self._has_ended = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()

    def _begin_writing(self) -> None:
        if not self._has_ended:
            self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        with self._sending:
            try:
                while self._unsent:
                    sent = self._socket.send(self._unsent[0])
                    self._num_unsent_bytes -= sent
                    if sent < len(self._unsent[0]):
                        self._unsent[0] = self._unsent[0][sent:]
                    else:
                        self._unsent.popleft()
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        self._received += data
        try:
            self._pass_on()
        except (PeerError, msgspec.MsgspecError) as error:
            log.error("a message between processes cannot be read: %s", error)
            self._end()
        except Exception:
            log.exception("a message between processes could not be handled")
            self._end()

    def _pass_on(self) -> None:
        """Hand over all messages that are complete."""
        start, size = 0, len(self._received)
        while size - start >= LENGTH.size and not self._has_ended:
            [length] = LENGTH.unpack_from(self._received, start)
            verify_length(length)
            end = start + LENGTH.size + length
            if end > size:
                break
            with memoryview(self._received) as view:
                message = bytes(view[start + LENGTH.size : end])
            start = end
            self._on_message(message)
        del self._received[:start]

    def _end(self) -> None:
        if not self._has_ended:
            self.close()
            self._on_end()

    def _cut(self) -> None:
        """The reader finds the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(callback)
