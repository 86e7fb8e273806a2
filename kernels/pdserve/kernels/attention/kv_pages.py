"""Views of the paged KV cache that let one operation write, and one read, a whole layer's keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_spec import AttentionSpec


def check_cache(kv_cache: Tensor) -> None:
    """Raises: ValueError for a cache of another shape, or one that is not contiguous."""
    if kv_cache.dim() != 6 or kv_cache.shape[3] not in (1, 2) or not kv_cache.is_contiguous():
        raise ValueError(
            f"kv_cache must be contiguous [num_blocks, Hkv, L, 2 or 1, bs, D], not {tuple(kv_cache.shape)} "
            f"with strides {kv_cache.stride()}"
        )


def has_latent_rows(kv_cache: Tensor) -> bool:
    """True for a cache with one row per token."""
    return kv_cache.dim() == 6 and kv_cache.shape[3] == 1


def check_spec(kv_cache: Tensor, spec: AttentionSpec) -> None:
    """Raises: ValueError for a spec with other heads, or other rows of a token, than the cache."""
    heads = kv_cache.shape[1], kv_cache.shape[-1], has_latent_rows(kv_cache)
    if (spec.num_kv_heads, spec.head_dim, spec.value_dim is not None) != heads:
        raise ValueError(f"kv_cache {tuple(kv_cache.shape)} {kv_cache.dtype} does not fit {spec}")


@dataclass(frozen=True, slots=True)
class GatheredKeys:
    """Blocks of B sequences, and where their keys and values are copied to be multiplied."""

    batch_size: int
    rows: Tensor
    """`[P * B * Hkv * N]`, in the order of `KvPages.read_rows`."""
    out: Tensor
    """`[P * B * Hkv * N, bs * D]`, shared by all layers and steps: fresh temporaries of tens of megabytes would be
    mapped and faulted in again in every layer."""
    first_key: int
    last_key: int
    """Rows attend to keys `first_key..last_key-1` of the N * bs gathered keys of a sequence."""
    scale_rows: Tensor | None = None
    """Rows of `QuantizedPages.scale_rows`, in the order of `rows`."""


class KvPages:
    """`kv_cache[num_blocks, Hkv, L, P, bs, D]` seen as rows. P: 2, a key and a value; 1, a row that is both.

    The cache is contiguous, so a layer is the flat cache shifted by a constant: one set of row numbers, computed once
    a step, serves every layer through `token_rows[layer]` and `block_rows[layer]`.
    """

    def __init__(self, kv_cache: Tensor) -> None:
        check_cache(kv_cache)
        self.kv_cache = kv_cache
        self.like = kv_cache
        """A tensor of the dtype and the device of gathered keys."""
        self.num_blocks, self.num_kv_heads, self.num_layers, planes, self.block_size, self.head_dim = kv_cache.shape
        self.rows_per_token = planes
        """P"""
        self._lay_out(kv_cache, self.num_layers * planes)

    def _lay_out(self, kv_cache: Tensor, rows_of_head: int) -> None:
        """rows_of_head: rows `[bs, D]` of one head in a block; those of layer l are P rows from P l on."""
        planes = self.rows_per_token
        tokens = kv_cache.view(-1, self.head_dim)
        blocks = kv_cache.view(-1, self.block_size * self.head_dim)
        self.token_rows = [tokens[layer * planes * self.block_size :] for layer in range(self.num_layers)]
        """A row is one head's key or value of one token: `[*, D]`."""
        self.block_rows = [blocks[layer * planes :] for layer in range(self.num_layers)]
        """A row is one head's keys or values of one block: `[*, bs * D]`."""
        self._rows_of_block = self.num_kv_heads * rows_of_head
        keys = torch.arange(self.num_kv_heads, device=kv_cache.device).mul_(rows_of_head)
        rows = torch.stack([keys + plane for plane in range(planes)])
        self._head_tokens = rows.flatten() * self.block_size
        self._head_blocks = rows.view(planes, 1, self.num_kv_heads, 1)
        self._offsets = torch.arange(self.block_size, device=kv_cache.device)
        self._gathered = self._expanded = self.like.new_empty(0)

    def write_rows(self, slot_mapping: Tensor) -> Tensor:
        """Rows of `token_rows` that tokens in slots `[T]` own, in the order `[T, P, Hkv]`, flat: the argument of `store`."""
        # slot = block * bs + offset, and a block has `_rows_of_block` times as many rows as slots
        starts = slot_mapping // self.block_size
        starts = starts.mul_((self._rows_of_block - 1) * self.block_size).add_(slot_mapping)
        return (starts.unsqueeze(1) + self._head_tokens).flatten()

    def read_rows(self, block_tables: Tensor) -> Tensor:
        """Rows of `block_rows` that hold blocks `[B, N]`, in the order `[P, B, Hkv, N]`, flat.

        All keys come before all values: batched products in bfloat16 take 2.6 times as long over keys that are not contiguous.
        """
        starts = block_tables * self._rows_of_block
        return (starts.unsqueeze(1) + self._head_blocks).flatten()

    def plan_gather(self, block_tables: Tensor, first_key: int, last_key: int) -> GatheredKeys:
        """Prepare to look at keys `first_key..last_key-1` of blocks `[B, N]`, in any layer."""
        rows = self.read_rows(block_tables)
        size = rows.numel() * self.block_size * self.head_dim
        if self._gathered.numel() < size:
            self._gathered = self.like.new_empty(size + size // 2)
        out = self._gathered[:size].view(rows.numel(), -1)
        return GatheredKeys(block_tables.shape[0], rows, out, first_key, last_key)

    def expanded_room(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for keys and values that rows are expanded to, shared by all layers and steps as `GatheredKeys.out` is."""
        size = math.prod(shape)
        if self._expanded.numel() < size:
            self._expanded = self.like.new_empty(size + size // 2)
        return self._expanded[:size].view(shape)

    def store(self, layer: int, write_rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values `[T, Hkv, D]` to their `write_rows`. May round k and v to what it writes."""
        if self.rows_per_token == 1:
            self.token_rows[layer].index_copy_(0, write_rows, k.reshape(-1, self.head_dim))
            return
        # k and v are views of one projection: together they take one copy and one indexed write, separately two of each
        rows = torch.cat((k, v), 1).view(-1, self.head_dim)
        self.token_rows[layer].index_copy_(0, write_rows, rows)

    def gather(self, layer: int, source: GatheredKeys) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, Hkv, S, D]`, views of `source.out`; the same one where a row is both."""
        torch.index_select(self.block_rows[layer], 0, source.rows, out=source.out)
        keys_values = source.out.view(self.rows_per_token, source.batch_size, self.num_kv_heads, -1, self.head_dim)
        found = keys_values[:, :, :, source.first_key : source.last_key]
        return found[0], found[-1]

    def clear_tails(self, last_blocks: Tensor, num_used: Tensor) -> None:
        """Zero the slots from `num_used[b]` on in block `last_blocks[b]`, in all layers; both `[B]`.

        A masked key has weight 0, but 0 * NaN is NaN: bytes that an earlier owner left, or a peer sent, after a
        sequence's last token must be finite before they are multiplied. The sequence writes into this block in this
        very step, so no other sequence uses it. `num_used[b] == bs` leaves a block unchanged.
        """
        pages = self.kv_cache.view(self.num_blocks, -1, self.block_size, self.head_dim)
        if pages.is_cpu:  # a strided fill per sequence takes 4 us, the indexed fill of a large model's tails 60
            for block, used in zip(last_blocks.tolist(), num_used.tolist(), strict=True):
                if used < self.block_size:
                    pages[block, :, used:] = 0
            return
        # whole blocks, since only the device has the number of slots
        is_behind = self._offsets >= num_used.unsqueeze(1)
        held = pages.index_select(0, last_blocks).masked_fill_(is_behind[:, None, :, None], 0)
        pages.index_copy_(0, last_blocks, held)
