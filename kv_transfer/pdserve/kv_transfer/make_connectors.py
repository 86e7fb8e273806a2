"""`make_connectors`: the connectors that a worker's settings and machine allow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.common.security.block_digest import XXH3
from pdserve.common.security.tls import TlsIdentity
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.kv_transfer.connector import BlockConnector
from pdserve.kv_transfer.connector_set import ConnectorSet, join_shapes
from pdserve.kv_transfer.landing_ring import RingConnector
from pdserve.kv_transfer.memory.device_digests import DigestBlocks, device_digests
from pdserve.kv_transfer.memory.device_pool import DevicePool, host_pool
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_agent import why_no_nixl
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_settings import TcpSettings

SEND_BYTES = 32 << 20
"""Host memory through which the blocks of a pool on a device are sent over TCP."""
DIGEST_BYTES = 16 << 20
"""Host memory through which blocks on a device are digested on the host: for the pool, and as much for a ring on the device."""
SLOT_WAIT_S = 3.0
"""Longest wait for memory to send from or to receive into."""

log = logging.getLogger(__name__)


def make_connectors(
    settings: WorkerSettings,
    why_not: Callable[[], str | None] = why_no_nixl,
    *,
    shape: int = 0,
    tls: TlsIdentity | None = None,
) -> ConnectorSet:
    """The connectors of blocks of one shape: TCP always, and NIXL before it if it is allowed and starts.

    why_not: function that returns the reason why NIXL cannot be used here, or None. shape: if `data_port` is fixed, its
    port follows those of the shapes before, on all ranks. tls: for TCP. NIXL has no encryption, so with TLS it is used only with
    `nixl_plaintext`.
    Raises: ConfigError if `connector` is `nixl` and NIXL cannot start.
    """
    port = settings.data_port and settings.data_port + shape * settings.tensor_parallel_size
    tcp = TcpConnector(TcpSettings(host=settings.host, port=port, advertise_host=settings.peers_host, tls=tls))
    if settings.connector == "tcp":
        log.info("connectors: tcp; not nixl: connector is 'tcp'")
        return ConnectorSet([tcp])
    if tls is not None and not settings.nixl_plaintext:
        log.info("connectors: tcp; not nixl: it encrypts nothing, and TLS is configured (nixl_plaintext allows it)")
        return ConnectorSet([tcp])
    reason = why_not()
    if reason is None:
        log.info("connectors: nixl, tcp")
        return ConnectorSet([NixlConnector(), tcp], optional=("nixl",) if settings.connector == "auto" else ())
    if settings.connector == "nixl":
        raise ConfigError(f"connector is 'nixl', which cannot be used here: {reason}")
    log.info("connectors: tcp; not nixl: %s", reason)
    return ConnectorSet([tcp])


def serve_pools(
    settings: WorkerSettings, kv_caches: Sequence[Tensor], tls: TlsIdentity | None
) -> tuple[ConnectorSet, list[PoolMemory]]:
    """Connectors that serve the pools of one rank, one per shape of blocks, and the pools. Each pool has connectors of its own,
    which the first one's are joined with. Raises: ConfigError."""
    of_shapes = [make_connectors(settings, shape=number, tls=tls) for number in range(len(kv_caches))]
    ring_bytes = (settings.limits.kv_ring_mib << 20) // len(kv_caches)
    pools = [
        serve_pool(connectors, kv_cache, ring_bytes, settings.kernels)
        for connectors, kv_cache in zip(of_shapes, kv_caches, strict=True)
    ]
    return join_shapes(of_shapes), pools


def serve_pool(connectors: ConnectorSet, kv_cache: Tensor, ring_bytes: int, kernels: str = "auto") -> PoolMemory:
    """Give all connectors an engine's pool. Reads land in it on a host, and in a ring of `ring_bytes` on a device.

    kv_cache: `[num_blocks, ...]`, contiguous. kernels: the setting, which also chooses where blocks of a device are digested.
    Raises: ConfigError.
    """
    if kv_cache.is_cpu:
        memory = host_pool(kv_cache)
        connectors.serve(memory)
        return memory
    digest_blocks = device_digests(kv_cache, kernels)
    pool = device_pool(kv_cache, digest_blocks)
    if digest_blocks is not None:
        # kernels are compiled now, and not while the first transfer waits for them
        pool.digests([0], [0], XXH3)
    connectors.serve(pool, lambda connector: with_ring(connector, pool, ring_bytes, digest_blocks))
    return pool


def device_pool(
    kv_cache: Tensor, digest_blocks: DigestBlocks | None = None, send_bytes: int = SEND_BYTES
) -> DevicePool:
    num_slots, num_digest_slots = (max(1, size // kv_cache[0].nbytes) for size in (send_bytes, DIGEST_BYTES))
    return DevicePool(kv_cache, num_slots, num_digest_slots, SLOT_WAIT_S, digest_blocks)


def with_ring(
    connector: BlockConnector, pool: DevicePool, ring_bytes: int, digest_blocks: DigestBlocks | None = None
) -> RingConnector:
    """The connector with a ring that it can write: on the device for NIXL, in pinned memory of the host for others.

    Raises: ConfigError if the memory is not there.
    """
    pinned = not isinstance(connector, NixlConnector)
    try:
        ring = pool.new_ring(max(1, ring_bytes // pool.block_bytes), pinned=pinned)
    except (RuntimeError, MemoryError) as error:  # torch's and CUDA's are of the first kind
        where = "pinned main memory" if pinned else "memory of the GPU"
        raise ConfigError(f"kv_ring_mib {ring_bytes >> 20} needs more {where} than is free") from error
    landing: PoolMemory = host_pool(ring) if ring.is_cpu else device_pool(ring, digest_blocks, send_bytes=0)
    return RingConnector(connector, pool, ring, landing, SLOT_WAIT_S)
