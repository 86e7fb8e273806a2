"""Attention in torch operations: the back end for CPUs, and the reference for all other back ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch, StepLengths
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.decode_attention import DecodeGroup, attend_decode, clear_decode_tails, plan_decode
from pdserve.kernels.attention.kv_pages import GatheredKeys, KvPages, check_spec
from pdserve.kernels.attention.latent_heads import LatentHeads, attend_absorbed
from pdserve.kernels.attention.prefill_attention import PrefillChunk, PrefillPlan, attend_prefill, plan_prefill
from pdserve.kernels.attention.quantized_pages import QuantizedPages, is_quantized
from pdserve.kernels.attention.score_terms import ScoreTerms

_EXPANDED_BYTES = 64 << 20
"""Most bytes of keys and values that latent rows are expanded to at once, but for one head."""


class TorchAttentionBackend:
    """Implements `AttentionBackend`. Gathers decode rows in groups of similar length, and cuts prefill chunks into tiles."""

    is_capturable = False

    def __init__(self, kv_cache: Tensor, dtype: torch.dtype | None = None) -> None:
        """kv_cache: `[num_blocks, Hkv, L, 2, bs, D]`, contiguous, or one that `QuantizedPages` takes. dtype: of queries, needed
        only with the latter. Raises: ValueError for another shape.
        """
        self._pages = QuantizedPages(kv_cache, dtype) if is_quantized(kv_cache) else KvPages(kv_cache)
        self._step: StepPlan | None = None

    def plan_arrays(self, lengths: StepLengths, specs: Sequence[AttentionSpec]) -> Mapping[str, NDArray[Any]]:
        """No arrays: `plan` needs only lengths on the host."""
        return {}

    def plan(self, batch: AttentionBatch, spec: AttentionSpec) -> TorchAttentionPlan:
        pages = self._pages
        check_spec(pages.kv_cache, spec)
        return TorchAttentionPlan(self._step_plan(batch), pages, spec)

    def _step_plan(self, batch: AttentionBatch) -> StepPlan:
        """The part that plans of this batch share, made for the first."""
        if self._step is None or self._step.batch is not batch:
            self._step = StepPlan(batch, self._pages)
        return self._step


class StepPlan:
    """The part of a step's plan that all specs share."""

    def __init__(self, batch: AttentionBatch, pages: KvPages) -> None:
        batch.verify(pages.block_size)
        self.batch = batch
        self._pages = pages
        seq_lens: list[int] = batch.seq_lens_cpu.tolist()
        self.decode_lens = seq_lens[: batch.num_decodes]
        self.chunks = _chunks(batch, seq_lens) if batch.num_decodes < len(seq_lens) else []
        self._has_clear_tails = False

    @cached_property
    def write_rows(self) -> Tensor:
        """`KvPages.write_rows` of the batch's slots. Made when torch stores: C++ needs none."""
        return self._pages.write_rows(self.batch.slot_mapping)

    def part(self, sequences: Sequence[int]) -> tuple[StepPlan, Tensor]:
        """`AttentionBatch.part`, whose tails are clear where this step's are."""
        batch, rows = self.batch.part(sequences)
        made = StepPlan(batch, self._pages)
        made._has_clear_tails = self._has_clear_tails
        return made, rows

    def clear_tails(self, pages: KvPages, *, is_masked: bool) -> None:
        """Zero keys after the last token of decode rows, once per batch; in blocks that are new to a row, once per block.

        is_masked: True if keys of this step are masked: without `new_tails` no other step needs zeros.
        """
        if not self._has_clear_tails and (is_masked or self.batch.new_tails is not None):
            clear_decode_tails(self.batch, pages)
            self._has_clear_tails = True


def _chunks(batch: AttentionBatch, seq_lens: list[int]) -> list[PrefillChunk]:
    starts = batch.query_start_loc_cpu.tolist()
    return [
        PrefillChunk.of_sequence(starts[index], starts[index + 1], seq_lens[index], batch.block_tables[index])
        for index in range(batch.num_decodes, len(seq_lens))
    ]


@dataclass(frozen=True, slots=True)
class LatentForms:
    """The forms in which a step attends over latent rows: `latent_heads.py`."""

    expanded: list[PrefillPlan]
    """Chunks in the expanded form."""
    rest: TorchAttentionPlan | None
    """For all other rows; None: there are none, or nothing is expanded."""
    rest_rows: Tensor | slice
    """The rows of `rest` in the batch."""


class TorchAttentionPlan:
    """Implements `AttentionPlan`."""

    def __init__(self, step: StepPlan, pages: KvPages, spec: AttentionSpec) -> None:
        self.kv_cache = pages.kv_cache
        self.slot_mapping = step.batch.slot_mapping
        self._pages = pages
        self._spec = spec
        self._num_decodes = step.batch.num_decodes
        self._step = step
        self._forms: dict[tuple[int, int, int], LatentForms] = {}
        self._plan_decodes(step)
        self._plan_chunks(step)

    def _plan_decodes(self, step: StepPlan) -> None:
        pages = self._pages
        self._groups = plan_decode(step.batch, step.decode_lens, pages, self._spec)
        step.clear_tails(pages, is_masked=any(group.mask is not None for group in self._groups))

    def _plan_chunks(self, step: StepPlan) -> None:
        self._prefills = [plan_prefill(chunk, self._pages, self._spec) for chunk in step.chunks]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._pages.store(layer, self._step.write_rows, k, v)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        distance_bias: Tensor | None = None,
    ) -> Tensor:
        spec, more = self._spec, ScoreTerms(sinks, distance_bias)
        num_tokens = q.shape[0]
        queries = q.view(num_tokens, spec.num_kv_heads, -1, spec.head_dim)
        if self._num_decodes == num_tokens and (only := self._attend_at_once(layer, queries, more)) is not None:
            return only.reshape(num_tokens, -1)
        out = queries.new_empty((*queries.shape[:-1], spec.output_dim))
        if self._num_decodes:
            self._attend_decodes(layer, queries[: self._num_decodes], out[: self._num_decodes], more)
        if self._num_decodes < num_tokens:
            self._attend_chunks(layer, queries, k, v, out, more)
        return out.view(num_tokens, -1)

    def attend_latent(self, layer: int, heads: LatentHeads, queries: Tensor, rows: Tensor) -> Tensor:
        """`latent_heads.attend_latent`: decode rows and small chunks in the absorbed form, other chunks in the expanded one."""
        sizes = heads.nope_dim, heads.rank, heads.value_dim
        if sizes not in self._forms:
            self._forms[sizes] = self._plan_forms(heads)
        forms = self._forms[sizes]
        if not forms.expanded:
            return attend_absorbed(self, layer, heads, queries, rows)
        out = queries.new_empty((len(queries), heads.num_heads, heads.value_dim))
        if forms.rest is not None:
            own = forms.rest_rows
            out[own] = attend_absorbed(forms.rest, layer, heads, queries[own], rows[own]).view(-1, *out.shape[1:])
        for plan in forms.expanded:
            self._attend_expanded(layer, heads, plan, queries, rows, out)
        return out.flatten(1)

    def _plan_forms(self, heads: LatentHeads) -> LatentForms:
        chunks = self._step.chunks
        is_expanded = [
            chunk.context_len >= 0 and heads.expands(chunk.context_len, chunk.num_tokens) for chunk in chunks
        ]
        expanded = [
            plan_prefill(chunk, self._pages, self._spec)
            for chunk, chosen in zip(chunks, is_expanded, strict=True)
            if chosen
        ]
        others = [self._num_decodes + index for index, chosen in enumerate(is_expanded) if not chosen]
        if not expanded or not self._num_decodes + len(others):
            return LatentForms(expanded, None, slice(0))
        step, rows = self._step.part([*range(self._num_decodes), *others])
        return LatentForms(expanded, self._part(step), rows if others else slice(self._num_decodes))

    def _part(self, step: StepPlan) -> TorchAttentionPlan:
        """A plan like this one for a part of its step."""
        return TorchAttentionPlan(step, self._pages, self._spec)

    def _attend_expanded(
        self, layer: int, heads: LatentHeads, plan: PrefillPlan, queries: Tensor, rows: Tensor, out: Tensor
    ) -> None:
        """Write the rows of one chunk; queries `[T, Hq, nope + rope]`, out `[T, Hq, value]`."""
        first, stop = plan.chunk.query_start, plan.chunk.query_start + plan.chunk.num_tokens
        seen = rows[first:stop, 0] if plan.source is None else self._pages.gather(layer, plan.source)[0][0, 0]
        numbers = queries.shape[2] + heads.value_dim
        at_once = max(1, _EXPANDED_BYTES // (len(seen) * numbers * seen.element_size()))
        for head in range(0, heads.num_heads, at_once):
            end = min(head + at_once, heads.num_heads)
            both = self._pages.expanded_room((end - head, len(seen), numbers))
            heads.expand(seen, head, both)
            spec = replace(
                self._spec, num_heads=end - head, num_kv_heads=end - head, head_dim=queries.shape[2], value_dim=None
            )
            self._attend_keys(queries[first:stop, head:end], both, plan, spec, out[first:stop, head:end])

    def _attend_keys(self, q: Tensor, both: Tensor, plan: PrefillPlan, spec: AttentionSpec, out: Tensor) -> None:
        """q `[n, h, D]`; both `[h, S, D + Dv]`: keys and values; out `[n, h, Dv]`, a view."""
        keys, values = both[..., : spec.head_dim], both[..., spec.head_dim :]
        attend_prefill(q.unsqueeze(2), keys, values, plan, spec, out.unsqueeze(2))

    def _attend_at_once(self, layer: int, queries: Tensor, more: ScoreTerms) -> Tensor | None:
        """Attention of a step of one group, in the tensor that its call returns; None for other steps."""
        return self._attend_group(layer, queries, self._groups[0], more) if len(self._groups) == 1 else None

    def _attend_decodes(self, layer: int, queries: Tensor, out: Tensor, more: ScoreTerms) -> None:
        """Write the decode rows; queries and out `[num_decodes, Hkv, G, *]`, out contiguous."""
        for group in self._groups:
            out[group.start : group.stop] = self._attend_group(layer, queries[group.start : group.stop], group, more)

    def _attend_chunks(self, layer: int, queries: Tensor, k: Tensor, v: Tensor, out: Tensor, more: ScoreTerms) -> None:
        """Write the rows after the decode rows; queries and out `[T, Hkv, G, *]`, out contiguous, k and v those of `attend`."""
        for plan in self._prefills:
            first, stop = plan.chunk.query_start, plan.chunk.query_start + plan.chunk.num_tokens
            if plan.source is None:
                keys, values = k[first:stop].transpose(0, 1), v[first:stop].transpose(0, 1)
            else:
                keys, values = (gathered[0] for gathered in self._gathered(layer, plan.source))
            attend_prefill(queries[first:stop], keys, values, plan, self._spec, out[first:stop], more)

    def _attend_group(self, layer: int, q: Tensor, group: DecodeGroup, more: ScoreTerms) -> Tensor:
        k, v = self._gathered(layer, group.source)
        return attend_decode(q, k, v, group, self._spec, more)

    def _gathered(self, layer: int, source: GatheredKeys) -> tuple[Tensor, Tensor]:
        """Keys `[B, Hkv, S, D]` and values."""
        k, v = self._pages.gather(layer, source)
        return k, v if self._spec.value_dim is None else v[..., : self._spec.value_dim]
