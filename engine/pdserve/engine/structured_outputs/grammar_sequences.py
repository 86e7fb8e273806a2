"""`GrammarSequences`: the sequences of one grammar, in the grammar's process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray

from pdserve.common import clock
from pdserve.common.errors import PdServeError
from pdserve.engine.structured_outputs.grammar_matcher import GrammarMatcher
from pdserve.engine.structured_outputs.grammar_messages import (
    MAX_PACKET_BYTES,
    GrammarLimits,
    Open,
    Opened,
    Operation,
    Outcome,
    decode,
    encode,
    operations,
    record_dtype,
    request_too_slow,
    token_too_slow,
)

_IDLE_AFTER_S = 0.02
"""Seconds for one token after which the process runs only on otherwise idle processors."""
_FLUSH_AFTER_S = 0.001
"""Seconds after which computed records are sent; faster records of one packet are sent together."""


@dataclass(frozen=True, slots=True)
class WorkerEnds:
    """Sockets and memory shared with the worker."""

    control: socket.socket
    steps: socket.socket
    progress: NDArray[np.int32]
    """See `map_progress`."""


@dataclass(slots=True)
class _Budget:
    """CPU time used by all sequences of a request."""

    spent_s: float = 0.0
    first_mask_s: float = 0.0
    num_tokens: int = 0
    drafts_s: float = 0.0
    """Spent on drafts that were not confirmed: it ends drafting, never the request."""

    def is_overrun(self, limits: GrammarLimits) -> bool:
        return self.spent_s > self._limit_s(limits)

    def allows_drafts(self, limits: GrammarLimits) -> bool:
        return self.drafts_s <= self._limit_s(limits)

    def _limit_s(self, limits: GrammarLimits) -> float:
        return limits.request_s + limits.per_token_s * self.num_tokens


@dataclass(slots=True)
class _Sequence:
    grammar: GrammarMatcher
    """After the drafts."""
    budget: _Budget
    drafts_s: list[float] = field(default_factory=list)
    """Seconds of each draft that the grammar has advanced by since the last confirmed token."""
    takes_drafts: bool = True
    """False after a draft that has no mask."""

    def confirm(self, num_drafts: int) -> None:
        """Keep the first drafts as tokens of the sequence, and roll the others back."""
        spent_s = sum(self.drafts_s[:num_drafts])
        self.grammar.rollback(len(self.drafts_s) - num_drafts)
        self.budget.drafts_s -= spent_s
        self.budget.spent_s += spent_s
        self.budget.num_tokens += num_drafts
        self.drafts_s.clear()
        self.takes_drafts = True


class GrammarSequences:
    """Sequences by slot, a number chosen by the worker."""

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        vocab_size: int,
        limits: GrammarLimits,
        worker: WorkerEnds,
    ) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._limits = limits
        self._control = worker.control
        self._steps = worker.steps
        self._progress = worker.progress
        self._record_dtype = record_dtype(vocab_size)
        self._max_records = max(1, MAX_PACKET_BYTES // self._record_dtype.itemsize)
        self._unsent: deque[bytes] = deque()
        self._sequences: dict[int, _Sequence] = {}
        self._runs_idle = False

    # ---- opening

    def open(self) -> bool:
        """Handle one message of the control socket. False if the worker has ended."""
        packet = self._control.recv(MAX_PACKET_BYTES)
        if not packet:
            return False
        message: Open = decode(packet, Open)
        sequence = self._sequences.get(message.slot)
        if sequence is None:
            grammar = GrammarMatcher(self._compiled, message.eos_token_ids, self._vocab_size)
            sequence = self._sequences[message.slot] = _Sequence(grammar, _Budget())
        try:
            allowed = self._replay(sequence, message)
        except PdServeError as error:
            del self._sequences[message.slot]
            answer = Opened(message.slot, b"", error=str(error), is_clients_fault=False)
        else:
            if not message.is_last:
                return True
            answer = Opened(message.slot, allowed, has_ended=sequence.grammar.has_ended)
            if (reason := self._too_slow(sequence.budget)) is not None:
                del self._sequences[message.slot]
                answer = Opened(message.slot, b"", error=reason)
        self._control.send(encode(answer))
        return True

    def _replay(self, sequence: _Sequence, message: Open) -> bytes:
        """Accept existing output; returns the mask of the next token, b"" if more output follows.

        Raises: PeerError for a token that does not fit.
        """
        tokens = np.frombuffer(message.output_token_ids, np.int32).tolist()
        budget, limits = sequence.budget, self._limits
        budget.num_tokens += len(tokens)
        left_s = limits.request_s + limits.per_token_s * budget.num_tokens - budget.spent_s
        started = time.thread_time()
        self._progress[0] = message.slot
        signal.setitimer(signal.ITIMER_PROF, max(left_s, 0.0) + limits.kill_s)
        try:
            sequence.grammar.replay(tokens)
            replayed = time.thread_time()
            if message.is_last and not sequence.grammar.has_ended:
                allowed = sequence.grammar.mask().tobytes()
                budget.first_mask_s = time.thread_time() - replayed
                return allowed
            return b""
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            budget.spent_s += time.thread_time() - started
            self._yield_processors(time.thread_time() - started)

    def _too_slow(self, budget: _Budget) -> str | None:
        """Error text for the client if a sequence exceeds its budget before its first new token; None otherwise."""
        if budget.first_mask_s > self._limits.token_s:
            return token_too_slow(budget.first_mask_s, self._limits)
        if budget.is_overrun(self._limits):
            return f"{request_too_slow(self._limits)}; it begins with {budget.num_tokens} tokens of output"
        return None

    # ---- tokens

    def go_on(self) -> bool:
        """Handle one packet of the steps socket. False if the worker has ended."""
        packet = self._steps.recv(MAX_PACKET_BYTES)
        if not packet:
            return False
        records = np.zeros(self._max_records, self._record_dtype)
        num_records, begun_at = 0, clock.monotonic()
        for operation, slot, value in operations(packet).tolist():
            if operation == Operation.CLOSE:
                self._sequences.pop(slot, None)
            elif operation == Operation.FORK:
                begins_as = self._sequences.get(value)
                if begins_as is not None:
                    self._sequences[slot] = _Sequence(begins_as.grammar.fork(), begins_as.budget)
            elif operation == Operation.CONFIRM:
                if (confirmed := self._sequences.get(slot)) is not None:
                    confirmed.confirm(value)
            elif (sequence := self._sequences.get(slot)) is not None:
                if num_records == self._max_records or (num_records and clock.monotonic() > begun_at + _FLUSH_AFTER_S):
                    self._send(records[:num_records].tobytes())
                    num_records, begun_at = 0, clock.monotonic()
                take = self._draft if operation == Operation.DRAFT else self._accept
                take(sequence, slot, value, records[num_records : num_records + 1])
                num_records += 1
        signal.setitimer(signal.ITIMER_PROF, 0)
        if num_records:
            self._send(records[:num_records].tobytes())
        return True

    def _send(self, packet: bytes) -> None:
        self._unsent.append(packet)
        self.send_more()

    @property
    def has_unsent(self) -> bool:
        """True if records wait for space in the socket; the worker reads when a step needs them."""
        return bool(self._unsent)

    def send_more(self) -> None:
        """Send as much as the socket accepts. Raises: OSError if the worker has ended."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._steps.send(self._unsent[0], socket.MSG_DONTWAIT)
                self._unsent.popleft()

    def _accept(self, sequence: _Sequence, slot: int, token_id: int, record: NDArray[Any]) -> None:
        """Advance by one token and write its record."""
        started = time.thread_time()
        self._progress[0] = slot
        signal.setitimer(signal.ITIMER_PROF, self._limits.kill_s)
        grammar, budget = sequence.grammar, sequence.budget
        outcome = Outcome.REFUSED
        if grammar.accept(token_id):
            outcome = Outcome.ENDED if grammar.has_ended else Outcome.ACCEPTED
            if outcome is Outcome.ACCEPTED:
                record["allowed"][0] = grammar.mask()
        spent_s = time.thread_time() - started
        budget.spent_s += spent_s
        budget.num_tokens += 1
        if spent_s > self._limits.token_s:
            outcome = Outcome.TOKEN_TOO_SLOW
        elif budget.is_overrun(self._limits):
            outcome = Outcome.REQUEST_TOO_SLOW
        self._yield_processors(spent_s)
        record["slot"], record["outcome"], record["spent_us"] = slot, outcome, min(int(spent_s * 1e6), 2**31 - 1)

    def _draft(self, sequence: _Sequence, slot: int, token_id: int, record: NDArray[Any]) -> None:
        """Advance by one draft, if its time allows that, and write its record."""
        record["slot"], record["outcome"], record["spent_us"] = slot, Outcome.REFUSED, 0
        grammar, budget = sequence.grammar, sequence.budget
        if not sequence.takes_drafts or not budget.allows_drafts(self._limits):
            return
        started = time.thread_time()
        self._progress[:] = slot, 1
        signal.setitimer(signal.ITIMER_PROF, self._limits.kill_s)
        is_allowed = grammar.advance(token_id)
        # nothing is computed after the end of a text
        if has_mask := is_allowed and not grammar.has_ended:
            record["allowed"][0] = grammar.mask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._progress[1] = 0
        spent_s = time.thread_time() - started
        if is_allowed and (not has_mask or spent_s > self._limits.token_s):
            grammar.rollback(1)
            has_mask = False
        budget.drafts_s += spent_s
        sequence.takes_drafts = has_mask
        if has_mask:
            sequence.drafts_s.append(spent_s)
            record["outcome"] = Outcome.ACCEPTED
        self._yield_processors(spent_s)
        record["spent_us"] = min(int(spent_s * 1e6), 2**31 - 1)

    def _yield_processors(self, spent_s: float) -> None:
        """Lower the priority of this process for good if its grammar is slow."""
        if spent_s > _IDLE_AFTER_S and not self._runs_idle:
            self._runs_idle = True
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
