"""`QuantizedPages`: a paged KV cache of int8 or float8 numbers, with one scale per token and head for keys and for values.

Quantising and dequantising, for the D numbers x of one head of one token:

    scale = max |x| / largest        largest: 127 for int8, 448 for float8 e4m3
    stored = round(x / scale)        to the nearest number of the stored dtype, ties to even
    x' = stored * scale              in float32, then rounded to the dtype of queries

Nothing but the token's own numbers enters, so a key is the same in any batch and for any division of its prompt into chunks.
Attention sees x' everywhere, also within the chunk that computed x.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pdserve.kernels.attention.kv_pages import GatheredKeys, KvPages

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST = torch.finfo(torch.float32).tiny
_SCALE_BYTES = 4


def is_quantized(kv_cache: Tensor) -> bool:
    """True for a cache that `QuantizedPages` takes."""
    return kv_cache.dtype in LARGEST


def num_layers_of(rows_of_head: int, head_dim: int) -> int:
    """L, for rows `[bs, D]` of one head's run: two per layer, then those of the scales. Raises: ValueError if no L has them."""
    for num_layers in range(rows_of_head // 2, 0, -1):
        if num_layers * 2 + -(-num_layers * 2 * _SCALE_BYTES // head_dim) == rows_of_head:
            return num_layers
    raise ValueError(f"a quantised kv_cache of {rows_of_head} rows per head of {head_dim} numbers holds no layers")


class QuantizedPages(KvPages):
    """`kv_cache[num_blocks, Hkv, rows, bs, D]` of int8 or float8: of each head 2 L rows of numbers, then those with its scales.

    The scales of a head are `[L, 2, bs]` float32, one run of bytes after its keys and values.
    """

    def __init__(self, kv_cache: Tensor, dtype: torch.dtype | None) -> None:
        """dtype: of queries and of gathered keys. Raises: ValueError for another shape, or a device other than a CPU."""
        if kv_cache.dim() != 5 or not kv_cache.is_contiguous() or kv_cache.shape[-1] % _SCALE_BYTES:
            raise ValueError(
                f"a quantised kv_cache must be contiguous [num_blocks, Hkv, rows, bs, D] with D a multiple of {_SCALE_BYTES}, "
                f"not {tuple(kv_cache.shape)} with strides {kv_cache.stride()}"
            )
        if dtype is None or not kv_cache.is_cpu:
            raise ValueError("a quantised kv_cache needs the dtype of queries, and a CPU")
        self.kv_cache = kv_cache
        self.rows_per_token = 2
        self.like = torch.empty(0, dtype=dtype)
        self.num_blocks, self.num_kv_heads, rows_of_head, self.block_size, self.head_dim = kv_cache.shape
        self.num_layers = num_layers_of(rows_of_head, self.head_dim)
        held = kv_cache.view(torch.int8)
        self._lay_out(held, rows_of_head)
        self._raw = held.new_empty(0)
        self._first_scale = self.num_layers * 2 * self.head_dim // _SCALE_BYTES
        """Rows of scales that the numbers of one head would fill."""
        scales = held.view(-1, self.block_size * self.head_dim).view(torch.float32).view(-1, self.block_size)
        self.scale_rows = [scales[layer * 2 :] for layer in range(self.num_layers)]
        """A row is the scales of one head's keys or values of one block: `[*, bs]`."""
        self._token_scales = [rows.view(-1) for rows in self.scale_rows]

    def _scale_rows(self, rows: Tensor, is_value: Tensor) -> Tensor:
        """rows: of `block_rows`; is_value: 1 for those of values, 0 for those of keys -> rows of `scale_rows`."""
        return (rows - is_value) * (self.head_dim // _SCALE_BYTES) + self._first_scale + is_value

    def write_rows(self, slot_mapping: Tensor) -> Tensor:
        """`[2, n]`: as `KvPages.write_rows`, and for each the place of its scale."""
        rows = super().write_rows(slot_mapping)
        blocks, offsets = rows // self.block_size, rows % self.block_size
        is_value = torch.arange(2).repeat_interleave(self.num_kv_heads).repeat(len(slot_mapping))
        return torch.stack((rows, self._scale_rows(blocks, is_value) * self.block_size + offsets))

    def store(self, layer: int, write_rows: Tensor, k: Tensor, v: Tensor) -> None:
        kv = torch.cat((k, v), 1).float()
        largest = LARGEST[self.kv_cache.dtype]
        scales = kv.abs().amax(-1, keepdim=True).div_(largest)
        kv.div_(scales.clamp(min=_SMALLEST)).clamp_(-largest, largest)
        if self.kv_cache.dtype is torch.int8:
            kv.round_()
        stored = kv.to(self.kv_cache.dtype)
        rows, places = write_rows
        self.token_rows[layer].index_copy_(0, rows, stored.view(torch.int8).view(-1, self.head_dim))
        self._token_scales[layer].index_copy_(0, places, scales.flatten())
        # attention within this chunk sees the same numbers as later ones
        rounded = self._dequantized(stored, scales)
        k.copy_(rounded[:, : self.num_kv_heads])
        v.copy_(rounded[:, self.num_kv_heads :])

    def _dequantized(self, stored: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self.like.new_empty(stored.shape)
        # float8 has no products
        numbers = stored if stored.dtype is torch.int8 else stored.float()
        return torch.mul(numbers, scales, out=out)

    def plan_gather(self, block_tables: Tensor, first_key: int, last_key: int) -> GatheredKeys:
        source = super().plan_gather(block_tables, first_key, last_key)
        if self._raw.numel() < source.out.numel():
            self._raw = self._raw.new_empty(self._gathered.numel())
        is_value = torch.arange(2).repeat_interleave(len(source.rows) // 2)
        return replace(source, scale_rows=self._scale_rows(source.rows, is_value))

    def gather(self, layer: int, source: GatheredKeys) -> tuple[Tensor, Tensor]:
        assert source.scale_rows is not None
        raw = self._raw[: source.out.numel()].view(source.out.shape)
        torch.index_select(self.block_rows[layer], 0, source.rows, out=raw)
        scales = self.scale_rows[layer].index_select(0, source.scale_rows)
        shape = (-1, self.block_size, self.head_dim)
        self._dequantized(raw.view(self.kv_cache.dtype).view(shape), scales.unsqueeze(-1), source.out.view(shape))
        keys_values = source.out.view(2, source.batch_size, self.num_kv_heads, -1, self.head_dim)
        k, v = keys_values[:, :, :, source.first_key : source.last_key].unbind()
        return k, v

    def clear_tails(self, last_blocks: Tensor, num_used: Tensor) -> None:
        num_numbers = self.num_layers * 2
        pages = self.kv_cache.view(torch.int8)
        run = pages.view(self.num_blocks, self.num_kv_heads, -1)[:, :, num_numbers * self.block_size * self.head_dim :]
        scales = run.view(torch.float32)[:, :, : num_numbers * self.block_size]
        scales = scales.view(self.num_blocks, self.num_kv_heads, num_numbers, self.block_size)
        for block, used in zip(last_blocks.tolist(), num_used.tolist(), strict=True):
            if used < self.block_size:
                pages[block, :, :num_numbers, used:] = 0
                scales[block, :, :, used:] = 0
