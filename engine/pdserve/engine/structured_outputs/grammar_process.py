"""A program that compiles and matches grammars: a fork server with one vocabulary, and one child process per grammar.

`GrammarForkServer` starts this module with the arguments DESCRIPTOR MODEL_FOLDER VOCAB_SIZE WHITESPACE_CHARS.

Grammars are clients' texts, and compiling and matching them may take super-linear time. The kernel kills a grammar's process by a
timer over its CPU time, without loss for other grammars. A process ends when its socket is closed or the fork server ends,
and so with the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pdserve.common import clock
from pdserve.common.errors import PdServeError
from pdserve.engine.structured_outputs.grammar_matcher import Vocabulary, compile_grammar, warm_up
from pdserve.engine.structured_outputs.grammar_messages import (
    MAX_PACKET_BYTES,
    Broken,
    Compiled,
    Exited,
    Kill,
    Ready,
    Spawn,
    decode,
    encode,
    map_progress,
)
from pdserve.engine.structured_outputs.grammar_sequences import GrammarSequences, WorkerEnds

_PR_SET_PDEATHSIG = 1
_COMPILING_NICENESS = 10
"""Added to the worker's niceness for the thread that compiles."""
_LOWEST_PRIORITY = 19
_REST_S = 1.0
"""Seconds without a new process after which the fork server computes masks that grammars share."""
_REST_FACTOR = 2.0
"""Pauses of the fork server, in times of its work."""
_PAGE_BYTES = resource.getpagesize()


def main() -> None:
    descriptor, folder, *numbers = sys.argv[1:]
    # Ctrl-C signals the whole process group; the worker decides when this process ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(descriptor))
    try:
        vocabulary = Vocabulary(Path(folder), *map(int, numbers))
        warm_up(vocabulary)
    except Exception as error:
        control.send(encode(Broken(f"{type(error).__name__}: {error}"[:500])))
        raise
    gc.collect()
    gc.freeze()  # garbage collection in a child would copy every page that contains an object
    # the worker may have been killed and its end closed
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.send(encode(Ready()))
        ForkServer(control, vocabulary).run()


class ForkServer:
    """Forks one process per grammar. Single-threaded, so that it may fork at any time."""

    def __init__(self, control: socket.socket, vocabulary: Vocabulary) -> None:
        self._control = control
        self._vocabulary = vocabulary
        self._process_ids: dict[int, int] = {}
        """Process id -> the worker's number of the process."""
        self._warms_at: float | None = clock.monotonic() + _REST_S
        """`clock.monotonic()` seconds of the next part of the masks that grammars share; None when all are computed."""
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve messages until the worker closes its end."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        try:
            while True:
                rest_s = None if self._warms_at is None else max(self._warms_at - clock.monotonic(), 0.0)
                ready = poll.poll(None if rest_s is None else rest_s * 1e3)
                for descriptor, _ in ready:
                    if descriptor == self._woken:
                        self._reap()
                    elif not self._serve_message():
                        return
                if not ready and self._warms_at is not None:
                    self._warm()
        finally:
            for process_id in self._process_ids:
                os.kill(process_id, signal.SIGKILL)

    def _warm(self) -> None:
        """Compute a part of the masks that grammars share, then rest: others need the processors, too."""
        began_at = clock.monotonic()
        is_more = self._vocabulary.warm_more()
        now = clock.monotonic()
        self._warms_at = now + _REST_FACTOR * (now - began_at) if is_more else None

    def _serve_message(self) -> bool:
        """Handle one message. False if the worker has ended."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 3)
        if not packet:
            return False
        message = decode(packet, Spawn, Kill)
        if isinstance(message, Kill):
            for process_id, process in self._process_ids.items():
                if process == message.process:
                    os.kill(process_id, signal.SIGKILL)
            return True
        process_id = os.fork()
        if process_id == 0:
            run_child(lambda: self._become(message, *descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        self._process_ids[process_id] = message.process
        if self._warms_at is not None:
            self._warms_at = clock.monotonic() + _REST_S  # the new process compiles now
        return True

    def _become(self, spawn: Spawn, control: int, steps: int, progress: int) -> None:
        """Run the child process."""
        for descriptor in (self._control.detach(), self._woken, self._wake):
            os.close(descriptor)
        ends = WorkerEnds(socket.socket(fileno=control), socket.socket(fileno=steps), map_progress(progress))
        os.close(progress)
        hold_grammar(self._vocabulary, spawn, ends)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._woken, 256):
                pass
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                process = self._process_ids.pop(ended[0], None)
                if process is not None:
                    self._control.send(encode(Exited(process, ended[1])))


def run_child(life: Callable[[], None]) -> None:
    """Run `life`, then exit without the clean-up of the parent process."""
    parent = os.getppid()
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            life()
        os._exit(0)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the worker has closed its end
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def hold_grammar(vocabulary: Vocabulary, spawn: Spawn, worker: WorkerEnds) -> None:
    """Compile a grammar, then serve the sequences that follow it until the worker closes its end."""
    limits = spawn.limits
    begins_with = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES
    most = begins_with + (limits.memory_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # the kernel kills a process that exceeds the limit, so no other process has to watch it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.compile_s)
    compiled, error = _at_low_priority(lambda: compile_grammar(vocabulary, spawn.params))
    signal.setitimer(signal.ITIMER_PROF, 0)
    if compiled is None:
        is_clients_fault = isinstance(error, PdServeError)
        reason = str(error) if is_clients_fault else f"{type(error).__name__}"
        worker.control.send(encode(Compiled(reason, is_clients_fault)))
        return
    worker.control.send(encode(Compiled()))
    sequences = GrammarSequences(compiled, vocabulary.size, limits, worker)
    poll = select.poll()
    for end in (worker.control, worker.steps):
        poll.register(end, select.POLLIN)
    while True:
        poll.modify(worker.steps, select.POLLIN | (select.POLLOUT if sequences.has_unsent else 0))
        for descriptor, events in poll.poll():
            if events & select.POLLOUT:
                sequences.send_more()
            if events & ~select.POLLOUT:
                serves = sequences.open if descriptor == worker.control.fileno() else sequences.go_on
                if not serves():
                    return


T = TypeVar("T")


def _at_low_priority(compile: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Run `compile` in a thread of low priority; the priority of this thread could not be raised again."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        thread_id = threading.get_native_id()
        # not below the worker's niceness, which may need privileges
        mine = os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, min(mine + _COMPILING_NICENESS, _LOWEST_PRIORITY))
        try:
            outcome.append(compile())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return (outcome[0], None) if outcome else (None, failure[0])


if __name__ == "__main__":
    main()
