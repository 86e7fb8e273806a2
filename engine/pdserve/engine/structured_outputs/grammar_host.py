"""`GrammarHost`: the engine thread's interface to a grammar's process; `HostedGrammar`: one sequence in it."""

from __future__ import annotations

import itertools
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdserve.common.errors import InternalError, InvalidRequest, Overloaded, PdServeError
from pdserve.common.request.structured_outputs import FIELD
from pdserve.engine.structured_outputs.grammar_messages import (
    MAX_PACKET_BYTES,
    GrammarLimits,
    Operation,
    Outcome,
    record_dtype,
    request_too_slow,
    token_too_slow,
)

PROMPT_US = 5_000
"""Longest time for a sequence's last token, seconds, with which it is scheduled before its next mask has arrived."""
NUM_PATIENT = 32
"""Number of tokens after a late mask for which the sequence is scheduled only after its mask has arrived, and has no drafts."""
_NO_DRAFT = 0
"""In place of the number of a list of drafts: the record of a token."""
_OUTCOMES = frozenset(map(int, Outcome))
_MAX_OPERATIONS = 4096
"""Limit of operations in one packet."""


@dataclass(eq=False)
class HostedGrammar:
    """A `Grammar` in another process, which computes the next mask while the model computes."""

    _host: GrammarHost
    _slot: int
    _eos_token_ids: tuple[int, ...]
    _allowed: NDArray[np.uint8] | None
    request: object
    """An object that identifies the request of the sequence."""
    has_ended: bool = False
    failure: PdServeError | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)
    _num_patient: int = field(default=0, init=False)
    """Number of further tokens for which no step waits for this sequence."""
    _drafts: list[int] = field(default_factory=list, init=False)
    """Drafts that the process has, without confirmed ones."""
    _draft_masks: list[NDArray[np.uint8]] = field(default_factory=list, init=False)
    """The masks behind them, as far as they have arrived."""
    _num_confirmed: int = field(default=0, init=False)
    """Drafts that have become tokens, which the process has not been told."""
    _list_number: int = field(default=_NO_DRAFT, init=False)
    """Number of the last list of drafts."""
    _has_list: bool = field(default=False, init=False)
    """True if the process is ahead by a list of drafts."""

    @property
    def is_prompt(self) -> bool:
        return self._num_patient == 0 or self._allowed is not None

    def accept(self, token_id: int) -> bool:
        if self.has_ended or self.failure is not None or self._allowed is None:
            return False
        if not 0 <= token_id < 8 * len(self._allowed) or not self._allowed[token_id >> 3] >> (token_id & 7) & 1:
            return False
        if token_id in self._eos_token_ids:
            self.has_ended = True
            return True
        if self._draft_masks and self._drafts[0] == token_id:
            del self._drafts[0]
            self._allowed = self._draft_masks.pop(0)
            self._num_confirmed += 1
            return True
        self._allowed = None
        self._end_drafts()
        self._host.ask(Operation.ACCEPT, self._slot, token_id)
        return True

    def draft(self, token_ids: Sequence[int]) -> None:
        self._end_drafts()
        if self._num_patient or self.has_ended or self.failure is not None or not token_ids:
            return
        self._drafts, self._has_list = list(token_ids), True
        self._list_number += 1
        for token_id in token_ids:
            self._host.ask(Operation.DRAFT, self._slot, token_id, self._list_number)

    def _end_drafts(self) -> None:
        """Have the process keep the confirmed drafts alone; late records of the others are dropped."""
        if self._has_list:
            self._host.ask(Operation.CONFIRM, self._slot, self._num_confirmed)
        self._drafts, self._draft_masks = [], []
        self._num_confirmed, self._has_list = 0, False

    @property
    def num_drafts(self) -> int:
        return len(self._drafts if self._num_patient == 0 else self._draft_masks)

    def allowed(self, until: float, num_drafts: int = 0) -> NDArray[np.uint8] | None:
        if num_drafts:
            return self._allowed_behind(until, num_drafts)
        if self._allowed is None and self._host.awaits(self._slot):
            self._host.receive(until, lambda: self._allowed is not None or self.failure is not None)
            if self._allowed is None:
                self._num_patient = NUM_PATIENT
        return self._allowed

    def _allowed_behind(self, until: float, num_drafts: int) -> NDArray[np.uint8] | None:
        def is_known() -> bool:
            return len(self._draft_masks) >= num_drafts or len(self._drafts) < num_drafts or self.failure is not None

        if not is_known() and self._host.awaits(self._slot):
            self._host.receive(until, is_known)
            if not is_known():
                self._num_patient = NUM_PATIENT
        return self._draft_masks[num_drafts - 1] if num_drafts <= len(self._draft_masks) else None

    def fork(self) -> HostedGrammar:
        if self._allowed is None and self.failure is None:
            raise RuntimeError("a sequence forks while its grammar is behind")
        self._end_drafts()
        other = HostedGrammar(
            self._host,
            self._host.new_slot(),
            self._eos_token_ids,
            self._allowed,
            request=self.request,
            has_ended=self.has_ended,
        )
        other.failure = self.failure
        self._host.add(other, other._slot)
        self._host.ask(Operation.FORK, other._slot, self._slot)
        return other

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._host.remove(self._slot)

    def took_draft(self, list_number: int, outcome: Outcome, spent_us: int, allowed: NDArray[np.uint8]) -> None:
        """Apply the record of a draft of this list."""
        if spent_us > PROMPT_US:
            self._num_patient = max(self._num_patient, 1)
        if list_number != self._list_number or not self._has_list or len(self._draft_masks) == len(self._drafts):
            return
        if outcome is Outcome.ACCEPTED:
            self._draft_masks.append(allowed)
        else:
            del self._drafts[len(self._draft_masks) :]

    def took(self, outcome: Outcome, spent_us: int, limits: GrammarLimits, allowed: NDArray[np.uint8]) -> None:
        """Apply the record of the sequence's last token."""
        self._num_patient = max(self._num_patient - 1, int(spent_us > PROMPT_US))
        match outcome:
            case Outcome.ACCEPTED:
                self._allowed = allowed
            case Outcome.ENDED:
                self.has_ended = True
            case Outcome.REFUSED:
                self.failure = InternalError("a token was sampled that does not fit the request's grammar")
            case Outcome.TOKEN_TOO_SLOW:
                self.failure = InvalidRequest(token_too_slow(spent_us / 1e6, limits), FIELD)
            case Outcome.REQUEST_TOO_SLOW:
                self.failure = InvalidRequest(request_too_slow(limits), FIELD)


class GrammarHost:
    """One grammar's process. The compiler's thread opens sequences in it; the engine thread makes all other calls."""

    def __init__(
        self,
        steps: socket.socket,
        progress: NDArray[np.int32],
        vocab_size: int,
        limits: GrammarLimits,
        on_asked: Callable[[GrammarHost], None],
    ) -> None:
        """on_asked: called for each operation that `flush` must send."""
        steps.setblocking(False)
        self._steps = steps
        self._poll = select.poll()
        self._poll.register(steps, select.POLLIN)
        self._progress = progress
        self._limits = limits
        self._on_asked = on_asked
        self._record_dtype = record_dtype(vocab_size)
        self._slots = itertools.count()
        self._grammars: dict[int, HostedGrammar] = {}
        self._known: set[int] = set()
        """Slots that are open in the process."""
        self._operations: list[tuple[int, int, int]] = []
        self._awaited: dict[int, deque[int]] = {}
        """Slot -> outstanding records in their order: the number of the list of drafts, `_NO_DRAFT` for a token."""
        self.is_lost = False
        self._has_ended = False

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
        """Add a forked sequence."""
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

    def ask(self, operation: Operation, slot: int, value: int, list_number: int = _NO_DRAFT) -> None:
        """Queue an operation for the next `flush`. list_number: of a draft."""
        self._operations.append((operation, slot, value))
        if operation in (Operation.ACCEPT, Operation.DRAFT):
            self._awaited.setdefault(slot, deque()).append(list_number)
        self._on_asked(self)

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
                left_s = until - time.monotonic()
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
        list_number = awaited.popleft() if awaited else _NO_DRAFT
        if not awaited:
            self._awaited.pop(slot, None)
        if grammar is None:
            return
        known = Outcome(outcome) if outcome in _OUTCOMES else Outcome.REFUSED
        if list_number == _NO_DRAFT:
            grammar.took(known, int(record["spent_us"]), self._limits, record["allowed"])
        else:
            grammar.took_draft(list_number, known, int(record["spent_us"]), record["allowed"])

    def _lose(self) -> None:
        """Fail all sequences after the process has ended: the one that it last worked for with its error, others as retryable."""
        self.is_lost = True
        self._steps.close()
        slot = int(self._progress[0])
        culprit = self._grammars.get(slot) if slot in self._awaited else None
        for grammar in list(self._grammars.values()):
            if grammar.has_ended or grammar.failure is not None:
                continue
            if culprit is not None and grammar.request is culprit.request:
                grammar.failure = InvalidRequest(
                    f"{FIELD} takes too long to be matched, or too much memory: more than {self._limits.kill_s:g} s of "
                    f"processor time for one token, or {self._limits.memory_mib} MiB",
                    FIELD,
                )
            else:
                grammar.failure = Overloaded(f"the process that held the grammar of {FIELD} has ended")

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

    def __init__(self) -> None:
        self._asked: set[GrammarHost] = set()
        self._awaited: set[GrammarHost] = set()

    def was_asked(self, host: GrammarHost) -> None:
        """`GrammarHost.on_asked`"""
        self._asked.add(host)

    def flush(self) -> None:
        """Send the operations of the step's tokens."""
        asked, self._asked = self._asked, set()
        for host in asked:
            host.flush()
        self._awaited |= asked

    def receive(self) -> None:
        """Receive arrived records."""
        for host in self._awaited:
            host.receive(0.0)
        self._awaited = {host for host in self._awaited if host.is_awaited}

    def wait(self, timeout_s: float) -> None:
        """Wait until a record arrives. Returns at once if none is outstanding."""
        descriptors = [host.fileno() for host in self._awaited if host.is_awaited]
        if descriptors:
            poll = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1e3)
