"""Attention of one step over the paged cache: the plan made once, and the two verbs that each layer calls."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.attention_batch import AttentionBatch
from pdserve.kernels.decode_attention import DecodeGroup, attend_decode, clear_decode_tails, plan_decode
from pdserve.kernels.kv_pages import KvPages
from pdserve.kernels.prefill_attention import PrefillPlan, attend_prefill, plan_prefill


class AttentionStep:
    """One step's `AttentionBatch` laid over one cache; `windows` are the different sliding windows of the layers."""

    def __init__(self, batch: AttentionBatch, pages: KvPages, num_heads: int, windows: frozenset[int | None]) -> None:
        _check(batch, pages.block_size)
        self._pages = pages
        self._num_heads = num_heads
        self._scale = pages.head_dim**-0.5
        self._num_decodes = batch.num_decodes
        self._write_rows = pages.write_rows(batch.slot_mapping)
        self._decodes: dict[int | None, list[DecodeGroup]] = {}
        self._prefills: dict[int | None, list[PrefillPlan]] = {}
        for window in windows:
            self._decodes[window] = plan_decode(batch, pages, window)
            self._prefills[window] = [plan_prefill(chunk, pages, window) for chunk in batch.prefills]
        if any(group.mask is not None for groups in self._decodes.values() for group in groups):
            clear_decode_tails(batch, pages)

    def attend(self, layer: int, qkv: Tensor, window: int | None) -> Tensor:
        """Store this step's keys and values, then let every query see what it may.

        qkv `[T, Hq + 2 * Hkv, D]`, queries and keys already rotated -> `[T, Hq * D]`.
        """
        pages, num_heads, num_kv_heads = self._pages, self._num_heads, self._pages.num_kv_heads
        keys_values = qkv[:, num_heads:]
        pages.token_rows[layer].index_copy_(0, self._write_rows, keys_values.reshape(-1, pages.head_dim))
        num_tokens, _, head_dim = qkv.shape
        queries = qkv[:, :num_heads].view(num_tokens, num_kv_heads, -1, head_dim)

        groups = self._decodes[window]
        if len(groups) == 1 and self._num_decodes == num_tokens:
            return self._attend_group(layer, queries, groups[0]).reshape(num_tokens, -1)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in groups:
            out[group.start : group.stop] = self._attend_group(layer, queries[group.start : group.stop], group)
        for plan in self._prefills[window]:
            first, stop = plan.chunk.query_start, plan.chunk.query_start + plan.chunk.num_tokens
            if plan.source is None:
                k, v = keys_values[first:stop].view(-1, 2, num_kv_heads, head_dim).permute(1, 2, 0, 3)
            else:
                k, v = (gathered[0] for gathered in pages.gather(layer, plan.source))
            attend_prefill(queries[first:stop], k, v, plan, self._scale, out[first:stop])
        return out.view(num_tokens, -1)

    def _attend_group(self, layer: int, q: Tensor, group: DecodeGroup) -> Tensor:
        k, v = self._pages.gather(layer, group.source)
        return attend_decode(q, k, v, group, self._scale)


def _check(batch: AttentionBatch, block_size: int) -> None:
    """Refuse what would be read as something else: a slice beyond a tensor's end is silently shorter."""
    num_tokens = batch.positions.shape[0]
    if batch.slot_mapping.shape[0] != num_tokens:
        raise ValueError(f"slot_mapping has {batch.slot_mapping.shape[0]} entries for {num_tokens} positions")
    row = batch.num_decodes
    for chunk in batch.prefills:
        if chunk.query_start != row:
            raise ValueError(f"a prefill chunk starts at row {chunk.query_start}, not {row}")
        if chunk.block_table.shape[0] * block_size < chunk.context_len + chunk.num_tokens:
            raise ValueError(f"{chunk.block_table.shape[0]} blocks for {chunk.context_len} + {chunk.num_tokens} tokens")
        row += chunk.num_tokens
    if row != num_tokens:
        raise ValueError(f"decodes and prefill chunks cover {row} of {num_tokens} rows")
    if batch.num_decodes and batch.block_tables.shape[1] * block_size < batch.max_seq_len:
        raise ValueError(f"block_tables has {batch.block_tables.shape[1]} columns for {batch.max_seq_len} tokens")
