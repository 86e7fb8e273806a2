"""Tensors that keep their address from step to step."""

from __future__ import annotations

import torch
from torch import Tensor


class StepBuffers:
    """Flat tensors by name, of one device. One grows, and then moves, only when a step needs more room than any before.

    So steps up to the size of the largest one before have all their tensors at the addresses of that step, as a captured graph
    needs them. Work that still uses the old tensor must be in the device's current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}
        self._row_width = 0

    def room(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """At least `size` numbers; the result's size is a power of two. `name` always has the same dtype."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(1 << max(size - 1, 0).bit_length(), dtype=dtype, device=self.device)
            self._buffers[name] = buffer
        return buffer

    def row_width(self, width: int) -> int:
        """Distance of the rows of a table with `width` columns: that of the widest table so far, rounded up."""
        self._row_width = max(self._row_width, 1 << max(width - 1, 0).bit_length())
        return self._row_width

    def put(self, name: str, numbers: Tensor) -> Tensor:
        """Copy a flat int32 tensor of the device or the host, in stream order and without waiting -> the whole buffer, at least as
        long as the tensor."""
        buffer = self.room(name, len(numbers), torch.int32)
        if self.device.type == "cuda" and numbers.is_cpu:
            # pinned anew each time: the copy of the step before may still read its own
            numbers = numbers.pin_memory()
        buffer[: len(numbers)].copy_(numbers, non_blocking=True)
        return buffer
