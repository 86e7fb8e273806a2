"""`GrammarCompiler`: compiles and matches the grammars of requests, each in a process of its own.

Grammars are clients' texts; compiling and matching them may take super-linear time and cannot be interrupted. Therefore no grammar
is in the worker's process: a fork server (`grammar_process`) makes a process per grammar, which compiles and matches it, and which
is killed if it takes too long, without loss for other grammars. One thread here starts processes and opens sequences in them; the
engine thread exchanges tokens and masks with a process directly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import signal
import socket
import threading
from array import array
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from pdserve.common import clock
from pdserve.common.errors import GrammarUnavailable, InternalError, InvalidRequest, PdServeError, PeerError
from pdserve.common.request.structured_outputs import FIELD
from pdserve.engine.structured_outputs.grammar import GrammarJob, JobQueue
from pdserve.engine.structured_outputs.grammar_fork_server import GrammarForkServer
from pdserve.engine.structured_outputs.grammar_host import GrammarHost, GrammarHosts
from pdserve.engine.structured_outputs.grammar_messages import (
    MAX_PACKET_BYTES,
    REPLAY_TOKENS,
    WAIT_FACTOR,
    Broken,
    Compiled,
    Exited,
    GrammarLimits,
    Open,
    Opened,
    Ready,
    decode,
    encode,
    mask_bytes,
)
from pdserve.engine.structured_outputs.held_grammar import HeldGrammar, Key, key_of
from pdserve.engine.structured_outputs.hosted_grammar import HostedGrammar

log = logging.getLogger(__name__)

NUM_COMPILING = 2
"""Number of grammars that are compiled at the same time."""
MAX_PROCESSES = 64
"""Default limit of compiled grammars; the default of `max_num_seqs`."""
MAX_IDLE_PROCESSES = 16
"""Limit of processes without sequences, kept because later requests often have the same grammar."""
START_S = 60.0
"""Seconds for which a request waits for the fork server, which imports its modules and reads the vocabulary. It is started again
only if it used no CPU time for so long."""
_NO_DESCRIPTOR = -1
_LOOK_EVERY_S = 0.25
_CLOSE_S = 5.0


class GrammarCompiler:
    """Compiles grammars for one model folder. Reads and starts nothing before the first job."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        limits: GrammarLimits | None = None,
        *,
        num_compiling: int = NUM_COMPILING,
        max_processes: int = MAX_PROCESSES,
    ) -> None:
        """vocab_size: length of the model's logits."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._limits = limits or GrammarLimits()
        self._num_compiling = num_compiling
        self._max_processes = max_processes
        # threads and processes inherit the CPU affinity of the thread that starts them, and the engine thread may be pinned
        self._cpus = os.sched_getaffinity(0)
        self.hosts = GrammarHosts(self.submit)
        """The processes, for the engine thread."""
        self._submitted: queue.SimpleQueue[GrammarJob] = queue.SimpleQueue()
        self._jobs = JobQueue()
        self._held: dict[Key, HeldGrammar] = {}
        """Least recently used first."""
        self._by_number: dict[int, HeldGrammar] = {}
        """Number -> process that has not ended."""
        self._server: GrammarForkServer | None = None
        self.is_starting = False
        """True until the fork server is ready, which takes seconds. Any thread may read it."""
        self._start_until = 0.0
        """`clock.monotonic()` seconds by which the starting fork server must have used more than `_start_ticks`."""
        self._start_ticks = 0
        self._selector: selectors.BaseSelector = selectors.SelectSelector()
        self._wake = _NO_DESCRIPTOR
        """An eventfd that wakes the compiler's thread; made with the first job."""
        self._thread: threading.Thread | None = None
        self._is_closing = False

    # ---- any thread

    def submit(self, job: GrammarJob) -> None:
        """Queue a grammar for compilation, or reuse a compiled one. Called by the engine thread."""
        if self._is_closing:
            return
        if self._thread is None:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._wake, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
        self._submitted.put(job)
        self._wake_up()

    def close(self) -> None:
        """End the processes, and wait for their end. Pending jobs are not delivered.

        Called after the engine's last step.
        """
        if self._is_closing:
            return
        self._is_closing = True
        if self._thread is not None:
            self._wake_up()
            self._thread.join(_CLOSE_S)

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # the fork server may have ended
            os.eventfd_write(self._wake, 1)

    # ---- the compiler's thread

    def _work(self) -> None:
        os.sched_setaffinity(0, self._cpus)
        while not self._is_closing:
            try:
                self._turn()
            except Exception:
                log.exception("the grammar compiler failed; all pending jobs end")
                self._give_up(InternalError("the grammar could not be compiled; the worker's log has the details"))
        self._stop_server()
        self._selector.close()
        wake, self._wake = self._wake, _NO_DESCRIPTOR
        os.close(wake)

    def _turn(self) -> None:
        is_compiling = any(not held.is_compiled for held in self._by_number.values())
        for key, _ in self._selector.select(_LOOK_EVERY_S if is_compiling or len(self._jobs) else None):
            if key.fileobj == self._wake:
                os.eventfd_read(self._wake)
            elif key.fileobj is self._server:
                self._receive_from_server()
            elif (held := self._by_number.get(key.data)) is not None:
                self._receive_from_process(held)
        while not self._submitted.empty():
            self._take(self._submitted.get())
        self._look_after()
        self._start_more()

    def _take(self, job: GrammarJob) -> None:
        held = self._held.pop(key_of(job), None)
        if held is None or held.host.is_lost:
            self._jobs.add(job)
            return
        self._held[held.key] = held  # now the most recently used
        self._put(held, job)

    def _put(self, held: HeldGrammar, job: GrammarJob) -> None:
        job.begins()
        if held.is_compiled:
            self._open(held, job)
        else:
            held.waiting.append(job)

    def _start_more(self) -> None:
        num_compiling = sum(not held.is_compiled for held in self._by_number.values())
        if len(self._jobs) and self._server is None:
            self._server = GrammarForkServer(self._folder, self._vocab_size, self._limits)
            self.is_starting, self._start_until, self._start_ticks = True, clock.monotonic() + START_S, 0
            self._selector.register(self._server, selectors.EVENT_READ)
        if self._server is None or not self._server.is_ready:
            return  # the start of the fork server does not count towards a grammar's time
        while num_compiling < self._num_compiling and len(self._jobs):
            if len(self._by_number) >= self._max_processes and not self._end_idle(1):
                return
            job = self._jobs.next()
            if job is None:
                return
            held = self._held.get(key_of(job))
            if held is None or held.host.is_lost:
                held = self._spawn(self._server, job)
                num_compiling += 1
            if held is not None:
                self._put(held, job)

    def _spawn(self, server: GrammarForkServer, job: GrammarJob) -> HeldGrammar | None:
        try:
            process = server.spawn(job.params)
        except OSError as error:
            job.deliver(GrammarUnavailable(f"the process that compiles {FIELD} could not be started: {error}"))
            return None
        host = GrammarHost(process.steps, process.progress, self._vocab_size, self._limits, self.hosts)
        held = HeldGrammar(key_of(job), process, host, clock.monotonic() + self._wait_s)
        self._held[held.key] = self._by_number[process.number] = held
        self._selector.register(process.control, selectors.EVENT_READ, process.number)
        return held

    @property
    def _wait_s(self) -> float:
        """Seconds for which requests wait for one compilation."""
        return WAIT_FACTOR * self._limits.compile_s

    # ---- messages of processes

    def _receive_from_process(self, held: HeldGrammar) -> None:
        try:
            packet = held.process.control.recv(MAX_PACKET_BYTES)
        except OSError:
            packet = b""
        if not packet:
            # the fork server will report the exit status
            self._selector.unregister(held.process.control)
            self._drop(held)
            return
        try:
            message = decode(packet, Compiled, Opened)
        except msgspec.DecodeError:
            log.exception("a process that holds a grammar sent a malformed message")
            held.process.control.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(message, Opened):
            if (job := held.opening.pop(message.slot, None)) is not None:
                self._deliver_opened(held, job, message)
        elif message.error:
            self._drop(held)
            held.fail(_error(message.error, message.is_clients_fault))
        else:
            held.is_compiled = True
            waiting, held.waiting = held.waiting, []
            for job in waiting:
                if job.is_wanted():
                    self._open(held, job)

    def _open(self, held: HeldGrammar, job: GrammarJob) -> None:
        slot = held.host.new_slot()
        held.opening[slot] = job
        held.host.takes_drafts &= job.may_draft
        tokens = job.output_token_ids
        try:
            for begin in range(0, max(1, len(tokens)), REPLAY_TOKENS):
                part = np.array(tokens[begin : begin + REPLAY_TOKENS], np.int32).tobytes()
                is_last = begin + REPLAY_TOKENS >= len(tokens)
                held.process.control.send(encode(Open(slot, job.eos_token_ids, part, is_last)))
        except OSError:
            self._drop(held)  # its jobs end when the process has ended

    def _deliver_opened(self, held: HeldGrammar, job: GrammarJob, message: Opened) -> None:
        if message.error:
            # another worker sampled the output that the request begins with
            reason = message.error
            job.deliver(InvalidRequest(reason, FIELD) if message.is_clients_fault else PeerError(reason))
            return
        allowed = None if message.has_ended else np.frombuffer(message.allowed, np.uint8)
        if allowed is not None and len(allowed) != mask_bytes(self._vocab_size):
            job.deliver(InternalError(f"a mask of {len(allowed)} bytes came for {self._vocab_size} tokens"))
            return
        output = array("i", job.output_token_ids)
        grammar = HostedGrammar(
            held.host, message.slot, job.eos_token_ids, allowed, job, output, has_ended=message.has_ended
        )
        held.host.opened(grammar, message.slot)
        job.deliver(grammar)

    def _receive_from_server(self) -> None:
        message = None if self._server is None else self._server.receive()
        self.is_starting = False
        if isinstance(message, Ready):
            return
        if isinstance(message, Exited):
            held = self._by_number.pop(message.process, None)
            if held is not None:
                self._ended(held, message.status)
            return
        if isinstance(message, Broken):
            log.error("grammars cannot be compiled: %s", message.reason)
            self._give_up(InternalError("the grammar could not be compiled; the worker's log has the details"))
        else:
            log.warning("the fork server of grammars has ended; the next grammar starts another")
            self._give_up(GrammarUnavailable(f"the process that compiles {FIELD} has ended"))
        self._stop_server()

    def _ended(self, held: HeldGrammar, status: int) -> None:
        """End the pending jobs of an ended process."""
        self._drop(held)
        self._release(held)
        limits, slot = self._limits, int(held.process.progress[0])
        reason = f"{FIELD} could not be compiled within {limits.compile_s:g} s of CPU time and {limits.memory_mib} MiB"
        killed = GrammarUnavailable(f"the process that compiled {FIELD} was killed")
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        for job in held.waiting:
            job.deliver(killed if is_killed else InvalidRequest(reason, FIELD))
        for opening, job in held.opening.items():
            if held.host.ended_by_draft:
                self._jobs.add(replace(job, may_draft=False))
                continue
            reason = f"{FIELD} takes too long to be matched against the output that the request begins with"
            lost = GrammarUnavailable(f"the process that held the grammar of {FIELD} has ended")
            job.deliver(InvalidRequest(reason, FIELD) if opening == slot else lost)
        if held.waiting or held.opening or not held.host.is_idle:
            log.warning("a process that held a grammar has ended with status %d", os.waitstatus_to_exitcode(status))

    # ---- deadlines and limits

    def _look_after(self) -> None:
        now = clock.monotonic()
        if self.is_starting and self._server is not None and now >= self._start_until:
            # on a starved machine it needs longer than any request waits; started again, it would never be ready
            ticks = self._server.processor_ticks()
            if ticks > self._start_ticks:
                self._start_until, self._start_ticks = now + START_S, ticks
            else:
                log.error("the fork server of grammars made no progress within %g s", START_S)
                self._give_up(
                    GrammarUnavailable(f"the process that compiles {FIELD} made no progress for {START_S:g} s")
                )
                self._stop_server()
        for held in list(self._by_number.values()):
            if held.is_compiled:
                continue
            is_overdue = now >= held.overdue_at
            if is_overdue:
                reason = f"{FIELD} was not compiled within {self._wait_s:g} s, for lack of CPU time"
                held.fail(GrammarUnavailable(reason))
            is_wanted = held.is_late or any(job.is_wanted() for job in held.waiting)
            if is_overdue and not held.is_late:
                held.is_late, held.overdue_at = True, now + self._wait_s
            elif is_overdue or not is_wanted:
                self._drop(held)
                if self._server is not None:
                    self._server.kill(held.process.number)
        num_idle = sum(held.is_idle for held in self._held.values())
        if num_idle > MAX_IDLE_PROCESSES:
            self._end_idle(num_idle - MAX_IDLE_PROCESSES)

    def _end_idle(self, count: int) -> bool:
        """End `count` processes without sequences, the least recently used first. False if there are too few."""
        idle = [held for held in self._held.values() if held.is_idle][:count]
        for held in idle:
            self._drop(held)
            del self._by_number[held.process.number]
            self._release(held)
        return bool(idle)

    def _drop(self, held: HeldGrammar) -> None:
        """Stop assigning jobs to a process."""
        if self._held.get(held.key) is held:
            del self._held[held.key]

    def _release(self, held: HeldGrammar) -> None:
        """Close the sockets of a process that has ended or is to end."""
        with contextlib.suppress(KeyError, ValueError):  # its end was read before
            self._selector.unregister(held.process.control)
        held.process.control.close()
        held.host.process_ended(engine_ended=self._is_closing)

    def _give_up(self, error: PdServeError) -> None:
        """End all jobs with an error."""
        for held in self._by_number.values():
            held.fail(error)
        for job in self._jobs.take_all():
            if job.is_wanted():
                job.deliver(error)

    def _stop_server(self) -> None:
        server, self._server = self._server, None
        self.is_starting = False
        if server is None:
            return
        self._selector.unregister(server)
        for held in self._by_number.values():
            self._release(held)
        self._held.clear()
        self._by_number.clear()
        server.close()


def _error(reason: str, is_clients_fault: bool) -> PdServeError:
    return InvalidRequest(reason, FIELD) if is_clients_fault else InternalError(reason)
