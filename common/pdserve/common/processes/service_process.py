"""`ServiceProcess`: a child process of a service, started and awaited outside its event loop.

The loop must not start it: uvloop forks with the handlers of `pthread_atfork`, and those of gRPC crash the child before it runs its
program where a thread of gRPC is at work. `subprocess.Popen` uses `vfork`, which calls no handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdserve.common.tasks.first_done import first_done

log = logging.getLogger(__name__)

HURRY_S = 3.0
"""Seconds in which a process must end after a second signal, before it is killed."""


class ServiceProcess:
    """A running process. All methods belong to the event loop that started it."""

    def __init__(self, process: subprocess.Popen[bytes], ended: asyncio.Future[None]) -> None:
        """ended: done when the process has ended, and is not reaped."""
        self._process = process
        self._ended = ended

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The status, negative for a signal; None while it runs."""
        return self._process.wait() if self._ended.done() else None

    async def wait(self) -> int:
        """Wait for the end; returns `returncode`."""
        await asyncio.shield(self._ended)
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        """Without effect on a process that has ended."""
        if not self._ended.done():
            # not reaped, so the number is still its own
            os.kill(self.pid, number)

    async def stop(self, name: str, drain_s: float, hurry: asyncio.Event) -> None:
        """Let it drain for at most `drain_s` seconds or until `hurry` is set, then end it. name: in a warning."""
        self.send_signal(signal.SIGTERM)
        await first_done(self.wait(), hurry.wait(), timeout_s=drain_s)
        if self.returncode is None and hurry.is_set():
            # another signal than the first, which may not have been handled yet
            self.send_signal(signal.SIGINT)
            await first_done(self.wait(), timeout_s=HURRY_S)
        if self.returncode is None:
            log.warning("%s did not end in time; killing it", name)
            self.kill()
        await self.wait()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


async def start_process(
    command: Sequence[str], *, pass_fds: Sequence[int] = (), environ: Mapping[str, str] | None = None
) -> ServiceProcess:
    """Start a program in a session of its own, without standard input; a terminal's Ctrl-C does not reach it.

    pass_fds: descriptors that it inherits. environ: its environment; default: this process's. Cancelled, it leaves no process.
    Raises: OSError if the program cannot be started.
    """
    loop = asyncio.get_running_loop()
    started: asyncio.Future[subprocess.Popen[bytes]] = loop.create_future()
    ended: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=pass_fds, env=environ, start_new_session=True
            )
        except Exception as error:
            _tell(loop, started.set_exception, error)
            return
        _tell(loop, started.set_result, process)
        # the loop reaps it, so that it never sends a signal to another process with this number
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _tell(loop, ended.set_result, None)

    threading.Thread(target=run, name="service-process", daemon=True).start()
    try:
        return ServiceProcess(await asyncio.shield(started), ended)
    except asyncio.CancelledError:
        # the caller closes the descriptors next
        await asyncio.wait((started,))
        if started.exception() is None:
            orphan = ServiceProcess(started.result(), ended)
            orphan.kill()
            await orphan.wait()
        raise


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[Any], None], value: object) -> None:
    """Call in the loop; without effect if it has been closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, value)
