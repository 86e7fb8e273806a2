"""`TransferBandwidth`: how fast KV blocks move in this fleet, learnt from the transfers that were seen."""

from __future__ import annotations

from pdserve.common import timeline as moments
from pdserve.common.timeline import Timeline

DEFAULT_BYTES_PER_S = 1e9
"""Until something was measured: what any network between servers moves."""
_KEPT = 0.9
"""Weight of the past with each new transfer."""
_SHORTEST_S = 1e-4
"""Moments of two machines' clocks are not more exact than this."""


class TransferBandwidth:
    """Bytes per second of the time by which transfers outlast what they wait for.

    Blocks move while later chunks of the prompt still compute, so a transfer's own duration says little. It adds to
    a request the time from the last of (prompt computed, room reserved) to everything landed. The estimate is the
    bytes moved over that time, both as decaying sums: large transfers weigh more.
    """

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds if self._seconds else DEFAULT_BYTES_PER_S

    def landed(self, transfer_bytes: int, timeline: Timeline) -> None:
        """Add a complete transfer; one without its moments or bytes is ignored."""
        known = timeline.moments_unix_ns
        if transfer_bytes <= 0 or any(
            name not in known for name in (moments.KV_RESERVED, moments.KV_LANDED, moments.PREFILL_COMPUTED)
        ):
            return
        since_ns = max(known[moments.KV_RESERVED], known[moments.PREFILL_COMPUTED])
        seconds = max(_SHORTEST_S, (known[moments.KV_LANDED] - since_ns) / 1e9)
        self._bytes = _KEPT * self._bytes + transfer_bytes
        self._seconds = _KEPT * self._seconds + seconds
