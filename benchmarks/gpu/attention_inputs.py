"""Steps of attention over a cache of random blocks in random order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.attention_spec import AttentionSpec

FILLED_AT_ONCE = 1 << 28
"""Numbers: a random fill needs memory beside its result."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    value_dim: int | None = None
    """Of `AttentionSpec`: latent rows."""

    @classmethod
    def of_llama_8b(cls, dry: bool) -> Shape:
        """Also Qwen3 8B's; tiny with the same ratio of heads for a dry run."""
        return cls(8, 2, 32) if dry else cls(32, 8, 128)

    @classmethod
    def of_deepseek_v3(cls, dry: bool, num_heads: int) -> Shape:
        """Rows of 576 numbers, narrow for a dry run. num_heads: 128, or those of one rank."""
        return cls(num_heads, 1, 40, value_dim=32) if dry else cls(num_heads, 1, 576, value_dim=512)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, scale=self.head_dim**-0.5,
            value_dim=self.value_dim,
        )  # fmt: skip

    @property
    def rows_per_token(self) -> int:
        """Of a KV head: 2, a key and a value; 1, a latent row."""
        return 2 if self.value_dim is None else 1

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of keys and values of one layer, or of its latent rows."""
        return self.rows_per_token * self.num_kv_heads * self.head_dim * self.dtype.itemsize * num_tokens


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step's inputs."""

    batch: AttentionBatch
    kv_cache: Tensor
    """`[num_blocks, Hkv, L, 2 or 1, bs, D]`"""
    q: Tensor
    """`[T, Hq, D]`"""
    k: Tensor
    """`[T, Hkv, D]`: with `v`, also in the cache's slots of these tokens."""
    v: Tensor
    """`[T, Hkv, D]`; over latent rows the first numbers of `k`."""


def random_cache(shape: Shape, num_blocks: int, num_layers: int, block_size: int, device: torch.device) -> Tensor:
    """`[num_blocks, Hkv, L, 2 or 1, bs, D]`, normally distributed."""
    dims = (num_blocks, shape.num_kv_heads, num_layers, shape.rows_per_token, block_size, shape.head_dim)
    kv_cache = torch.empty(dims, dtype=shape.dtype, device=device)
    for part in torch.split(kv_cache.view(-1), FILLED_AT_ONCE):
        part.normal_()
    return kv_cache


def paged_step(
    shape: Shape,
    seq_lens: NDArray[np.int64],
    query_lens: NDArray[np.int64],
    block_size: int,
    num_layers: int,
    device: torch.device,
) -> PagedStep:
    """The last `query_lens[i]` tokens of each sequence are the step's. Block 0 belongs to no sequence."""
    widths = -(-seq_lens // block_size)
    order = np.random.default_rng(0).permutation(int(widths.sum())) + 1
    tables = np.zeros((len(seq_lens), int(widths.max())), np.int64)
    begin = 0
    for row, width in enumerate(widths.tolist()):
        tables[row, :width] = order[begin : begin + width]
        begin += width
    rows = np.repeat(np.arange(len(seq_lens)), query_lens)
    starts = np.cumsum(query_lens) - query_lens
    positions = np.arange(int(query_lens.sum())) - np.repeat(starts - (seq_lens - query_lens), query_lens)
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    batch = AttentionBatch.from_arrays(
        positions=positions,
        slot_mapping=slots,
        query_lens=query_lens,
        seq_lens=seq_lens,
        block_tables=tables,
        device=device,
    )
    kv_cache = random_cache(shape, int(widths.sum()) + 1, num_layers, block_size, device)
    num_tokens = len(positions)
    qkv = torch.randn(
        num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=device
    )
    q, k, v = qkv.split_with_sizes((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), 1)
    stored = (k, v)[: shape.rows_per_token]
    if shape.value_dim is not None:
        v = k[..., : shape.value_dim]
    at = torch.from_numpy(slots).to(device)
    for layer in range(num_layers):
        kv_cache[at // block_size, :, layer, :, at % block_size] = torch.stack(stored, 2)
    return PagedStep(batch, kv_cache, q, k, v)
