"""Connectors over pools on the pretended device, with their rings: over TCP a ring of the host, over NIXL one on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.kv_transfer.connector import BlockConnector
from pdserve.kv_transfer.landing_ring import RingConnector
from pdserve.kv_transfer.memory.device_pool import DevicePool
from pdserve.kv_transfer.memory.pool_memory import HostPool, PoolMemory
from tests.support.engine.pretend_pool import PretendedPool, digest_on_device, on_device
from tests.support.run.waiting import HANG_S

from .recorded_read import make_pool

NUM_SLOTS = 256


@dataclass(frozen=True)
class DeviceRing:
    """One end of a link."""

    connector: RingConnector
    pool: DevicePool
    held: HostPool
    """The ring's bytes, as the host has them."""

    def serve(self) -> None:
        self.connector.serve(self.pool)


def pretended(pool: HostPool) -> DevicePool:
    """The pool's memory as a device's, digested there."""
    return PretendedPool(on_device(pool), NUM_SLOTS, 4, HANG_S, digest_on_device)


def device_ring(kind: str, inner: BlockConnector, pool: HostPool) -> DeviceRing:
    """kind: `tcp` or `nixl`. pool: memory of the host that is used as a device's."""
    held = make_pool(None, NUM_SLOTS, pool.block_bytes)
    landing: PoolMemory = pretended(held) if kind == "nixl" else held
    ring = on_device(held) if kind == "nixl" else torch.frombuffer(held.view, dtype=torch.uint8).view(NUM_SLOTS, -1)
    device = pretended(pool)
    return DeviceRing(RingConnector(inner, device, ring, landing, HANG_S), device, held)
