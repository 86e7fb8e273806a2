"""Attention on a CPU in C++: decode rows (`paged_decode.h`) and prompt chunks (`paged_prefill.h`).

A KV head's keys are read once for all of its query heads, decode's in place. The keys of a decode row are cut into pieces of 256
tokens by the row's own length, and joined in order; those of a chunk's row are taken in tiles that begin at multiples of 64 tokens.
So a row has the same bits whatever is next to it, with any number of threads, and a chunk's row wherever the chunk begins.

Latent rows have many query heads per KV head, so a decode row over them is a chunk of one token whose keys are cut into pieces: its
heads lie side by side in vectors, and no key is transposed.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.kv_pages import KvPages, check_spec, has_latent_rows
from pdserve.kernels.attention.prefill_attention import PrefillPlan
from pdserve.kernels.attention.score_terms import ScoreTerms
from pdserve.kernels.attention.torch_attention import StepPlan, TorchAttentionBackend, TorchAttentionPlan
from pdserve.kernels.native.native_library import NATIVE_DTYPES, DecodeArguments, NativeLibrary, PrefillArguments

_MAX_HEAD_DIM = 512
"""Of keys and values; latent rows may be longer."""
_PIECE_TOKENS = 256
"""Keys of one piece of a decode row over latent rows: `PrefillArguments.piece_tokens`."""
CHANGED = "block_tables changed after the plan: a block number is outside the cache"


def unsupported(kv_cache: Tensor) -> str | None:
    """Say why C++ cannot attend over this cache; None if it can."""
    if kv_cache.device.type != "cpu":
        return f"it needs a cache in main memory; the device is {str(kv_cache.device)!r}"
    if kv_cache.dtype not in NATIVE_DTYPES:
        return f"it supports float32 and bfloat16; the cache is {str(kv_cache.dtype).removeprefix('torch.')}"
    if kv_cache.dim() == 6 and kv_cache.shape[5] > _MAX_HEAD_DIM and not has_latent_rows(kv_cache):
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
        self._partials, self._rooms = torch.empty(0), torch.empty(0)

    def plan(self, batch: AttentionBatch, spec: AttentionSpec) -> TorchAttentionPlan:
        pages = self._pages
        check_spec(pages.kv_cache, spec)
        if spec.sinks or spec.distance_bias:
            # torch operations compute them
            return TorchAttentionPlan(self._step_plan(batch), pages, spec)
        made = NativeAttentionPlan if spec.value_dim is None else NativeLatentPlan
        return made(self._step_plan(batch), pages, spec, self)

    def attend_decodes(self, call: DecodeArguments) -> None:
        """Write `call.out`."""
        self.give_room(call)
        if self._native_library.paged_decode(byref(call), self._level):
            raise ValueError(CHANGED)

    def give_room(self, call: DecodeArguments) -> None:
        """Set `call.partials`, since the room may have grown for another plan of the step."""
        call.partials = self._partials.data_ptr()

    def attend_chunks(self, call: PrefillArguments) -> None:
        """Write the rows of `call.out` that belong to its chunks."""
        self.give_rooms(call)
        if self._native_library.paged_prefill(byref(call), self._level):
            raise ValueError(CHANGED)

    def give_rooms(self, call: PrefillArguments) -> None:
        """Set `call.rooms` and `call.partials`, for the same reason."""
        call.rooms, call.partials = self._rooms.data_ptr(), self._partials.data_ptr()

    def prepare_decode(self, call: DecodeArguments, partial_size: int) -> None:
        """Fill `call.piece_starts`, and give the call room for its pieces, shared by all plans.

        partial_size: numbers of one piece. Raises: ValueError for a block number outside the cache.
        """
        num_pieces = self._native_library.plan_decode(byref(call))
        if num_pieces < 0:
            raise _outside(-1 - num_pieces, call)
        if self._partials.numel() < num_pieces * partial_size:
            self._partials = torch.empty(num_pieces * partial_size * 3 // 2)
        call.parallel = self._native_library.parallel

    def prepare_prefill(self, call: PrefillArguments, first: int) -> None:
        """Fill `call.task_starts`, and give each of its threads a room, and its pieces room, shared by all plans.

        first: the sequence of the first chunk. Raises: ValueError for a block number outside the cache.
        """
        num_tasks = self._native_library.plan_prefill(byref(call))
        if num_tasks < 0:
            raise _outside(first - 1 - num_tasks, call)
        size = call.num_threads * self._native_library.prefill_room(call.head_dim, call.value_dim)
        if self._rooms.numel() < size:
            self._rooms = torch.empty(size)
        size = num_tasks * self._native_library.prefill_partial(call.value_dim) if call.piece_tokens else 0
        if self._partials.numel() < size:
            self._partials = torch.empty(size * 3 // 2)
        call.parallel = self._native_library.parallel


def _outside(sequence: int, call: DecodeArguments | PrefillArguments) -> ValueError:
    return ValueError(
        f"block_tables of sequence {sequence} names a block outside the cache of {call.num_blocks} blocks"
    )


class NativeAttentionPlan(TorchAttentionPlan):
    """Implements `AttentionPlan`."""

    def __init__(self, step: StepPlan, pages: KvPages, spec: AttentionSpec, backend: NativeAttentionBackend) -> None:
        self._backend = backend
        # held here, since calls have only addresses
        self._tables = step.batch.block_tables
        if self._tables.stride(-1) != 1:
            self._tables = self._tables.contiguous()
        self._lens = step.batch.seq_lens_cpu.contiguous()
        super().__init__(step, pages, spec)

    def _plan_decodes(self, step: StepPlan) -> None:
        size = self._num_decodes
        self._piece_starts = torch.empty(size + 1, dtype=torch.int64)
        self._decode_call = call = DecodeArguments(
            block_tables=self._tables.data_ptr(), table_stride=self._tables.stride(0), table_width=self._tables.shape[1],
            seq_lens=self._lens.data_ptr(), num_seqs=size, piece_starts=self._piece_starts.data_ptr(),
        )  # fmt: skip
        self._fill(call)
        if size:
            self._backend.prepare_decode(call, self._spec.num_heads * (self._spec.head_dim + 2))

    def _plan_chunks(self, step: StepPlan) -> None:
        first, size = self._num_decodes, len(self._lens) - self._num_decodes
        self._prefill_call: PrefillArguments | None = None
        if not size:
            return
        self._prefill_call, self._task_starts = self._chunk_call(step, first, size)

    def _chunk_call(
        self, step: StepPlan, first: int, size: int, piece_tokens: int = 0
    ) -> tuple[PrefillArguments, Tensor]:
        """The call for `size` sequences from `first` on, and memory that it writes."""
        pages, spec = self._pages, self._spec
        self._query_starts = step.batch.query_start_loc_cpu.contiguous()
        task_starts = torch.empty(size + 1, dtype=torch.int64)
        tables, value_dim = self._tables[first:], spec.output_dim
        call = PrefillArguments(
            num_planes=pages.rows_per_token, row_dim=pages.head_dim, value_dim=value_dim,
            value_offset=0 if spec.value_dim is not None else pages.block_size * pages.head_dim,
            block_tables=tables.data_ptr(), table_stride=tables.stride(0), table_width=tables.shape[1],
            query_starts=self._query_starts[first:].data_ptr(), seq_lens=self._lens[first:].data_ptr(), num_chunks=size,
            is_causal=spec.causal, out_stride=spec.num_heads * value_dim, task_starts=task_starts.data_ptr(),
            piece_tokens=piece_tokens,
        )  # fmt: skip
        self._fill(call)
        self._backend.prepare_prefill(call, first)
        return call, task_starts

    def calls(self) -> tuple[DecodeArguments, PrefillArguments | None]:
        """Return the calls for decode rows, which come first and may be none, and for chunks, without layer, queries and output.

        Valid until the next plan.
        """
        self._backend.give_room(self._decode_call)
        if self._prefill_call is not None:
            self._backend.give_rooms(self._prefill_call)
        return self._decode_call, self._prefill_call

    def _fill(self, call: DecodeArguments | PrefillArguments) -> None:
        """Set what is the same for decode rows and chunks."""
        pages, spec = self._pages, self._spec
        call.kv_cache, call.dtype = pages.kv_cache.data_ptr(), NATIVE_DTYPES[pages.kv_cache.dtype]
        call.num_blocks, call.num_kv_heads, call.num_layers = pages.num_blocks, pages.num_kv_heads, pages.num_layers
        call.block_size, call.head_dim = pages.block_size, pages.head_dim
        call.group_size, call.window, call.chunk = (
            spec.num_heads // spec.num_kv_heads,
            spec.window or 0,
            spec.chunk or 0,
        )
        call.scale, call.softcap = spec.scale, spec.softcap or 0.0
        call.num_threads = torch.get_num_threads()

    def _attend_at_once(self, layer: int, queries: Tensor, more: ScoreTerms) -> None:
        return None

    def _attend_decodes(self, layer: int, queries: Tensor, out: Tensor, more: ScoreTerms) -> None:
        """queries and out `[num_decodes, Hkv, G, D]`; out is contiguous."""
        held = self._set_rows(self._decode_call, layer, queries, out)
        self._backend.attend_decodes(self._decode_call)
        del held

    def _attend_chunks(self, layer: int, queries: Tensor, k: Tensor, v: Tensor, out: Tensor, more: ScoreTerms) -> None:
        """Keys and values are read in the pages, where `store` wrote those of this step."""
        call = self._prefill_call
        assert call is not None
        held = self._set_rows(call, layer, queries, out)
        self._backend.attend_chunks(call)
        del held

    def _set_rows(self, call: DecodeArguments | PrefillArguments, layer: int, queries: Tensor, out: Tensor) -> Tensor:
        """Set the layer, queries `[n, Hkv, G, D]` and out, contiguous; the result is to be held until the call has ended."""
        if not 0 <= layer < self._pages.num_layers:
            raise IndexError(f"layer {layer} of {self._pages.num_layers}")
        queries = queries.flatten(1, 2)
        if queries.stride(2) != 1 or queries.dtype is not self._pages.kv_cache.dtype:
            queries = queries.to(self._pages.kv_cache.dtype).contiguous()
        call.layer, call.q, call.out = layer, queries.data_ptr(), out.data_ptr()
        call.q_stride, call.q_head_stride = queries.stride()[:2]
        return queries


class NativeLatentPlan(NativeAttentionPlan):
    """Implements `AttentionPlan` over latent rows, with `attend_latent`."""

    def _plan_decodes(self, step: StepPlan) -> None:
        size = self._num_decodes
        self._padded = [row for row, length in enumerate(step.decode_lens) if not length]
        self._latent_call: PrefillArguments | None = None
        if size:
            self._latent_call, self._latent_starts = self._chunk_call(step, 0, size, _PIECE_TOKENS)

    def calls(self) -> tuple[DecodeArguments, PrefillArguments | None]:
        raise NotImplementedError("layers over latent rows are not fused")

    def _attend_decodes(self, layer: int, queries: Tensor, out: Tensor, more: ScoreTerms) -> None:
        call = self._latent_call
        assert call is not None
        held = self._set_rows(call, layer, queries, out)
        self._backend.attend_chunks(call)
        if self._padded:
            out[self._padded] = 0
        del held

    def _part(self, step: StepPlan) -> TorchAttentionPlan:
        return NativeLatentPlan(step, self._pages, self._spec, self._backend)

    def _attend_keys(self, q: Tensor, both: Tensor, plan: PrefillPlan, spec: AttentionSpec, out: Tensor) -> None:
        """`both` is read as a cache of one block."""
        if q.stride(2) != 1:
            q = q.contiguous()
        starts, table = torch.tensor([0, len(q)]), torch.zeros(1, dtype=torch.int64)
        lens, task_starts = torch.tensor([both.shape[1]]), torch.empty(2, dtype=torch.int64)
        call = PrefillArguments(
            kv_cache=both.data_ptr(), num_blocks=1, num_kv_heads=len(both), num_layers=1, block_size=both.shape[1],
            head_dim=spec.head_dim, dtype=NATIVE_DTYPES[both.dtype], num_planes=1, row_dim=both.shape[2],
            value_dim=out.shape[2], value_offset=spec.head_dim, block_tables=table.data_ptr(), table_stride=1, table_width=1,
            query_starts=starts.data_ptr(), seq_lens=lens.data_ptr(), num_chunks=1, group_size=1, window=spec.window or 0,
            chunk=spec.chunk or 0, is_causal=spec.causal, scale=spec.scale, softcap=spec.softcap or 0.0,
            q=q.data_ptr(), q_stride=q.stride(0), q_head_stride=q.stride(1), out=out.data_ptr(), out_stride=out.stride(0),
            task_starts=task_starts.data_ptr(),
            num_threads=torch.get_num_threads(),
        )  # fmt: skip
        self._backend.prepare_prefill(call, 0)
        self._backend.attend_chunks(call)
