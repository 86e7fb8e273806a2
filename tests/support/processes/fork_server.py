"""Python processes that need not import torch: forked from one that has.

Usage, by `forked_process.py` alone: python -P fork_server.py FD

FD is a socket (SOCK_SEQPACKET). Each message asks for one process and carries its descriptors:

    {"program": ["-m", "some.module", ...] or ["some/file.py", ...], "environ": {...}, "descriptors": [1, 2, 7]}
    + the descriptors, which the process has under those numbers, and last a pipe for its end

The answer is its process id. The pipe hears its exit status, negative for a signal, when it has ended. The server ends
when the socket does; a process that it forked goes on as a new interpreter would: same arguments, same exit.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys

PRELOADED = (
    "torch",
    "grpc.aio",
    "pdserve.cli.service_commands",
    "pdserve.worker.worker_process",
    "pdserve.engine.structured_outputs.grammar_matcher",
    "pdserve.router.service",
)
MAX_BYTES = 1 << 18
MAX_DESCRIPTORS = 16
_ABOVE_ALL_NAMED = 200
"""Lowest number of received descriptors: above every number that a process may ask for."""


def serve(control: socket.socket) -> list[str]:
    """Fork until the socket ends. Returns in the server with no program, in a forked process with the one to run."""
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    ends: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if wake_read in ready:
                wake_read.recv(4096)
                _reap(ends)
            if control not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, MAX_DESCRIPTORS)
            if not message:
                return []
            process = os.fork()
            if process == 0:
                break
            *given, end = descriptors
            for descriptor in given:
                os.close(descriptor)
            ends[process] = end
            control.send(str(process).encode())
    signal.set_wakeup_fd(-1)
    for own in (control, wake_read, wake_write):
        own.close()
    for other in ends.values():
        os.close(other)
    return _become(json.loads(message), descriptors)


def _reap(ends: dict[int, int]) -> None:
    while ends:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process == 0:
            return
        end = ends.pop(process)
        with contextlib.suppress(BrokenPipeError):
            os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(end)


def _become(request: dict[str, object], descriptors: list[int]) -> list[str]:
    """In the forked process: signals, environment and descriptors as a new process has them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environ"])  # type: ignore[call-overload]
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    *given, end = [_moved_up(descriptor) for descriptor in descriptors]
    os.close(end)
    numbers: list[int] = request["descriptors"]  # type: ignore[assignment]
    for descriptor, number in zip(given, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=number <= 2)
        os.close(descriptor)
    return request["program"]  # type: ignore[return-value]


def _moved_up(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_ALL_NAMED)
    os.close(descriptor)
    return moved


def _run(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # what is shared with the forked processes is not looked through again, neither while they run nor at their end
    if todo := serve(socket.socket(fileno=int(sys.argv[1]))):
        _run(todo)
