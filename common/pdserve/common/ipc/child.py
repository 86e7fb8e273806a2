"""`Child`: a process of this one and the socket to it, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

from pdserve.common.ipc.child_process import StartProcess, wait_for_exit
from pdserve.common.ipc.frame_socket import FrameSocket
from pdserve.common.ipc.frames import verify_length

T = TypeVar("T")


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="ipc", daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], T]) -> T:
        """Call a function there; waits for its result."""
        if self._is_current:
            return function()

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result()

    def close(self) -> None:
        """Waits, unless this is its own thread: an object may end where its last message was handled. May be called again."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        if not self._is_current:
            self._thread.join()
            self.loop.close()

    @property
    def _is_current(self) -> bool:
        return threading.current_thread() is self._thread


class Child:
    """Any thread may use it.

    The kernel may kill the process with the thread that starts it, if its program calls `end_with_parent`.
    """

    def __init__(
        self,
        start: StartProcess,
        on_message: Callable[[bytes], None],
        on_end: Callable[[Child], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """on_message, on_end: called in the event loop, as by `FrameSocket`; on_end with this object, since the process may end
        before this returns. loop: that of the caller's thread; None: one in a thread of its own."""
        self._owner = os.getpid()
        self._closing = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = start(theirs.fileno())
            except BaseException:
                ours.close()
                raise
        self._thread: _LoopThread | None = None
        if loop is None:
            self._thread = thread = _LoopThread()
            self._loop: asyncio.AbstractEventLoop = thread.loop
            self._socket = thread.run(lambda: FrameSocket(ours, on_message, lambda: on_end(self)))
        else:
            self._loop = loop
            self._socket = FrameSocket(ours, on_message, lambda: on_end(self))

    def send(self, payload: bytes) -> None:
        """Send a message; never blocks. Without effect after the end. Raises: PeerError for one that is too long."""
        if self._thread is None:
            self._socket.send(payload)
            return
        verify_length(len(payload))
        with contextlib.suppress(RuntimeError):  # the loop has closed
            # not in this thread, where Ctrl-C might cut the message
            self._loop.call_soon_threadsafe(self._socket.send, payload)

    def wait(self, timeout_s: float) -> int:
        """How the process ended, without reaping it. Raises: subprocess.TimeoutExpired."""
        return wait_for_exit(self.process, timeout_s)

    def hang_up(self) -> None:
        """Close the socket, which ends the process. In the thread of the event loop, or of one of its own any."""
        if self._thread is None:
            self._socket.close()
        elif not self._loop.is_closed():
            self._thread.run(self._socket.close)

    def reap(self, timeout_s: float) -> int:
        """Wait for the process to end, and kill it after `timeout_s`; returns its exit status. Blocks."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def close(self, timeout_s: float) -> None:
        """`hang_up`, then `reap`. May be called again, and in a forked process, where it has no effect."""
        if os.getpid() != self._owner:
            return
        with self._closing:
            self.hang_up()
            self.reap(timeout_s)
            if self._thread is not None:
                self._thread.close()
