"""Attention in Triton kernels: the back end for GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch, StepLengths
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.kv_pages import check_cache, check_spec, has_latent_rows
from pdserve.kernels.triton.attention.attention_configs import AttentionConfigs, Prefill, attention_configs
from pdserve.kernels.triton.attention.attention_launch import head_tile
from pdserve.kernels.triton.attention.decode_attention import decode_attention
from pdserve.kernels.triton.attention.fused_attention import FusedAttention, fused_attention
from pdserve.kernels.triton.attention.prefill_attention import add_context, prefill_attention
from pdserve.kernels.triton.attention.prefill_tiles import FIELDS
from pdserve.kernels.triton.attention.step_buffers import StepBuffers
from pdserve.kernels.triton.attention.step_lists import SpecLists, StepLists, decode_places
from pdserve.kernels.triton.attention.store_kv import store_kv
from pdserve.kernels.triton.launch_configs import architecture


class TritonAttentionBackend:
    """Implements `AttentionBackend`. A step of decode rows is capturable: its launches depend on the number of rows only. So is
    one of chunks with `most_chunks`, whose launches depend on that and the number of tokens.

    Lengths are in lists on the device, at addresses that stay. Bytes after a sequence's end are not read, so none is overwritten.
    """

    is_capturable = True

    def __init__(self, kv_cache: Tensor, prefill: Prefill | None = None) -> None:
        """kv_cache: `[num_blocks, Hkv, L, 2 or 1, bs, D]`, contiguous; prefill: as in `AttentionConfigs`, None: what the
        architecture's table says. Raises: ValueError for another shape, or `sdpa` over latent rows."""
        check_cache(kv_cache)
        latent = has_latent_rows(kv_cache)
        if latent and prefill == "sdpa":
            raise ValueError("torch's fused attention reads keys and values, and the cache has latent rows")
        self.kv_cache = kv_cache
        configs = attention_configs(architecture(kv_cache.device), kv_cache.shape[5], latent=latent)
        self._configs = configs if prefill is None else replace(configs, prefill=prefill)
        self._buffers = StepBuffers(kv_cache.device)
        self._step: _Step | None = None
        self._fused: dict[AttentionSpec, FusedAttention | None] = {}

    def plan_arrays(self, lengths: StepLengths, specs: Sequence[AttentionSpec]) -> Mapping[str, NDArray[Any]]:
        """Pieces of decode rows, tiles of chunks."""
        lists = StepLists(lengths)
        for spec in specs:
            self._lists_of(spec, lists)
        return lists.arrays

    def plan(self, batch: AttentionBatch, spec: AttentionSpec) -> TritonAttentionPlan:
        check_spec(self.kv_cache, spec)
        if self._step is None or self._step.batch is not batch:
            batch.verify(self.kv_cache.shape[4])
            self._step = _Step(batch, self._buffers)
        lists = self._lists_of(spec, self._step.lists)
        return TritonAttentionPlan(self.kv_cache, self._step, lists, spec, self._configs, self._fused_attention(spec))

    def _lists_of(self, spec: AttentionSpec, lists: StepLists) -> SpecLists:
        tile = head_tile(spec, self.kv_cache, self._configs)
        full_chunk = self._configs.full_chunk if self._fused_attention(spec) else None
        return lists.of_spec(spec, tile.prefill_tokens, full_chunk, tile.piece_tokens)

    def _fused_attention(self, spec: AttentionSpec) -> FusedAttention | None:
        """The kernel of full chunks; None: they are computed as all others."""
        if self._configs.prefill == "triton":
            return None
        if spec not in self._fused:
            self._fused[spec] = fused_attention(spec, self.kv_cache, self._configs.fused)
        return self._fused[spec]


class _Step:
    """The part of a step's plan that all specs share, and the lists that some of them do."""

    def __init__(self, batch: AttentionBatch, buffers: StepBuffers) -> None:
        self.batch = batch
        self.buffers = buffers
        self.lists = StepLists(batch.lengths, {name: array.host for name, array in batch.plan_arrays.items()})
        self._placed: dict[str, Tensor] = {}
        num_tokens, (num_seqs, width) = len(batch.slot_mapping), batch.block_tables.shape
        self.slot_mapping = buffers.room("slots", num_tokens, torch.int64)[:num_tokens]
        self.slot_mapping.copy_(batch.slot_mapping)
        columns = buffers.row_width(width)
        tables = buffers.room("tables", num_seqs * columns, torch.int32)
        self.tables = tables[: num_seqs * columns].view(num_seqs, columns)
        self.tables[:, :width].copy_(batch.block_tables)

    def placed(self, name: str) -> Tensor:
        """A buffer that begins with this list."""
        if name not in self._placed:
            staged = self.batch.plan_arrays.get(name)
            numbers = torch.from_numpy(self.lists.arrays[name]) if staged is None else staged.there
            self._placed[name] = self.buffers.put(name, numbers)
        return self._placed[name]

    def seq_lens(self) -> Tensor:
        """`[>= B]` int32: a buffer that begins with the sequences' lengths."""
        if "seq_lens" not in self._placed:
            self._placed["seq_lens"] = self.buffers.put("seq_lens", self.batch.seq_lens.to(torch.int32))
        return self._placed["seq_lens"]

    def tiles(self, name: str | None) -> Tensor | None:
        """`[n, 5]`"""
        if name is None:
            return None
        return self.placed(name)[: self.lists.arrays[name].size].view(-1, FIELDS)


@dataclass(frozen=True, slots=True)
class _FullChunk:
    """A chunk that attends to itself in torch's fused attention."""

    start: int
    """First row of the batch."""
    stop: int
    tiles: Tensor | None
    """`[n, 5]`: the chunk's rows over the keys before it; None: there are none."""


class TritonAttentionPlan:
    """Implements `AttentionPlan`."""

    def __init__(
        self,
        kv_cache: Tensor,
        step: _Step,
        lists: SpecLists,
        spec: AttentionSpec,
        configs: AttentionConfigs,
        fused: FusedAttention | None,
    ) -> None:
        """lists: of `step.lists`, for this spec. fused: computes full chunks over themselves; None: no chunk is full."""
        self.kv_cache = kv_cache
        self.slot_mapping = step.slot_mapping
        self._spec = spec
        self._configs = configs
        self._tables = step.tables
        self._num_decodes = step.batch.num_decodes
        self._fused = fused
        if lists.pieces is not None:
            places = decode_places(self._num_decodes)
            there = step.placed(lists.pieces)
            self._count, self._first_piece = there[places.count : places.count + 1], there[places.first_piece]
            self._pieces = there[places.pieces :]
            num_heads = int(step.lists.arrays[lists.pieces][places.count]) * spec.num_heads
            self._part = step.buffers.room("part", num_heads * spec.output_dim, torch.float32)
            self._lse = step.buffers.room("lse", num_heads, torch.float32)
            self._seq_lens = step.seq_lens() if spec.distance_bias else None
        self._full_chunks = [
            _FullChunk(chunk.start, chunk.stop, step.tiles(chunk.tiles)) for chunk in lists.full_chunks
        ]
        self._tiles = step.tiles(lists.tiles)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        store_kv(k, v, self.kv_cache, layer, self.slot_mapping)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        distance_bias: Tensor | None = None,
    ) -> Tensor:
        if self._full_chunks and self._full_chunks[0].stop - self._full_chunks[0].start == len(q):
            return self._attend_full_chunk(self._full_chunks[0], layer, q, k, v, None).reshape(len(q), -1)
        out = torch.empty((*q.shape[:2], self._spec.output_dim), dtype=q.dtype, device=q.device)
        num_rows = self._num_decodes
        if num_rows:
            decode_attention(
                q[:num_rows], self.kv_cache, layer, self._tables, self._pieces, self._count, self._first_piece,
                self._part, self._lse, self._spec, out, self._configs, sinks, distance_bias, self._seq_lens,
            )  # fmt: skip
        if self._tiles is not None:
            prefill_attention(
                q, self.kv_cache, layer, self._tables, self._tiles, self._spec, out, self._configs, sinks, distance_bias
            )
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
