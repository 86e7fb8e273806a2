"""`RetryState`: what the attempts at the same sequences know of one another."""

from __future__ import annotations

import msgspec

from pdserve.router.placement.placement import PlacementHint, WorkerKey


class RetryState(msgspec.Struct, kw_only=True):
    """Attempts at the same sequences, one after the other: what the next one knows of those before."""

    index: int | None = None
    """The one sequence that they serve; None: all of the request's."""
    hint: PlacementHint = PlacementHint.ANY
    blamed: frozenset[WorkerKey] = frozenset()
    num_counted: int = 0
    """That failed."""
    num_uncounted: int = 0
    """That decode refused before it did anything."""
    num_evictions: int = 0
    """Attempts that ended because other sequences needed the blocks: no failure of a worker."""
    sampler_version: int | None = None
    """Of the worker that sampled the last token; None before the first, and for a greedy request, where it does not matter."""

    @property
    def sampler_versions(self) -> set[int]:
        """That version, if there is one."""
        return set() if self.sampler_version is None else {self.sampler_version}
