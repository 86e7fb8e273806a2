"""`device_digests`: digests of blocks in kernels, where the blocks are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.kernels.layer_ops import DIGESTED_UNIT, SHORTEST_DIGESTED
from pdserve.kernels.make_layer_ops import LayerOpsError, make_layer_ops
from pdserve.kernels.torch_layer_ops import TorchLayerOps

DigestBlocks = Callable[[Tensor, Sequence[int]], Tensor]
"""As `LayerOps.digests`: a pool `[num_blocks, ...]` and block numbers -> xxh3_64 of each, `[n]` int64 on the pool's device."""


def device_digests(kv_cache: Tensor, kernels: str) -> DigestBlocks | None:
    """Digests in kernels on the cache's device; None without kernels, or for blocks of another size.

    kernels: the setting. Raises: ConfigError.
    """
    try:
        ops = make_layer_ops(kernels, kv_cache.device)
    except LayerOpsError as error:
        raise ConfigError(str(error)) from error
    return None if isinstance(ops, TorchLayerOps) or not can_digest(kv_cache[0].nbytes) else ops.digests


def can_digest(block_bytes: int) -> bool:
    """True if the kernel digests blocks of this size."""
    return block_bytes % DIGESTED_UNIT == 0 and block_bytes >= SHORTEST_DIGESTED
