"""`ExportCounts`: what became of a process's spans. Apart from the export itself, which only a tracing process loads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ExportCounts:
    """Spans since start."""

    exported: int = 0
    dropped: int = 0
    """The queue was full."""
    failed: int = 0
    """The collector did not take them."""
