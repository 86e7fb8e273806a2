"""KV pools on the pretended device, digested there, and registered with NIXL as the host memory that they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from pdserve.kernels.torch_layer_ops import TorchLayerOps
from pdserve.kv_transfer.memory.device_pool import DevicePool
from pdserve.kv_transfer.memory.pool_memory import HostPool, PoolMemory
from pdserve.kv_transfer.nixl.nixl_agent import Region
from tests.support.engine.pretend_device import PretendTensor, pretended_device


class PretendedPool(DevicePool):
    """A `DevicePool` over a `PretendTensor`, with the address of its numbers."""

    @property
    def address(self) -> int:
        return self._held.data_ptr()

    def held_bytes(self, block: int) -> Tensor:
        """The bytes of a block `[block_bytes]`, on the host and writable."""
        return self._held[block].view(torch.uint8)

    @property
    def _held(self) -> Tensor:
        assert isinstance(self._blocks, PretendTensor)
        return self._blocks.held


def on_device(pool: HostPool) -> Tensor:
    """The pool's memory as blocks `[num_blocks, block_bytes]` of the pretended device."""
    rows = torch.frombuffer(pool.view, dtype=torch.uint8)
    return PretendTensor(rows.view(pool.num_blocks, pool.block_bytes))


def digest_on_device(pool: Tensor, blocks: Sequence[int]) -> Tensor:
    """A `DigestBlocks` for any thread."""
    with pretended_device():
        return TorchLayerOps().digests(pool, blocks)


def region_on_host(pool: PoolMemory) -> Region:
    """As `pool_region`, with the memory's real kind."""
    return Region(pool.address, pool.block_bytes, pool.num_blocks)


@contextmanager
def reachable_by_nixl() -> Iterator[None]:
    """While it lasts, NIXL connectors register pools on the pretended device."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("nixl", "nixl_peer"):
            patch.setattr(f"pdserve.kv_transfer.nixl.{module}.pool_region", region_on_host)
        # a connector of a pool on a device would set it, for all that follow in this process
        patch.setenv("UCX_PROTO_EMULATION_ENABLE", "y")
        yield
