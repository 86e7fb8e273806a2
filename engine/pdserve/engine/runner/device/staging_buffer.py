"""`StagingBuffer` and `ReadbackBuffer`: all arrays of a step travel to the device, and from it, in one copy each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.runner.device.device_runtime import DeviceRuntime, TimedEvent

_ALIGNMENT = 16
_BUFFERS = 2
"""Host buffers in turn: one step may be under way while the next is written."""
_LEAST_BYTES = 1 << 12


class _HostBuffers:
    """Pinned buffers that are used in turn, each after the copy that used it last. They grow."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._held: list[tuple[Tensor, TimedEvent | None] | None] = [None] * _BUFFERS
        self._turn = 0

    def next(self, num_bytes: int) -> Tensor:
        """`[num_bytes]` uint8; `copied` must follow when its copy is queued."""
        self._turn = (self._turn + 1) % _BUFFERS
        held = self._held[self._turn]
        if held is not None and held[1] is not None:
            held[1].synchronize()
        if held is None or len(held[0]) < num_bytes:
            held = (self._runtime.host_memory(1 << max(num_bytes, _LEAST_BYTES).bit_length()), None)
        self._held[self._turn] = held
        return held[0][:num_bytes]

    def copied(self) -> TimedEvent:
        """The event after the copy from or to the last buffer."""
        event = self._runtime.event()
        held = self._held[self._turn]
        assert held is not None
        self._held[self._turn] = (held[0], event)
        return event


class StagingBuffer:
    """Copies the arrays of a step to the device in one copy, in stream order and without waiting.

    Tensors of one upload are overwritten by the next one, which the device orders after the work that was queued before.
    """

    def __init__(self, device: torch.device, runtime: DeviceRuntime) -> None:
        self._device = device
        self._hosts = _HostBuffers(runtime)
        self._there = torch.empty(0, dtype=torch.uint8, device=device)

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """A tensor for each array, of its shape and dtype. On a CPU the tensors share the arrays' memory."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        offsets, total = [], 0
        for array in arrays:
            offsets.append(total)
            total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if len(self._there) < total:
            self._there = torch.empty(1 << total.bit_length(), dtype=torch.uint8, device=self._device)
        host = self._hosts.next(total)
        numbers = host.numpy()
        for offset, array in zip(offsets, arrays, strict=True):
            part = numbers[offset : offset + array.nbytes].view(array.dtype)
            np.copyto(part.reshape(array.shape), array)
        self._there[:total].copy_(host, non_blocking=True)
        self._hosts.copied()
        return [
            self._there[offset : offset + array.nbytes].view(_dtype_of(array)).view(array.shape)
            for offset, array in zip(offsets, arrays, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class PendingArrays:
    """Copies of tensors, on their way to the host."""

    _tensors: Sequence[Tensor]
    """For shapes and dtypes; on a CPU also for the numbers."""
    _flat: NDArray[np.uint8] | None
    """None on a CPU."""
    _copied: TimedEvent | None

    def wait(self) -> list[NDArray[Any]]:
        """Wait for the copy; called at most once, before the second copy after it begins."""
        if self._flat is None:
            return [tensor.numpy() for tensor in self._tensors]
        if self._copied is not None:
            self._copied.synchronize()
        flat, found, offset = self._flat.copy(), {}, 0
        for place in _by_size(self._tensors):
            tensor = self._tensors[place]
            size = tensor.numel() * tensor.element_size()
            dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
            found[place] = flat[offset : offset + size].view(dtype).reshape(tuple(tensor.shape))
            offset += size
        return [found[place] for place in range(len(self._tensors))]


class ReadbackBuffer:
    """Copies the results of a step to the host in one copy."""

    def __init__(self, device: torch.device, runtime: DeviceRuntime) -> None:
        self._device = device
        self._hosts = _HostBuffers(runtime)

    def start(self, tensors: Sequence[Tensor]) -> PendingArrays:
        """Queue the copy."""
        if self._device.type == "cpu":
            return PendingArrays(tensors, None, None)
        parts = [tensors[place].reshape(-1).view(torch.uint8) for place in _by_size(tensors)]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        host = self._hosts.next(len(flat))
        host.copy_(flat, non_blocking=True)
        return PendingArrays(tensors, host.numpy(), self._hosts.copied())


def _by_size(tensors: Sequence[Tensor]) -> list[int]:
    """Places in the order of element sizes, the largest first, so that every part is aligned."""
    return sorted(range(len(tensors)), key=lambda place: -tensors[place].element_size())


def _dtype_of(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
