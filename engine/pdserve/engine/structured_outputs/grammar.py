"""`Grammar`: one sequence's place in its grammar; `GrammarJob`: what one request needs of the compiler; `JobQueue`: their order."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.common.errors import PdServeError
from pdserve.common.request.structured_outputs import StructuredOutputsParams


class Grammar(Protocol):
    """The engine thread alone calls it."""

    @property
    def has_ended(self) -> bool:
        """True if nothing can follow. Without EOS tokens this may become true a step after the last token."""

    @property
    def failure(self) -> PdServeError | None:
        """The error that ends the sequence: its grammar exceeds its budget, or its process has ended. None without one."""

    @property
    def is_prompt(self) -> bool:
        """True if the next mask is there, or the last one was so fast that a step may wait for it."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token. False, with nothing changed, when the token is not allowed here."""

    def allowed(self, until: float) -> NDArray[np.uint8] | None:
        """The tokens that may come next: `[W]` bytes, a bit per token, the lowest first; the caller must not change them.

        until: `time.monotonic()` seconds at which to give up. None: the mask has not arrived by then.
        """

    def fork(self) -> Grammar:
        """Another sequence's place, the same as this one's now."""

    def close(self) -> None:
        """The sequence is over. May be called again."""


Deliver = Callable[[Grammar | PdServeError], None]


@dataclass(frozen=True, slots=True)
class GrammarJob:
    """A request for a compiled grammar."""

    params: StructuredOutputsParams
    eos_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    """Output that the sequence already has: the grammar continues after it."""
    is_wanted: Callable[[], bool]
    """False once the request has ended. Any thread calls it."""
    begins: Callable[[], None]
    """Called when compiling begins. From here on the grammar itself takes the time, not earlier jobs."""
    deliver: Deliver
    """Takes the grammar, or why there is none. Called once, in the compiler's thread; never for a job not wanted."""
    tenant: bytes = b""
    """On whose behalf: tenants take turns, and share no process."""


class JobQueue:
    """Jobs of tenants in turn, and of each tenant in order of arrival."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[bytes, deque[GrammarJob]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(jobs) for jobs in self._jobs.values())

    def add(self, job: GrammarJob) -> None:
        self._jobs.setdefault(job.tenant, deque()).append(job)

    def next(self) -> GrammarJob | None:
        """The next job that is wanted, taken out; None when none is."""
        while self._jobs:
            tenant, jobs = next(iter(self._jobs.items()))
            job = jobs.popleft()
            del self._jobs[tenant]
            if jobs:
                self._jobs[tenant] = jobs  # behind all others
            if job.is_wanted():
                return job
        return None

    def take_all(self) -> list[GrammarJob]:
        """All of them, taken out."""
        jobs = [job for waiting in self._jobs.values() for job in waiting]
        self._jobs.clear()
        return jobs
