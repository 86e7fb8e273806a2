"""Attention in Triton kernels: the back end for GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.attention_batch import AttentionBatch
from pdserve.kernels.attention_spec import AttentionSpec
from pdserve.kernels.kv_pages import check_cache, check_spec
from pdserve.kernels.triton.attention.attention_configs import AttentionConfigs, Prefill, attention_configs
from pdserve.kernels.triton.attention.attention_launch import head_tile
from pdserve.kernels.triton.attention.decode_attention import decode_attention
from pdserve.kernels.triton.attention.decode_pieces import cut_into_pieces
from pdserve.kernels.triton.attention.fused_attention import FusedAttention, fused_attention
from pdserve.kernels.triton.attention.prefill_attention import add_context, prefill_attention
from pdserve.kernels.triton.attention.prefill_tiles import FIELDS, cut_into_tiles
from pdserve.kernels.triton.attention.step_buffers import StepBuffers
from pdserve.kernels.triton.attention.store_kv import store_kv
from pdserve.kernels.triton.launch_configs import architecture


class TritonAttentionBackend:
    """Implements `AttentionBackend`. A step of decode rows alone is capturable: its launches depend on the number of rows alone.

    Lengths are in lists on the device, at addresses that stay. Bytes behind a sequence's end are not read, so none is overwritten.
    """

    is_capturable = True

    def __init__(self, kv_cache: Tensor, prefill: Prefill | None = None) -> None:
        """kv_cache: `[num_blocks, Hkv, L, 2, bs, D]`, contiguous; prefill: as in `AttentionConfigs`, None: what the architecture's
        table says. Raises: ValueError for another shape."""
        check_cache(kv_cache)
        self.kv_cache = kv_cache
        configs = attention_configs(architecture(kv_cache.device), kv_cache.shape[5])
        self._configs = configs if prefill is None else replace(configs, prefill=prefill)
        self._buffers = StepBuffers(kv_cache.device)
        self._step: _Step | None = None
        self._fused: dict[AttentionSpec, FusedAttention | None] = {}

    def plan(self, batch: AttentionBatch, spec: AttentionSpec) -> TritonAttentionPlan:
        check_spec(self.kv_cache, spec)
        if self._step is None or self._step.batch is not batch:
            batch.verify(self.kv_cache.shape[4])
            self._step = _Step(batch, self._buffers)
        return TritonAttentionPlan(self.kv_cache, self._step, spec, self._configs, self._fused_attention(spec))

    def _fused_attention(self, spec: AttentionSpec) -> FusedAttention | None:
        """The kernel of full chunks; None: they are computed as all others."""
        if self._configs.prefill == "triton":
            return None
        if spec not in self._fused:
            self._fused[spec] = fused_attention(spec, self.kv_cache, self._configs.fused)
        return self._fused[spec]


@dataclass(frozen=True, slots=True)
class _DecodeList:
    """The arguments of `decode_attention` that come from lengths."""

    pieces: Tensor
    count: Tensor
    first_piece: Tensor
    num_pieces: int


@dataclass(frozen=True, slots=True)
class _FullChunk:
    """A chunk that attends to itself in torch's fused attention."""

    start: int
    """First row of the batch."""
    stop: int
    tiles: Tensor | None
    """`[n, 5]`: the chunk's rows over the keys before it; None: there are none."""


class _Step:
    """The part of a step's plan that all specs share, and the lists that some of them do."""

    def __init__(self, batch: AttentionBatch, buffers: StepBuffers) -> None:
        self.batch = batch
        self.buffers = buffers
        self._decode_lists: dict[int | None, _DecodeList] = {}
        self._tiles: dict[str, Tensor] = {}
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

    def full_chunks(self, spec: AttentionSpec, multiple: int) -> tuple[int, ...]:
        """Sequences whose chunk has a multiple of this number of tokens, and no key that a window hides."""
        query_lens: list[int] = self.batch.query_start_loc_cpu.diff().tolist()
        seq_lens: list[int] = self.batch.seq_lens_cpu.tolist()
        longest = spec.window or self.batch.max_seq_len
        return tuple(
            sequence
            for sequence in range(self.batch.num_decodes, len(seq_lens))
            if query_lens[sequence] % multiple == 0 and seq_lens[sequence] <= longest
        )

    def tiles(self, tile_tokens: int, full: tuple[int, ...]) -> Tensor | None:
        """`[n, 5]`, of the prompt chunks but those of the sequences `full`; None if there is no other."""
        batch = self.batch
        sequences = [sequence for sequence in range(batch.num_decodes, len(batch.seq_lens_cpu)) if sequence not in full]
        if not sequences:
            return None
        # specs have different full chunks only by their windows, and then different numbers of them
        name = f"tiles of {tile_tokens} tokens beside {len(full)} full chunks"
        if name not in self._tiles:
            query_lens = np.diff(batch.query_start_loc_cpu.numpy())
            tiles = cut_into_tiles(query_lens, batch.seq_lens_cpu.numpy(), np.array(sequences), tile_tokens)
            self._upload_tiles(name, tiles)
        return self._tiles[name]

    def full_chunk(self, tile_tokens: int, sequence: int) -> _FullChunk:
        """The rows of one chunk, and its tiles over the keys before it."""
        start, stop = self.batch.query_start_loc_cpu[sequence : sequence + 2].tolist()
        num_tokens, context_len = stop - start, int(self.batch.seq_lens_cpu[sequence]) - (stop - start)
        if context_len == 0:
            return _FullChunk(start, stop, None)
        name = f"tiles of {tile_tokens} tokens of sequence {sequence}"
        if name not in self._tiles:
            tiles = cut_into_tiles(np.array([num_tokens]), np.array([context_len]), np.zeros(1, np.int64), tile_tokens)
            tiles[:, 0] = sequence
            self._upload_tiles(name, tiles)
        return _FullChunk(start, stop, self._tiles[name])

    def _upload_tiles(self, name: str, tiles: NDArray[np.int32]) -> None:
        buffer = self.buffers.upload(name, tiles.reshape(-1))
        self._tiles[name] = buffer[: tiles.size].view(-1, FIELDS)


class TritonAttentionPlan:
    """Implements `AttentionPlan`."""

    def __init__(
        self,
        kv_cache: Tensor,
        step: _Step,
        spec: AttentionSpec,
        configs: AttentionConfigs,
        fused: FusedAttention | None,
    ) -> None:
        """fused: computes full chunks over themselves; None: they are computed as all others."""
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
        tile_tokens = head_tile(spec, kv_cache, configs).prefill_tokens
        full = step.full_chunks(spec, configs.full_chunk) if fused else ()
        self._fused = fused
        self._full_chunks = [step.full_chunk(tile_tokens, sequence) for sequence in full]
        self._tiles = step.tiles(tile_tokens, full)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        store_kv(k, v, self.kv_cache, layer, self.slot_mapping)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._full_chunks and self._full_chunks[0].stop - self._full_chunks[0].start == len(q):
            return self._attend_full_chunk(self._full_chunks[0], layer, q, k, v, None).reshape(len(q), -1)
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
        for chunk in self._full_chunks:
            self._attend_full_chunk(chunk, layer, q, k, v, out[chunk.start : chunk.stop])
        return out.view(len(q), -1)

    def _attend_full_chunk(
        self, chunk: _FullChunk, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None
    ) -> Tensor:
        """Rows of the chunk `[n, Hq, D]`, contiguous: `out`, or where out is None and torch's kernel puts them."""
        assert self._fused is not None
        q, k, v = (tensor[chunk.start : chunk.stop] for tensor in (q, k, v))
        of_chunk, lse = self._fused(q, k, v, self._spec)
        out = of_chunk.contiguous() if out is None else out.copy_(of_chunk)
        if chunk.tiles is not None:
            add_context(q, self.kv_cache, layer, self._tables, chunk.tiles, self._spec, out, lse, self._configs)
        return out
