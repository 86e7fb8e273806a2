"""`HostStagingPool`: a copy of a device's KV pool in host memory, block for block.

    source    device block --to_host-->   host block --connector-->                            (digested on the host)
    receiver                              host block <--connector--   host block --to_device--> device block

Connectors read and write host memory only, and a block has the same number on both sides, so their guarantees about blocks
hold for a device, too. A block is one run of bytes: neighbouring blocks are one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.common.device_event import DeviceEvent
from pdserve.kv_transfer.coalesce import number_runs
from pdserve.kv_transfer.connector import PoolMemory


class HostStagingPool:
    """Copies blocks between a device pool and host memory of the same size, pinned for CUDA. Only one thread calls the copies."""

    def __init__(self, kv_cache: Tensor) -> None:
        """kv_cache: `[num_blocks, ...]`, contiguous, on any device."""
        self._device_blocks = kv_cache.view(kv_cache.shape[0], -1)
        self._host_blocks = torch.zeros_like(self._device_blocks, device="cpu", pin_memory=kv_cache.is_cuda)
        # a separate stream, so that copies neither wait for later steps nor delay them
        self._stream = torch.cuda.Stream(kv_cache.device) if kv_cache.is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def memory(self) -> PoolMemory:
        """The host memory that connectors serve."""
        return host_memory(self._host_blocks)

    def to_host(self, block_ids: Sequence[int], written: DeviceEvent | None = None) -> None:
        """Copy blocks to host memory; complete when this returns.

        written: the event of the step that wrote them last; the copy waits for it.
        """
        self._copy(self._host_blocks, self._device_blocks, block_ids, written)

    def to_device(self, block_ids: Sequence[int], unused: DeviceEvent | None = None) -> None:
        """Copy blocks to the device; complete for every kernel launched after this returns.

        unused: the event of the last step that may write these blocks for an earlier owner; the copy waits for it.
        """
        self._copy(self._device_blocks, self._host_blocks, block_ids, unused)

    def _copy(self, target: Tensor, origin: Tensor, block_ids: Sequence[int], after: DeviceEvent | None) -> None:
        if after is not None:
            after.synchronize()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for first, count in number_runs(block_ids):
                target[first : first + count].copy_(origin[first : first + count], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()


def host_memory(kv_cache: Tensor) -> PoolMemory:
    """The bytes of a pool `[num_blocks, ...]` in host memory, for the data plane."""
    data = kv_cache.flatten().view(torch.uint8).numpy().data
    return PoolMemory(memoryview(data), kv_cache[0].nbytes, kv_cache.shape[0])
