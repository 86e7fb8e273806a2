"""`TransferBandwidth`: bandwidth of KV transfers in this fleet, estimated from completed transfers."""

from __future__ import annotations

from pdserve.common import timeline as moments
from pdserve.common.timeline import Timeline

DEFAULT_BYTES_PER_S = 1e9
"""Used before the first measurement; most networks between servers reach it."""
_KEPT = 0.9
"""Weight of old values with each new transfer."""
_SHORTEST_S = 1e-4
"""Seconds; the accuracy of times from two machines."""


class TransferBandwidth:
    """Bytes per second of the time that transfers add to requests.

    Blocks are transferred while later chunks of the prompt are computed, so the duration of a transfer is not its cost. The added
    time is from the later of (prompt computed, blocks reserved) until all blocks have landed. The estimate is the ratio of bytes to
    added time, both as decaying sums, so large transfers have more weight.
    """

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds if self._seconds else DEFAULT_BYTES_PER_S

    def landed(self, transfer_bytes: int, timeline: Timeline) -> None:
        """Add a complete transfer; ignored without its moments or bytes."""
        known = timeline.moments_unix_ns
        if transfer_bytes <= 0 or any(
            name not in known for name in (moments.KV_RESERVED, moments.KV_LANDED, moments.PREFILL_COMPUTED)
        ):
            return
        since_ns = max(known[moments.KV_RESERVED], known[moments.PREFILL_COMPUTED])
        seconds = max(_SHORTEST_S, (known[moments.KV_LANDED] - since_ns) / 1e9)
        self._bytes = _KEPT * self._bytes + transfer_bytes
        self._seconds = _KEPT * self._seconds + seconds
