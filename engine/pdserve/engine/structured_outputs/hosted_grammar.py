"""`HostedGrammar`: one sequence's state in a grammar whose process is another one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdserve.common.errors import GrammarUnavailable, InternalError, InvalidRequest, PdServeError
from pdserve.common.request.structured_outputs import FIELD
from pdserve.engine.structured_outputs.grammar import Deliver, Grammar, GrammarJob
from pdserve.engine.structured_outputs.grammar_messages import (
    NO_DRAFT,
    GrammarLimits,
    Operation,
    Outcome,
    request_too_slow,
    token_too_slow,
)

if TYPE_CHECKING:
    from pdserve.engine.structured_outputs.grammar_host import GrammarHost

PROMPT_US = 5_000
"""Longest time for a sequence's last token, seconds, with which it is scheduled before its next mask has arrived."""
NUM_PATIENT = 32
"""Number of tokens after a late mask for which the sequence is scheduled only after its mask has arrived, and has no drafts."""


@dataclass(eq=False)
class HostedGrammar:
    """A `Grammar` in another process, which computes the next mask while the model computes."""

    _host: GrammarHost
    _slot: int
    _eos_token_ids: tuple[int, ...]
    _allowed: NDArray[np.uint8] | None
    request: GrammarJob
    """The job of its request, which all sequences of the request have."""
    _output: array[int]
    """Tokens that the grammar has accepted, from the beginning of the text."""
    has_ended: bool = False
    failure: PdServeError | None = field(default=None, init=False)
    is_closed: bool = field(default=False, init=False)
    _num_patient: int = field(default=0, init=False)
    """Number of further tokens for which no step waits for this sequence."""
    _drafts: list[int] = field(default_factory=list, init=False)
    """Drafts that the process has, without confirmed ones."""
    _draft_masks: list[NDArray[np.uint8]] = field(default_factory=list, init=False)
    """The masks after them that have arrived."""
    _num_confirmed: int = field(default=0, init=False)
    """Drafts that have become tokens and have not been sent to the process."""
    _list_number: int = field(default=NO_DRAFT, init=False)
    """Number of the last list of drafts."""
    _has_list: bool = field(default=False, init=False)
    """True if the process is ahead by a list of drafts."""
    is_lost: bool = field(default=False, init=False)
    """True if a draft has ended the process, and no other one has the sequence yet."""

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
        self._output.append(token_id)
        if self._draft_masks and self._drafts[0] == token_id:
            del self._drafts[0]
            self._allowed = self._draft_masks.pop(0)
            self._num_confirmed += 1
            return True
        self._allowed = None
        self._end_drafts()
        if self.is_lost:
            self._open_again()
        else:
            self._host.ask(Operation.ACCEPT, self._slot, token_id)
        return True

    def draft(self, token_ids: Sequence[int]) -> None:
        self._end_drafts()
        if self.is_lost or not self._host.takes_drafts:
            return
        if self._num_patient or self.has_ended or self.failure is not None or not token_ids:
            return
        self._drafts, self._has_list = list(token_ids), True
        self._list_number += 1
        for token_id in token_ids:
            self._host.ask(Operation.DRAFT, self._slot, token_id, self._list_number)

    def _end_drafts(self) -> None:
        """Have the process keep only the confirmed drafts; late records of the others are dropped."""
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
            _output=self._output[:],
            has_ended=self.has_ended,
        )
        other.failure, other.is_lost = self.failure, self.is_lost
        self._host.add(other, other._slot)
        if not self.is_lost:
            self._host.ask(Operation.FORK, other._slot, self._slot)
        return other

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._host.remove(self._slot)

    def lose_process(self) -> None:
        """Continue with the masks that are known, and then in another process, to which the accepted tokens are given."""
        self.is_lost, self._has_list = True, False
        del self._drafts[len(self._draft_masks) :]
        if self._allowed is None:
            self._open_again()

    def _open_again(self) -> None:
        self._num_patient = NUM_PATIENT
        self._host.open_again(self)

    def job_again(self, deliver: Deliver) -> GrammarJob:
        """The job that opens this sequence in another process."""
        return replace(
            self.request,
            output_token_ids=tuple(self._output),
            is_wanted=lambda: not self.is_closed,
            begins=lambda: None,
            deliver=deliver,
            may_draft=False,
        )

    def opened_again(self, result: Grammar | PdServeError) -> None:
        """Take the place of this sequence's state in another process; an error allows another worker to be tried."""
        if not isinstance(result, HostedGrammar) or result.failure is not None:
            self.failure = GrammarUnavailable(f"the process that held the grammar of {FIELD} has ended")
            return
        self._host.remove(self._slot)
        self._host, self._slot, self.is_lost = result._host, result._slot, False
        self._allowed, self.has_ended = result._allowed, result.has_ended
        self._host.add(self, self._slot)

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
