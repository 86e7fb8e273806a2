"""`DeviceEvent`: a point in the work that was queued on a device."""

from __future__ import annotations

from typing import Protocol


class DeviceEvent(Protocol):
    """A `torch.cuda.Event`, or one of a simulated device."""

    def synchronize(self) -> None:
        """Wait until all work that was queued before it is done."""
