"""`RetryState`: what the next attempt needs from earlier attempts at the same sequences."""

from __future__ import annotations

import msgspec

from pdserve.common.kv_events import WorkerKey
from pdserve.router.attempts.migration import MigrationSource
from pdserve.router.placement.placement import PlacementHint


class RetryState(msgspec.Struct, kw_only=True):
    """State of the attempts at the same sequences, which follow one another."""

    index: int | None = None
    """The one sequence that they serve; None: all of the request's."""
    hint: PlacementHint = PlacementHint.ANY
    blamed: frozenset[WorkerKey] = frozenset()
    num_counted: int = 0
    """Failed attempts."""
    num_uncounted: int = 0
    """Attempts that decode refused before it did anything."""
    source: MigrationSource | None = None
    """The next attempt continues this sequence of another worker."""
    num_evictions: int = 0
    """Attempts that ended because other sequences needed the blocks, or because a move failed: no failure of a worker."""
    sampler_version: int | None = None
    """Version of the sampler of the last token; None before the first, and for a greedy request, where it does not matter."""

    def end_migration(self) -> None:
        """The next attempt begins without a source."""
        if self.source is not None:
            self.source.cancel()
            self.source = None

    @property
    def sampler_versions(self) -> set[int]:
        """`sampler_version` as a set; empty without one."""
        return set() if self.sampler_version is None else {self.sampler_version}
