"""`RankProcesses`: the processes of the ranks above 0, started, watched and ended by rank 0."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from pdserve.common.errors import Cancelled, PdServeError, PeerError, WorkerLost, from_code
from pdserve.common.ipc.child_process import ChildProcess, exit_text, start_module, wait_for_exit
from pdserve.common.ipc.frames import receive_frame, send_frame
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.engine.ranks.process_rank_group import ProcessRankGroup
from pdserve.engine.ranks.rank_messages import StartRank, ToRank, decode_from_rank, encode

T = TypeVar("T")

RANK_PROGRAM = "pdserve.engine.executor.rank_process"
"""The program of a rank whose blocks stay where they are."""
_END_S = 5.0
"""Seconds for a process to end after its socket is closed."""
_NOTICE_S = 2.0
"""Seconds for the end of a process to be noticed after an operation with it has failed."""
DEFAULT_WAIT_S = 60.0
"""Seconds that a step waits for a rank, if `engine_stuck_exit_s` is 0."""


def start_program(descriptor: int, module: str) -> ChildProcess:
    """Start a rank's program."""
    return start_module(module, descriptor)


class RankProcesses:
    """Made and used by the thread that computes; `close` may be called by any.

    A thread starts the processes and watches their sockets. It lives as long as they do, since a process may be killed with the
    thread that started it (PR_SET_PDEATHSIG in `rank_process.py`). When one rank ends, the others are killed: none of them waits in
    an operation for one that is gone, and neither does rank 0.
    """

    def __init__(
        self, folder: Path, settings: WorkerSettings, device: torch.device, transfer_program: str | None = None
    ) -> None:
        """Start the processes, each of which loads its part, and meet them.

        transfer_program: a module in place of `RANK_PROGRAM` that also moves its rank's blocks, as the messages of a second socket
        say. Raises: WorkerLost, or a rank's own error.
        """
        self._program = transfer_program or RANK_PROGRAM
        self.transfer_sockets: list[socket.socket] = []
        """This end of each rank's second socket, from rank 1 on; empty without `transfer_program`. Its user closes it."""
        self._owner = os.getpid()
        size = settings.tensor_parallel_size
        self._wait_s = settings.limits.engine_stuck_exit_s or DEFAULT_WAIT_S
        self._ended_with: PdServeError | None = None
        self._closing = threading.Lock()
        self._lock = threading.Lock()
        self._noticed = threading.Event()
        self._folder = tempfile.mkdtemp(prefix="pdserve-ranks-")
        self._sockets: list[socket.socket] = []
        self._processes: list[ChildProcess] = []
        self._wake_read, self._wake_write = os.pipe()
        started: Future[None] = Future()
        self._watcher = threading.Thread(target=self._watch, args=(size - 1, started), name="ranks", daemon=True)
        self._watcher.start()
        try:
            started.result()
            store = Path(self._folder) / "store"
            common = WorkerSettings(**{name: getattr(settings, name) for name in WorkerSettings.__struct_fields__})
            for place, peer in enumerate(self._sockets):
                has_transfers = transfer_program is not None
                start = StartRank(
                    str(folder), common, place + 1, str(store), self._wait_s, settings.section, has_transfers
                )
                self._send_to(peer, start)
                if has_transfers:
                    self._send_socket(peer)
            self.group = self.attempt(lambda: ProcessRankGroup(store, 0, size, device, self.require_all))
        except BaseException:
            self.close()
            raise

    def loaded(self) -> None:
        """All ranks have loaded: from now on none waits longer than a step may take."""
        self.group.limit_waits(self._wait_s)

    @property
    def process_ids(self) -> list[int]:
        """Process ids by rank, from 1 on."""
        return [process.pid for process in self._processes]

    def send(self, message: ToRank) -> None:
        """Send a message to every other rank. Raises: WorkerLost when one has ended, or does not read."""
        self.require_all()
        payload = encode(message)
        for peer in self._sockets:
            try:
                send_frame(peer, payload)
            except OSError as error:
                raise self.failed(error) from error

    def require_all(self) -> None:
        """Raises: the error with which a rank ended."""
        if (cause := self._ended_with) is not None:
            raise from_code(cause.code, cause.message)

    def attempt(self, work: Callable[[], T]) -> T:
        """Run operations in which all ranks take part.

        Raises: after an error none is possible any more, since other ranks may be elsewhere; the cause is a rank's end if there was
        one, else the error itself.
        """
        self.require_all()
        try:
            return work()
        except BaseException as error:
            raise self.failed(error) from error

    def failed(self, error: BaseException) -> BaseException:
        """Note that an operation has failed; returns the error to raise."""
        if isinstance(error, RuntimeError | OSError):
            # the process that closed its connection is about to be found
            self._noticed.wait(_NOTICE_S)
        text = f"rank 0 failed, and the other ranks wait for it: {type(error).__name__}: {error}"
        is_own = self._end(WorkerLost(text[:500]))
        cause = self._ended_with
        return error if is_own or cause is None else from_code(cause.code, cause.message)

    def close(self) -> None:
        """End the processes, after the step that they are in. Harmless when called again, and in a forked process."""
        if os.getpid() != self._owner:
            return
        with self._closing:
            self._end(Cancelled("the engine was shut down"))
            if self._wake_write >= 0:
                os.close(self._wake_write)
                self._wake_write = -1
            self._watcher.join()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _send_to(self, peer: socket.socket, message: ToRank) -> None:
        with contextlib.suppress(OSError):  # the watcher finds out why
            send_frame(peer, encode(message))

    def _send_socket(self, peer: socket.socket) -> None:
        own, theirs = socket.socketpair()
        self.transfer_sockets.append(own)
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(peer, [b"\0"], [theirs.fileno()])

    def _end(self, cause: PdServeError) -> bool:
        """Note the first cause; False if there was one."""
        with self._lock:
            if self._ended_with is not None:
                return False
            self._ended_with = cause
            return True

    def _watch(self, count: int, started: Future[None]) -> None:
        try:
            for _ in range(count):
                self._start()
            started.set_result(None)
        except BaseException as error:
            started.set_exception(error)
        try:
            self._watch_sockets()
        finally:
            self._stop_all()

    def _start(self) -> None:
        own, theirs = socket.socketpair()
        own.settimeout(self._wait_s)
        self._sockets.append(own)
        with theirs:
            self._processes.append(start_program(theirs.fileno(), self._program))

    def _watch_sockets(self) -> None:
        """Until a rank ends, or `close`."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        ranks = {peer.fileno(): rank for rank, peer in enumerate(self._sockets, 1)}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_read:
                    return
                rank = ranks[descriptor]
                cause = self._failure_of(rank)
                if self._end(cause):
                    with contextlib.suppress(AttributeError):  # the ranks have not met yet
                        self.group.abort()
                self._noticed.set()
                return

    def _failure_of(self, rank: int) -> PdServeError:
        """A rank's last message, or how its process ended."""
        payload = None
        try:
            with contextlib.suppress(OSError):  # reset: it ended before it had read everything
                payload = receive_frame(self._sockets[rank - 1])
            if payload is not None:
                return decode_from_rank(payload).failure.error()
            return WorkerLost(f"rank {rank} {exit_text(wait_for_exit(self._processes[rank - 1], _END_S))}")
        except (PeerError, msgspec.DecodeError, subprocess.TimeoutExpired) as error:
            return WorkerLost(f"rank {rank} closed its socket: {error}")

    def _stop_all(self) -> None:
        """End every process: after `close` when its socket is closed, after the end of another rank at once."""
        was_lost = self._noticed.is_set()
        for peer in self._sockets:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for process in self._processes:
            try:
                if was_lost:
                    process.kill()
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for peer in self._sockets:
            peer.close()
        os.close(self._wake_read)
