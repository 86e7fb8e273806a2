"""The end of a process that serves one other: with its parent, or some seconds after its peer's end of a socket."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
import time

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, also while this process is stopped.

    Without effect on a parent that has ended already: a caller that can compares `os.getppid()` before and after.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_peer() -> None:
    """Ignore SIGINT and SIGTERM, which go to a whole process group or service: the peer decides when this process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_after(peer: socket.socket, last_step_s: float) -> None:
    """Exit `last_step_s` seconds after the peer has closed its end, whatever the other threads compute."""
    threading.Thread(target=_end_after, args=(peer, last_step_s), name="peer-end", daemon=True).start()


def _end_after(peer: socket.socket, last_step_s: float) -> None:
    poll = select.poll()
    poll.register(peer, select.POLLRDHUP)
    poll.poll()
    time.sleep(last_step_s)
    os._exit(1)
