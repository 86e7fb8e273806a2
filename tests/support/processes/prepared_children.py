"""Processes that a worker of a test will start, forked before it has threads: each waits until it is asked to run its program.

A program that a worker starts anew imports torch, or xgrammar and transformers, which takes one to three seconds of CPU time.
Tests that kill workers a hundred times spend most of their time on that. A prepared process has imported it all, like the worker
itself (`fork_server.py`). It is a child of the worker's main thread as the other would be, has the same descriptors, arguments and
environment, and ends in the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from pdserve.common.ipc.child_process import ChildProcess
from pdserve.common.processes.child_environment import child_environment
from pdserve.common.processes.child_life import end_with_parent
from pdserve.engine.client import process_client
from pdserve.engine.ranks import rank_processes
from pdserve.engine.structured_outputs import grammar_fork_server
from pdserve.worker.ranks.join_ranks import WORKER_RANK

ENGINE_PROCESS, RANK_1 = "engine-process", "worker-rank-1"
"""Names (`psutil.Process.name`) of prepared processes that run the program of the engine, and of rank 1."""
_PREPARED = "prepared"
"""Name of a prepared process until it is asked."""
_PR_SET_NAME = 15
_MAX_BYTES = 1 << 16


class PreparedChild:
    """Implements `ChildProcess`."""

    def __init__(self, name: str, run: Callable[[], int | None], unneeded: Sequence[int] = ()) -> None:
        """Fork. name: of the process while it runs. run: returns its exit status. unneeded: descriptors that it closes."""
        self._asks, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._asks.close()
            # not the parent's name: this may be the engine's process, and the child is none of its parts
            _set_name(_PREPARED)
            end_with_parent()
            if os.getppid() != parent:
                os._exit(0)
            for descriptor in unneeded:
                os.close(descriptor)
            sys.exit(_run_when_asked(asked, name, run))
        asked.close()
        self._end = os.pidfd_open(self.pid)
        self._reaping = threading.Lock()
        self._status: int | None = None
        self.is_asked = False

    def start(self, arguments: Sequence[str], descriptor: int) -> ChildProcess:
        """Let it run with these arguments, and with `descriptor` under the same number; once."""
        self.is_asked = True
        with self._asks:
            message = json.dumps([descriptor, *arguments]).encode()
            socket.send_fds(self._asks, [message], [descriptor])
        return self

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired."""
        if not select.select([self._end], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        with self._reaping:
            if self._status is None:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def send_signal(self, number: int, /) -> None:
        with self._reaping, contextlib.suppress(ProcessLookupError):
            if self._status is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_when_asked(asked: socket.socket, name: str, run: Callable[[], int | None]) -> int | None:
    with asked:
        message, descriptors, _, _ = socket.recv_fds(asked, _MAX_BYTES, 1)
    if not message:
        os._exit(0)
    number, *arguments = json.loads(message)
    [given] = descriptors
    if given != number:
        os.dup2(given, number, inheritable=False)
        os.close(given)
    _set_name(name)
    sys.argv = [name, *arguments]
    return run()


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def prepare_children(begin: Callable[[], None] = lambda: None) -> None:
    """Fork what the worker with this process's command line will start, and let it be used; to be called before the worker runs.

    begin: called in the process of the engine, be it this one or another.
    """
    arguments = sys.argv
    unneeded = [int(arguments[arguments.index("--report-fd") + 1])]
    if not _has(arguments, "--engine-process=true"):
        _prepare_engine(arguments, begin, unneeded)
        return

    def run_engine() -> int:
        from pdserve.worker import engine_process

        return engine_process.main()

    def prepare_and_run() -> int:
        _prepare_engine(arguments, begin, ())
        return run_engine()

    engine = PreparedChild(ENGINE_PROCESS, prepare_and_run, unneeded)
    process_client.start_program = lambda descriptor, module: engine.start([str(descriptor)], descriptor)


def _has(arguments: Sequence[str], option: str) -> bool:
    """True if an option is given, with dashes or underscores in its name."""
    return option in (argument.replace("_", "-") for argument in arguments)


def _prepare_engine(arguments: Sequence[str], begin: Callable[[], None], unneeded: Sequence[int]) -> None:
    if _has(arguments, "--tensor-parallel-size=2"):
        rank = PreparedChild(RANK_1, _run_rank, unneeded)

        def start_rank(descriptor: int, module: str) -> ChildProcess:
            assert module == WORKER_RANK
            return rank.start([str(descriptor)], descriptor)

        rank_processes.start_program = start_rank
    grammars, start_anew = PreparedChild("grammars", _run_grammars, unneeded), grammar_fork_server.start_program

    def start_grammars(arguments: Sequence[str], descriptor: int) -> ChildProcess:
        # one that has ended is followed by another
        return start_anew(arguments, descriptor) if grammars.is_asked else grammars.start(arguments, descriptor)

    grammar_fork_server.start_program = start_grammars
    begin()


def _run_rank() -> int:
    from pdserve.engine.executor import rank_process
    from pdserve.worker.ranks import worker_rank

    return rank_process.main(worker_rank.move_blocks)


def _run_grammars() -> None:
    from pdserve.engine.structured_outputs import grammar_process

    environment = child_environment() | grammar_fork_server.ENVIRONMENT
    os.environ.clear()
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
    grammar_process.main()
