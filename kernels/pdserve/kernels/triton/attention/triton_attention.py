"""Attention in Triton kernels: the back end for GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.attention_batch import AttentionBatch
from pdserve.kernels.attention_spec import AttentionSpec
from pdserve.kernels.kv_pages import check_cache, check_spec
from pdserve.kernels.triton.attention.attention_configs import AttentionConfigs, attention_configs
from pdserve.kernels.triton.attention.attention_launch import head_tile
from pdserve.kernels.triton.attention.decode_attention import decode_attention
from pdserve.kernels.triton.attention.decode_pieces import cut_into_pieces
from pdserve.kernels.triton.attention.prefill_attention import prefill_attention
from pdserve.kernels.triton.attention.prefill_tiles import FIELDS, cut_into_tiles
from pdserve.kernels.triton.attention.step_buffers import StepBuffers
from pdserve.kernels.triton.attention.store_kv import store_kv
from pdserve.kernels.triton.launch_configs import architecture


class TritonAttentionBackend:
    """Implements `AttentionBackend`. A step of decode rows alone is capturable: its launches depend on the number of rows alone.

    Lengths are in lists on the device, at addresses that stay. Bytes behind a sequence's end are not read, so none is overwritten.
    """

    def __init__(self, kv_cache: Tensor) -> None:
        """kv_cache: `[num_blocks, Hkv, L, 2, bs, D]`, contiguous. Raises: ValueError for another shape."""
        check_cache(kv_cache)
        self.kv_cache = kv_cache
        self._configs = attention_configs(architecture(kv_cache.device), kv_cache.shape[5])
        self._buffers = StepBuffers(kv_cache.device)
        self._step: _Step | None = None

    def plan(self, batch: AttentionBatch, spec: AttentionSpec) -> TritonAttentionPlan:
        check_spec(self.kv_cache, spec)
        if self._step is None or self._step.batch is not batch:
            batch.verify(self.kv_cache.shape[4])
            self._step = _Step(batch, self._buffers)
        return TritonAttentionPlan(self.kv_cache, self._step, spec, self._configs)


@dataclass(frozen=True, slots=True)
class _DecodeList:
    """The arguments of `decode_attention` that come from lengths."""

    pieces: Tensor
    count: Tensor
    first_piece: Tensor
    num_pieces: int


class _Step:
    """The part of a step's plan that all specs share, and the lists that some of them do."""

    def __init__(self, batch: AttentionBatch, buffers: StepBuffers) -> None:
        self.batch = batch
        self.buffers = buffers
        self._decode_lists: dict[int | None, _DecodeList] = {}
        self._tiles: dict[int, Tensor] = {}
        num_tokens, (num_seqs, width) = len(batch.slot_mapping), batch.block_tables.shape
        self.slot_mapping = buffers.room("slots", num_tokens, torch.int64)[:num_tokens]
        self.slot_mapping.copy_(batch.slot_mapping)
        columns = buffers.row_width(width)
        tables = buffers.room("tables", num_seqs * columns, torch.int32)
        self.tables = tables[: num_seqs * columns].view(num_seqs, columns)
        self.tables[:, :width].copy_(batch.block_tables)

    def decode_list(self, window: int | None) -> _DecodeList:
        """Pieces of the decode rows."""
        if window not in self._decode_lists:
            num_rows = self.batch.num_decodes
            pieces, first_piece = cut_into_pieces(self.batch.seq_lens_cpu[:num_rows].numpy(), window)
            head = 4 + -(-(num_rows + 1) // 4) * 4
            work = np.zeros(head + pieces.size, np.int32)
            work[0] = len(pieces)
            work[4 : 4 + num_rows + 1] = first_piece
            work[head:] = pieces.reshape(-1)
            buffer = self.buffers.upload(f"pieces of window {window}, {num_rows} rows", work)
            self._decode_lists[window] = _DecodeList(
                buffer[head:], buffer[:1], buffer[4 : 4 + num_rows + 1], len(pieces)
            )
        return self._decode_lists[window]

    def tiles(self, tile_tokens: int) -> Tensor:
        """`[n, 5]`, of the prompt chunks."""
        if tile_tokens not in self._tiles:
            batch = self.batch
            query_lens = np.diff(batch.query_start_loc_cpu.numpy())
            tiles = cut_into_tiles(query_lens, batch.seq_lens_cpu.numpy(), batch.num_decodes, tile_tokens)
            buffer = self.buffers.upload(f"tiles of {tile_tokens} tokens", tiles.reshape(-1))
            self._tiles[tile_tokens] = buffer[: tiles.size].view(-1, FIELDS)
        return self._tiles[tile_tokens]


class TritonAttentionPlan:
    """Implements `AttentionPlan`."""

    def __init__(self, kv_cache: Tensor, step: _Step, spec: AttentionSpec, configs: AttentionConfigs) -> None:
        self.kv_cache = kv_cache
        self.slot_mapping = step.slot_mapping
        self._spec = spec
        self._configs = configs
        self._tables = step.tables
        self._num_decodes = step.batch.num_decodes
        if self._num_decodes:
            self._list = step.decode_list(spec.window)
            num_heads = self._list.num_pieces * spec.num_heads
            self._part = step.buffers.room("part", num_heads * spec.head_dim, torch.float32)
            self._lse = step.buffers.room("lse", num_heads, torch.float32)
        self._tiles: Tensor | None = None
        if self._num_decodes < len(step.tables):
            self._tiles = step.tiles(head_tile(spec, kv_cache, configs).prefill_tokens)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        store_kv(k, v, self.kv_cache, layer, self.slot_mapping)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_rows = self._num_decodes
        if num_rows:
            work = self._list
            decode_attention(
                q[:num_rows], self.kv_cache, layer, self._tables, work.pieces, work.count, work.first_piece,
                self._part, self._lse, self._spec, out, self._configs,
            )  # fmt: skip
        if self._tiles is not None:
            prefill_attention(q, self.kv_cache, layer, self._tables, self._tiles, self._spec, out, self._configs)
        return out.view(len(q), -1)
