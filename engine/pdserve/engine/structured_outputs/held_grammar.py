"""`HeldGrammar`: the compiler's account of one grammar's process."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.common.errors import PdServeError
from pdserve.engine.structured_outputs.grammar import GrammarJob
from pdserve.engine.structured_outputs.grammar_fork_server import SpawnedProcess
from pdserve.engine.structured_outputs.grammar_host import GrammarHost
from pdserve.engine.structured_outputs.grammar_messages import encode

Key = tuple[bytes, bytes]
"""(tenant, encoded parameters of the grammar)."""


def key_of(job: GrammarJob) -> Key:
    return job.tenant, encode(job.params)


@dataclass(slots=True)
class HeldGrammar:
    """One grammar's process, and the jobs that wait for it."""

    key: Key
    process: SpawnedProcess
    host: GrammarHost
    overdue_at: float
    """`clock.monotonic()` seconds by which it must be compiled."""
    is_late: bool = False
    """True if requests have waited in vain. It goes on compiling for those that come again."""
    is_compiled: bool = False
    waiting: list[GrammarJob] = field(default_factory=list)
    """Jobs that wait until it is compiled."""
    opening: dict[int, GrammarJob] = field(default_factory=dict)
    """Slot -> job whose `Opened` is awaited."""

    @property
    def is_idle(self) -> bool:
        return self.is_compiled and not self.opening and self.host.is_idle

    def fail(self, error: PdServeError) -> None:
        """End all its jobs with an error."""
        jobs = [*self.waiting, *self.opening.values()]
        self.waiting.clear()
        self.opening.clear()
        for job in jobs:
            job.deliver(error)
