"""A worker whose KV pool is on the pretended device: `python device_worker.py FOLDER prefill --port ...`.

The engine computes on the CPU, in the same memory; its steps write the pool as late as a GPU's may (`late_executor.py`).
Transfers see a device: blocks are digested there, leave through slots of the host, and land in rings, for NIXL on the device as
well.

It pauses as `pausing_worker.py` does, and once more:

    landing    decode, before verified blocks are moved into the pool     mover

The first worker that verifies received blocks while there is a file `FOLDER/flip` renames it to `FOLDER/flipped`, and turns one bit
over in the first of these blocks before that. With a file `FOLDER/flip_all` it does so in each first block, and leaves the file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pdserve.cli.main import main
from pdserve.engine.client import loaded_engine
from pdserve.kv_transfer import make_connectors
from pdserve.kv_transfer.connector import BlockToRead
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.memory.device_pool import DevicePool
from pdserve.kv_transfer.memory.pool_memory import HostPool, PoolMemory
from pdserve.kv_transfer.nixl import nixl, nixl_peer
from pdserve.kv_transfer.pull import peer_connections
from pdserve.kv_transfer.pull.digest import matching
from tests.support.engine.late_executor import LateExecutor
from tests.support.engine.pretend_device import PretendTensor
from tests.support.engine.pretend_pool import PretendedPool, digest_on_device, region_on_host
from tests.support.processes import pausing_worker
from tests.support.processes.pausing_worker import Pauses, around
from tests.support.processes.prepared_children import prepare_children


def install(folder: Path) -> None:
    """Put pool, steps, pauses and wrong bits into this process."""
    pauses = Pauses(folder)
    pausing_worker.install(pauses)
    around(DevicePool, "move_in", lambda *_: pauses.reach("landing"))
    _late_steps_over_a_device()
    _wrong_bits(folder)


def _late_steps_over_a_device() -> None:
    serve, make = make_connectors.serve_pool, vars(loaded_engine)["make_engine_core"]
    served: list[DevicePool] = []

    def serve_pool(connectors: ConnectorSet, kv_cache: Tensor, ring_bytes: int, kernels: str) -> PoolMemory:
        pool = serve(connectors, PretendTensor(kv_cache), ring_bytes, kernels)
        assert isinstance(pool, PretendedPool)
        served.append(pool)
        return pool

    def make_engine_core(config: Any, model: Any, kv_caches: Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
        core = make(config, model, kv_caches, *arguments, **options)
        core.executor = LateExecutor(core.executor, kv_caches[0], *served)
        return core

    replacements: list[tuple[Any, str, Any]] = [
        (make_connectors, "serve_pool", serve_pool),
        (loaded_engine, "make_engine_core", make_engine_core),
        (make_connectors, "DevicePool", PretendedPool),
        (make_connectors, "device_digests", lambda *_: digest_on_device),
        (nixl, "pool_region", region_on_host),
        (nixl_peer, "pool_region", region_on_host),
    ]
    for owner, name, replacement in replacements:
        assert hasattr(owner, name), f"{owner.__name__} has no {name} any more"
        setattr(owner, name, replacement)


def _wrong_bits(folder: Path) -> None:
    once, always = folder / "flip", folder / "flip_all"

    def flips() -> bool:
        try:
            once.rename(folder / "flipped")
        except FileNotFoundError:
            return always.exists()
        return True

    def matching_after_flips(pool: PoolMemory, blocks: Sequence[BlockToRead], *digest: Any) -> list[bool]:
        if flips():
            _flip(pool, blocks[0].local_block)
        return matching(pool, blocks, *digest)

    setattr(peer_connections, "matching", matching_after_flips)  # noqa: B010 - no part of the module's interface


def _flip(pool: PoolMemory, block: int) -> None:
    """Turn the first bit of a block over, where it has landed."""
    if isinstance(pool, HostPool):
        pool.block(block)[0] ^= 1
    else:
        assert isinstance(pool, PretendedPool)
        pool.held_bytes(block)[0] ^= 1


if __name__ == "__main__":
    met = Path(sys.argv.pop(1))
    prepare_children(lambda: install(met))
    main()
