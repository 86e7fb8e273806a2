"""`GrammarHost`: the engine thread's interface to a grammar's process; `GrammarHosts`: to all of them."""

from __future__ import annotations

import itertools
import queue
import select
import socket
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pdserve.common import clock
from pdserve.common.errors import GrammarUnavailable, InvalidRequest, PdServeError
from pdserve.common.request.structured_outputs import FIELD
from pdserve.engine.structured_outputs.grammar import Grammar, GrammarJob
from pdserve.engine.structured_outputs.grammar_messages import (
    MAX_PACKET_BYTES,
    NO_DRAFT,
    WAIT_FACTOR,
    GrammarLimits,
    Operation,
    Outcome,
    record_dtype,
)
from pdserve.engine.structured_outputs.hosted_grammar import HostedGrammar

_OUTCOMES = frozenset(map(int, Outcome))
_MAX_OPERATIONS = 4096
"""Limit of operations in one packet."""


class GrammarHost:
    """One grammar's process. The compiler's thread opens sequences in it; the engine thread makes all other calls."""

    def __init__(
        self,
        steps: socket.socket,
        progress: NDArray[np.int32],
        vocab_size: int,
        limits: GrammarLimits,
        hosts: GrammarHosts,
    ) -> None:
        steps.setblocking(False)
        self._steps = steps
        self._poll = select.poll()
        self._poll.register(steps, select.POLLIN)
        self._progress = progress
        self._limits = limits
        self._hosts = hosts
        self._record_dtype = record_dtype(vocab_size)
        self._slots = itertools.count()
        self._grammars: dict[int, HostedGrammar] = {}
        self._known: set[int] = set()
        """Slots that are open in the process."""
        self._operations: list[tuple[int, int, int]] = []
        self._awaited: dict[int, deque[int]] = {}
        """Slot -> outstanding records in their order: the number of the list of drafts, `NO_DRAFT` for a token."""
        self.is_lost = False
        self._has_ended = False
        self.takes_drafts = True
        """False where a draft has ended an earlier process of this grammar."""

    def fileno(self) -> int:
        return self._steps.fileno()

    @property
    def is_idle(self) -> bool:
        """Any thread may call it."""
        return not self._grammars

    @property
    def is_awaited(self) -> bool:
        """True if a record is outstanding."""
        return bool(self._awaited) and not self.is_lost

    def new_slot(self) -> int:
        """Any thread may call it."""
        return next(self._slots)

    def opened(self, grammar: HostedGrammar, slot: int) -> None:
        """Note that the process has opened the sequence. Called by the compiler's thread."""
        self._known.add(slot)
        self._grammars[slot] = grammar

    def add(self, grammar: HostedGrammar, slot: int) -> None:
        """Add a forked sequence, or one that another process had."""
        self._grammars[slot] = grammar

    def remove(self, slot: int) -> None:
        """Free the slot of an ended sequence."""
        self._awaited.pop(slot, None)
        self._operations = [asked for asked in self._operations if asked[1] != slot]
        if slot in self._known and not self.is_lost:
            self._known.discard(slot)
            self.ask(Operation.CLOSE, slot, 0)
        self._grammars.pop(slot, None)
        if self._has_ended and not self._grammars:
            self.is_lost = True
            self._steps.close()

    def awaits(self, slot: int) -> bool:
        """True if the record of this slot is outstanding."""
        return slot in self._awaited and not self.is_lost

    def ask(self, operation: Operation, slot: int, value: int, list_number: int = NO_DRAFT) -> None:
        """Queue an operation for the next `flush`. list_number: of a draft."""
        self._operations.append((operation, slot, value))
        if operation in (Operation.ACCEPT, Operation.DRAFT):
            self._awaited.setdefault(slot, deque()).append(list_number)
        self._hosts.was_asked(self)

    def flush(self) -> None:
        """Send the queued operations."""
        operations, self._operations = self._operations, []
        for begin in range(0, len(operations), _MAX_OPERATIONS):
            part = operations[begin : begin + _MAX_OPERATIONS]
            self._known.update(slot for operation, slot, _ in part if operation == Operation.FORK)
            try:
                self._steps.send(np.array(part, np.int32).tobytes())
            except OSError:
                self._lose()
                return

    def receive(self, until: float, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Receive arrived records, and wait for more until `until`, unless `is_enough` returns true."""
        while not self.is_lost:
            try:
                packet = self._steps.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                left_s = until - clock.monotonic()
                if left_s <= 0 or is_enough():
                    return
                self._poll.poll(left_s * 1e3)
                continue
            except OSError:
                packet = b""
            if not packet or len(packet) % self._record_dtype.itemsize:
                self._lose()
                return
            for record in np.frombuffer(packet, self._record_dtype):
                self._took(record)

    def _took(self, record: np.void) -> None:
        slot, outcome = int(record["slot"]), int(record["outcome"])
        awaited, grammar = self._awaited.get(slot), self._grammars.get(slot)
        list_number = awaited.popleft() if awaited else NO_DRAFT
        if not awaited:
            self._awaited.pop(slot, None)
        if grammar is None:
            return
        known = Outcome(outcome) if outcome in _OUTCOMES else Outcome.REFUSED
        if list_number == NO_DRAFT:
            grammar.took(known, int(record["spent_us"]), self._limits, record["allowed"])
        else:
            grammar.took_draft(list_number, known, int(record["spent_us"]), record["allowed"])

    @property
    def ended_by_draft(self) -> bool:
        """True if the process has ended while it matched a draft. Any thread may call it, after that end."""
        return bool(self._progress[1])

    def open_again(self, grammar: HostedGrammar) -> None:
        """Open a sequence of this ended process in another one."""
        self._hosts.open_again(grammar, clock.monotonic() + 2 * WAIT_FACTOR * self._limits.compile_s)

    def _lose(self) -> None:
        """Fail all sequences after the process has ended: the one that it last worked for with its error, others as retryable.

        A draft is no token of its text, so one that ends the process fails none: all sequences continue in another process.
        """
        self.is_lost = True
        self._steps.close()
        slot = int(self._progress[0])
        culprit = self._grammars.get(slot) if slot in self._awaited else None
        for grammar in list(self._grammars.values()):
            if grammar.has_ended or grammar.failure is not None or grammar.is_lost:
                continue
            if self.ended_by_draft:
                grammar.lose_process()
            elif culprit is not None and grammar.request is culprit.request:
                grammar.failure = InvalidRequest(
                    f"{FIELD} takes too long to be matched, or too much memory: more than {self._limits.kill_s:g} s of "
                    f"CPU time for one token, or {self._limits.memory_mib} MiB",
                    FIELD,
                )
            else:
                grammar.failure = GrammarUnavailable(f"the process that held the grammar of {FIELD} has ended")

    def process_ended(self, *, engine_ended: bool = False) -> None:
        """Close the socket as soon as no sequence is left. The compiler's thread calls this after the process ended or became
        unused.

        engine_ended: True to close although sequences are left, since no step follows.
        """
        self._has_ended = True
        if engine_ended or not self._grammars:
            self.is_lost = True
            self._steps.close()


class GrammarHosts:
    """All grammar processes, for the steps of the engine thread."""

    def __init__(self, submit: Callable[[GrammarJob], None] = lambda job: None) -> None:
        """submit: gives a job to the compiler."""
        self._submit = submit
        self._asked: set[GrammarHost] = set()
        self._awaited: set[GrammarHost] = set()
        self._opening: dict[HostedGrammar, float] = {}
        """Sequences that are opened in another process -> `clock.monotonic()` seconds by which that must be done."""
        self._opened: queue.SimpleQueue[tuple[HostedGrammar, Grammar | PdServeError]] = queue.SimpleQueue()

    def was_asked(self, host: GrammarHost) -> None:
        """Note that a host has an operation which `flush` must send."""
        self._asked.add(host)

    def open_again(self, grammar: HostedGrammar, until: float) -> None:
        """Open a sequence whose process has ended in another one."""
        self._opening[grammar] = until
        self._submit(grammar.job_again(lambda result: self._opened.put((grammar, result))))

    def flush(self) -> None:
        """Send the operations of the step's tokens."""
        asked, self._asked = self._asked, set()
        for host in asked:
            host.flush()
        self._awaited |= asked

    def receive(self) -> None:
        """Receive arrived records, and sequences that were opened again."""
        for host in self._awaited:
            host.receive(0.0)
        self._awaited = {host for host in self._awaited if host.is_awaited}
        if self._opening or not self._opened.empty():
            self._take_opened(clock.monotonic())

    def _take_opened(self, now: float) -> None:
        while not self._opened.empty():
            grammar, result = self._opened.get()
            if self._opening.pop(grammar, None) is not None and not grammar.is_closed:
                grammar.opened_again(result)
            elif not isinstance(result, PdServeError):
                result.close()
        for grammar, until in list(self._opening.items()):
            if grammar.is_closed:
                del self._opening[grammar]
            elif now >= until:
                del self._opening[grammar]
                grammar.opened_again(GrammarUnavailable(f"the process that holds the grammar of {FIELD} is late"))

    def wait(self, timeout_s: float) -> None:
        """Wait until a record arrives. Returns at once if nothing is outstanding."""
        descriptors = [host.fileno() for host in self._awaited if host.is_awaited]
        if descriptors or self._opening:
            poll = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1e3)
