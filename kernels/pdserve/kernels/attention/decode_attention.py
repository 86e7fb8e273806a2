"""Attention of one query token per sequence over its paged context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.attention_sinks import softmax_with_sinks
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.kv_pages import GatheredKeys, KvPages
from pdserve.kernels.attention.score_terms import NO_TERMS, ScoreTerms, bias_at

_GATHER_BYTES = 32 << 20
_DEVICE_GATHER_BYTES = 1 << 30
"""Most bytes of keys and values that one call gathers, on a CPU and on a GPU. More would exceed the CPU's caches and enlarge the
workspace without gain."""
_PADDING_TOKENS = 1024
"""Number of padded keys that cost about as much as one more call per layer."""
_BMM_TOKENS = 2048
"""From this many padded keys on, two batched products in bfloat16 beat the fused kernel on a CPU."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Neighbouring decode rows of similar length, attended to in one call."""

    start: int
    stop: int
    source: GatheredKeys
    mask: Tensor | None
    """Added to the scores: 0 or -inf. `[B * Hkv, 1, S]` with `by_products`, else `[B, 1, 1, S]`. None if each row attends to every
    key."""
    by_products: bool
    """Computed by two batched products instead of the fused kernel."""
    distances: Tensor | None = None
    """`[B, S]` or `[1, S]`: tokens from a key to the row's query, for a spec with a distance bias; else None."""


def plan_decode(batch: AttentionBatch, lens: list[int], pages: KvPages, spec: AttentionSpec) -> list[DecodeGroup]:
    """Split the decode rows into groups and prepare the masks and indices that all layers of this spec share.

    lens: the decode rows of `batch.seq_lens_cpu`.
    """
    if not lens:
        return []
    lens = [max(length, 1) for length in lens]
    return [_plan_group(batch, pages, spec, start, stop, lens) for start, stop in _cut(lens, pages, spec)]


def _cut(lens: list[int], pages: KvPages, spec: AttentionSpec) -> list[tuple[int, int]]:
    """Ranges of neighbouring rows with little padding that fit the workspace."""
    limit_bytes = _GATHER_BYTES if pages.like.is_cpu else _DEVICE_GATHER_BYTES
    limit = limit_bytes // (pages.rows_per_token * pages.num_kv_heads * pages.head_dim * pages.like.element_size())
    ranges = []
    start = total = longest = 0
    for row, full_length in enumerate(lens):
        length = full_length - max(spec.first_seen(full_length - 1), 0)
        padded = max(longest, length) * (row + 1 - start)
        wasted = padded - total - length
        if row > start and (padded > limit or wasted > _PADDING_TOKENS + total // 2):
            ranges.append((start, row))
            start, total, longest = row, 0, 0
        total += length
        longest = max(longest, length)
    ranges.append((start, len(lens)))
    return ranges


def _plan_group(
    batch: AttentionBatch, pages: KvPages, spec: AttentionSpec, start: int, stop: int, lens: list[int]
) -> DecodeGroup:
    block_size, size, reach = pages.block_size, stop - start, spec.reach
    longest, shortest = max(lens[start:stop]), min(lens[start:stop])
    hides_first = reach is not None and longest > reach
    tables = batch.block_tables[start:stop]

    if longest == shortest:
        # Every row attends to the same columns: no key is masked, so no stale byte is multiplied.
        first_position = max(spec.first_seen(longest - 1), 0)
        first_block = first_position // block_size
        tables = tables[:, first_block : -(-longest // block_size)]
        offset = first_block * block_size
        source = pages.plan_gather(tables, first_position - offset, longest - offset)
        by_products = _uses_products(pages.like, spec, size * (longest - first_position))
        distances = None
        if spec.distance_bias:
            distances = torch.arange(longest - 1, -1, -1, device=tables.device).unsqueeze(0)
        return DecodeGroup(start, stop, source, None, by_products, distances)

    seq_lens = batch.seq_lens[start:stop].clamp(min=1).unsqueeze(1)
    last_blocks = (seq_lens - 1) // block_size
    num_blocks = -(-longest // block_size)
    columns = torch.arange(num_blocks, device=tables.device)
    positions = torch.arange(num_blocks * block_size, device=tables.device)
    first_positions = spec.first_seen(seq_lens - 1)
    if reach is not None and hides_first:
        first_blocks = first_positions.clamp(min=0) // block_size
        span = min(num_blocks, (reach - 1) // block_size + 2)
        columns = columns[:span] + first_blocks
        positions = positions[: span * block_size] + first_blocks * block_size
    # After its end a row reads its own last block again, because the table's padding names blocks that may hold any bytes.
    tables = tables.gather(1, torch.minimum(columns, last_blocks))
    hidden = positions >= seq_lens
    if hides_first:
        hidden |= positions < first_positions
    mask = torch.zeros(hidden.shape, dtype=pages.like.dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
    by_products = _uses_products(pages.like, spec, mask.numel())
    if by_products:
        mask = mask.view(size, 1, -1).expand(-1, pages.num_kv_heads, -1).reshape(size * pages.num_kv_heads, 1, -1)
    else:
        mask = mask.view(size, 1, 1, -1)
    distances = seq_lens - 1 - positions if spec.distance_bias else None
    source = pages.plan_gather(tables, 0, positions.shape[-1])
    return DecodeGroup(start, stop, source, mask, by_products, distances)


def clear_decode_tails(batch: AttentionBatch, pages: KvPages) -> None:
    """In the last block of each decode row, zero the slots after its last token; only for `batch.new_tails` if that is given."""
    rows = batch.new_tails
    if rows is None:  # all rows except padding, whose length is 0
        rows = batch.seq_lens_cpu[: batch.num_decodes].nonzero().flatten().to(batch.seq_lens.device)
    if len(rows):
        last = batch.seq_lens[rows] - 1
        last_blocks = batch.block_tables[rows].gather(1, (last // pages.block_size).unsqueeze(1)).squeeze(1)
        pages.clear_tails(last_blocks, last.remainder(pages.block_size).add_(1))


def _uses_products(like: Tensor, spec: AttentionSpec, num_keys: int) -> bool:
    """True if two batched products are faster than the fused kernel, or do something that it cannot."""
    return (
        spec.softcap is not None
        or spec.sinks
        or spec.distance_bias
        or (like.is_cpu and like.dtype is torch.bfloat16 and num_keys >= _BMM_TOKENS)
    )


def attend_decode(
    q: Tensor, k: Tensor, v: Tensor, group: DecodeGroup, spec: AttentionSpec, more: ScoreTerms = NO_TERMS
) -> Tensor:
    """`softmax(cap(scale * q k^T) + bias + mask) v`; the G query heads of a KV head are G rows of one product.

    q `[B, Hkv, G, D]`, k `[B, Hkv, S, D]`, v `[B, Hkv, S, Dv]` -> `[B, Hkv, G, Dv]`.
    """
    if not group.by_products:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=spec.scale)
    size, num_kv_heads, _, head_dim = k.shape
    q = q.reshape(size * num_kv_heads, -1, head_dim)
    keys, values = k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1)
    if spec.softcap is not None:
        scores = torch.baddbmm(q.new_empty(1), q, keys, beta=0, alpha=spec.scale / spec.softcap)
        scores = scores.tanh_().mul_(spec.softcap)
        if group.mask is not None:
            scores += group.mask
    elif group.mask is None:
        scores = torch.baddbmm(q.new_empty(1), q, keys, beta=0, alpha=spec.scale)
    else:
        scores = torch.baddbmm(group.mask, q, keys, alpha=spec.scale)
    if more.distance_bias is not None and group.distances is not None:
        bias = bias_at(more.distance_bias, group.distances).transpose(0, 1)
        per_row = scores.view(size, num_kv_heads, -1, scores.shape[-1])
        per_row += bias.reshape(len(bias), num_kv_heads, -1, scores.shape[-1])
    if (sinks := more.sinks) is not None:
        sinks = sinks.view(1, num_kv_heads, -1, 1).expand(size, -1, -1, -1).reshape(size * num_kv_heads, -1, 1)
    return torch.bmm(softmax_with_sinks(scores, sinks), values).view(size, num_kv_heads, -1, v.shape[-1])
