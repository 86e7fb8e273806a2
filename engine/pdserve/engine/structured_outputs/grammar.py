"""`Grammar`: one sequence's state in its grammar; `GrammarJob`: one request for a compiled grammar; `JobQueue`: their order."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.common.errors import PdServeError
from pdserve.common.request.structured_outputs import StructuredOutputsParams


class Grammar(Protocol):
    """One sequence's state in its grammar. Only the engine thread calls it."""

    @property
    def has_ended(self) -> bool:
        """True if no token can follow. Without EOS tokens this may become true a step after the last token."""

    @property
    def failure(self) -> PdServeError | None:
        """The error that ends the sequence, None if there is none: its grammar exceeded its budget, or its process ended."""

    @property
    def is_prompt(self) -> bool:
        """True if the next mask has arrived, or the last one was fast enough that a step may wait for the next."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token. False, with nothing changed, if the token is not allowed."""

    def allowed(self, until: float, num_drafts: int = 0) -> NDArray[np.uint8] | None:
        """Mask of the next token: `[W]` bytes, one bit per token, lowest bit first; the caller must not change it.

        until: `clock.monotonic()` seconds. num_drafts: the mask is that of the token after this many drafts. None if it has not
        arrived by then, or if a draft before it is not allowed or ends the text.
        """

    def draft(self, token_ids: Sequence[int]) -> None:
        """Request the masks after each of these tokens, which may follow the last one. They replace earlier drafts."""

    @property
    def num_drafts(self) -> int:
        """Number of drafts, from the first, that a step may compute: without those that are known not to be allowed."""

    def fork(self) -> Grammar:
        """A copy of the current state, for another sequence."""

    def close(self) -> None:
        """Free the state after the sequence has ended. May be called again."""


Deliver = Callable[[Grammar | PdServeError], None]


@dataclass(frozen=True, slots=True)
class GrammarJob:
    """A request for a compiled grammar."""

    params: StructuredOutputsParams
    eos_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    """Output that the sequence already has; the grammar continues after it."""
    is_wanted: Callable[[], bool]
    """False once the request has ended. Any thread calls it."""
    begins: Callable[[], None]
    """Called when compiling begins; the time before was spent on earlier jobs."""
    deliver: Deliver
    """Receives the grammar, or the error. Called once, in the compiler's thread; never for a job that is no longer wanted."""
    tenant: bytes = b""
    """The tenant of the request. Tenants take turns, and share no process."""
    may_draft: bool = True
    """False after a draft has ended a process of this grammar: the next process takes no drafts."""


class JobQueue:
    """Jobs in turns of tenants, and per tenant in order of arrival."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, deque[GrammarJob]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._jobs.values())

    def add(self, job: GrammarJob) -> None:
        self._jobs.setdefault(job.tenant, deque()).append(job)

    def next(self) -> GrammarJob | None:
        """Remove and return the next wanted job; None if there is none."""
        while self._jobs:
            tenant, jobs = next(iter(self._jobs.items()))
            job = jobs.popleft()
            del self._jobs[tenant]
            if jobs:
                self._jobs[tenant] = jobs  # after all others
            if job.is_wanted():
                return job
        return None

    def take_all(self) -> list[GrammarJob]:
        """Remove and return all jobs."""
        jobs = [job for waiting in self._jobs.values() for job in waiting]
        self._jobs.clear()
        return jobs
