"""Attention on a processor: decode rows in C++ (`paged_decode.h`), everything else in torch operations.

A KV head's keys are read once for all of its query heads, in place. The keys of a row are cut into pieces of 256 tokens by the
row's own length, and joined in order: a row has the same bits whatever is beside it, with any number of threads.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.kv_pages import KvPages, check_spec
from pdserve.kernels.attention.score_terms import ScoreTerms
from pdserve.kernels.attention.torch_attention import StepPlan, TorchAttentionBackend, TorchAttentionPlan
from pdserve.kernels.native.native_library import NATIVE_DTYPES, DecodeCall, NativeLibrary

_MAX_HEAD_DIM = 512


def unsupported(kv_cache: Tensor) -> str | None:
    """Say why C++ cannot attend over this cache; None if it can."""
    if kv_cache.device.type != "cpu":
        return f"it needs a cache in main memory; the device is {str(kv_cache.device)!r}"
    if kv_cache.dtype not in NATIVE_DTYPES:
        return f"it supports float32 and bfloat16; the cache is {str(kv_cache.dtype).removeprefix('torch.')}"
    if kv_cache.dim() == 6 and kv_cache.shape[5] > _MAX_HEAD_DIM:
        return f"it supports heads of at most {_MAX_HEAD_DIM} numbers; the cache has {kv_cache.shape[5]}"
    return None


class NativeAttentionBackend(TorchAttentionBackend):
    """Implements `AttentionBackend`."""

    def __init__(self, kv_cache: Tensor, library: NativeLibrary, level: str | None = None) -> None:
        """level: one of `library.levels`; default: the fastest. Raises: ValueError for a cache that C++ cannot read."""
        if reason := unsupported(kv_cache):
            raise ValueError(f"native attention: {reason}")
        super().__init__(kv_cache)
        self._native_library = library
        self._level = 0 if level is None else library.levels.index(level)
        self._partials = torch.empty(0)

    def plan(self, batch: AttentionBatch, spec: AttentionSpec) -> TorchAttentionPlan:
        pages = self._pages
        check_spec(pages.kv_cache, spec)
        if spec.sinks or spec.distance_bias:
            # torch operations compute them
            return TorchAttentionPlan(self._step_plan(batch), pages, spec)
        return NativeAttentionPlan(self._step_plan(batch), pages, spec, self)

    def attend(self, call: DecodeCall) -> None:
        """Write `call.out`."""
        # the room may have grown for another plan of the step
        call.partials = self._partials.data_ptr()
        if self._native_library.paged_decode(byref(call), self._level):
            raise ValueError("block_tables changed after the plan: a block number is outside the cache")

    def prepare(self, call: DecodeCall, partial_size: int) -> None:
        """Fill `call.piece_starts`, and give the call room for its pieces, shared by all plans.

        partial_size: numbers of one piece. Raises: ValueError for a block number outside the cache.
        """
        num_pieces = self._native_library.plan_decode(byref(call))
        if num_pieces < 0:
            raise ValueError(
                f"block_tables of sequence {-1 - num_pieces} names a block outside the cache of {call.num_blocks} blocks"
            )
        if self._partials.numel() < num_pieces * partial_size:
            self._partials = torch.empty(num_pieces * partial_size * 3 // 2)
        call.parallel = self._native_library.parallel


class NativeAttentionPlan(TorchAttentionPlan):
    """Implements `AttentionPlan`."""

    def __init__(self, step: StepPlan, pages: KvPages, spec: AttentionSpec, backend: NativeAttentionBackend) -> None:
        self._backend = backend
        super().__init__(step, pages, spec)

    def _plan_decodes(self, step: StepPlan) -> None:
        pages, spec, batch = self._pages, self._spec, step.batch
        size = batch.num_decodes
        # held here: the call has addresses alone
        self._tables = batch.block_tables if batch.block_tables.stride(-1) == 1 else batch.block_tables.contiguous()
        self._lens = batch.seq_lens_cpu.contiguous()
        self._starts = torch.empty(size + 1, dtype=torch.int64)
        group_size = spec.num_heads // spec.num_kv_heads
        self._call = call = DecodeCall(
            kv_cache=pages.kv_cache.data_ptr(), num_blocks=pages.num_blocks, num_kv_heads=pages.num_kv_heads,
            num_layers=pages.num_layers, block_size=pages.block_size, head_dim=pages.head_dim,
            dtype=NATIVE_DTYPES[pages.kv_cache.dtype], block_tables=self._tables.data_ptr(), table_stride=self._tables.stride(0),
            table_width=self._tables.shape[1], seq_lens=self._lens.data_ptr(), num_seqs=size, group_size=group_size,
            window=spec.window or 0, scale=spec.scale, softcap=spec.softcap or 0.0, piece_starts=self._starts.data_ptr(),
            num_threads=torch.get_num_threads(),
        )  # fmt: skip
        if size:
            self._backend.prepare(call, spec.num_heads * (spec.head_dim + 2))

    def _attend_at_once(self, layer: int, queries: Tensor, more: ScoreTerms) -> None:
        return None

    def _attend_decodes(self, layer: int, queries: Tensor, out: Tensor, more: ScoreTerms) -> None:
        """queries and out `[num_decodes, Hkv, G, D]`; out is contiguous."""
        if not 0 <= layer < self._pages.num_layers:
            raise IndexError(f"layer {layer} of {self._pages.num_layers}")
        queries = queries.flatten(1, 2)
        if queries.stride(2) != 1 or queries.dtype is not self._pages.kv_cache.dtype:
            queries = queries.to(self._pages.kv_cache.dtype).contiguous()
        call = self._call
        call.layer, call.q, call.out = layer, queries.data_ptr(), out.data_ptr()
        call.q_stride, call.q_head_stride = queries.stride()[:2]
        self._backend.attend(call)
