"""Batches for tests of attention, over a cache filled with NaN and infinity, and the reference formula."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionBackend
from pdserve.kernels.attention.attention_batch import AttentionBatch
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.latent_heads import LatentHeads, attend_latent
from tests.support.kernels.attention_batches import packed_batch

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
Heads = tuple[int, int, int]
"""(Hq, Hkv, D)"""


@dataclass
class Case:
    """One step. In its cache only the keys and values of known sequences are numbers: all else is NaN or infinite."""

    batch: AttentionBatch
    q: Tensor
    """`[T, Hq, D]`; q, k and v are views of one projection, as in a decoder layer."""
    k: Tensor
    """`[T, Hkv, D]`"""
    v: Tensor
    """`[T, Hkv, D]`, or the first numbers of k."""
    kv_cache: Tensor
    """`[num_blocks, Hkv, L, 2 or 1, bs, D]`, before the step."""
    layer: int
    keys: list[Tensor]
    """Keys by sequence, `[seq_len, Hkv, D]` in float64; empty for a padded row."""
    values: list[Tensor]

    def to(self, device: str) -> Case:
        """The same on another device: q, k and v are views of one projection there, too, which copies of each would not be."""
        names = ("positions", "slot_mapping", "query_start_loc", "seq_lens", "block_tables")
        batch = replace(self.batch, **{name: getattr(self.batch, name).to(device) for name in names})
        if self.kv_cache.shape[3] == 1:
            k = self.k.to(device)
            q, v = self.q.to(device), k[..., : self.v.shape[-1]]
            return replace(self, batch=batch, q=q, k=k, v=v, kv_cache=self.kv_cache.to(device))
        heads = [tensor.shape[1] for tensor in (self.q, self.k, self.v)]
        q, k, v = torch.cat((self.q, self.k, self.v), 1).to(device).split(heads, 1)  # type: ignore[no-untyped-call]
        return replace(self, batch=batch, q=q, k=k, v=v, kv_cache=self.kv_cache.to(device))


def make_case(
    *,
    decodes: Sequence[int],
    prefills: Sequence[tuple[int, int]] = (),
    heads: Heads,
    block_size: int,
    dtype: torch.dtype,
    num_layers: int = 2,
    layer: int = 1,
    seed: int = 0,
    value_dim: int | None = None,
) -> Case:
    """decodes: lengths, 0 for a padded row; prefills: (context_len, num_tokens), as chunks even of one token. value_dim: of
    `AttentionSpec`."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(seed)
    lengths = [*decodes, *(context + new for context, new in prefills)]
    news = [1] * len(decodes) + [new for _, new in prefills]
    qkv = torch.randn(sum(news), num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)  # type: ignore[no-untyped-call]
    if value_dim is not None:
        v = k[..., :value_dim]
    num_rows = 2 if value_dim is None else 1

    num_blocks = sum(-(-length // block_size) for length in lengths) + 3
    kv_cache = torch.empty(num_blocks, num_kv_heads, num_layers, num_rows, block_size, head_dim, dtype=dtype)
    kv_cache.view(-1, 2).copy_(torch.tensor([torch.nan, torch.inf]))
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    # block 0 pads the tables and stays poison: a key that is read from the padding shows
    free.remove(0)
    scratch = free.pop()
    tables: list[list[int]] = []
    keys, values, positions, slots = [], [], [], []
    row = num_padded = 0
    for length, new in zip(lengths, news, strict=True):
        old = max(length - new, 0)
        table = [free.pop() for _ in range(-(-length // block_size))]
        kv = torch.randn(num_rows, length, num_kv_heads, head_dim, generator=generator).to(dtype)
        kv[:, old:] = torch.stack((k, v) if value_dim is None else (k,))[:, row : row + length - old]
        at = torch.arange(length)
        blocks, offsets = torch.tensor(table, dtype=torch.int64)[at // block_size], at % block_size
        kv_cache[blocks[:old], :, layer, :, offsets[:old]] = kv[:, :old].permute(1, 2, 0, 3)
        keys.append(kv[0].double())
        values.append(kv[-1, ..., :value_dim].double())
        positions += list(range(old, length)) or [0]
        slots += (blocks * block_size + offsets)[old:].tolist() or [scratch * block_size + num_padded % block_size]
        num_padded += length == 0
        # padded rows have a block that is poison but for their own slot
        tables.append(table or [scratch])
        row += new
    batch = packed_batch(positions, slots, news, lengths, [[*table, 0, 0] for table in tables])
    batch = replace(batch, num_decodes=len(decodes))
    return Case(batch, q, k, v, kv_cache, layer, keys, values)


def make_spec(heads: Heads, **options: Any) -> AttentionSpec:
    num_heads, num_kv_heads, head_dim = heads
    fields: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
    }
    return AttentionSpec(**(fields | options))


def dense_attention(case: Case, spec: AttentionSpec) -> Tensor:
    """`softmax(cap(scale * q k^T) + mask) v`, one sequence at a time in float64 -> `[T, Hq * output_dim]`; 0 in padded rows."""
    group = spec.num_heads // spec.num_kv_heads
    out = torch.zeros(*case.q.shape[:2], spec.output_dim, dtype=torch.float64)
    for (start, stop), keys, values in zip(
        pairwise(case.batch.query_start_loc_cpu.tolist()), case.keys, case.values, strict=True
    ):
        if not len(keys):
            continue
        k, v = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", case.q[start:stop].double(), k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        key = torch.arange(len(keys))
        position = key[len(keys) - (stop - start) :].unsqueeze(1)
        hidden = (key > position) & spec.causal
        if spec.distance_bias:
            bias = distance_bias_of(case, spec).double()
            scores = scores + bias[:, (position - key).clamp(0, bias.shape[1] - 1)]
        if spec.window is not None:
            hidden |= key <= position - spec.window
        if spec.chunk is not None:
            hidden |= key // spec.chunk < position // spec.chunk
        scores = scores.masked_fill(hidden, -torch.inf)
        if spec.sinks:
            sinks = sinks_of(case, spec).double().view(-1, 1, 1).expand(-1, stop - start, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, v)
    return out.flatten(1)


@dataclass
class LatentCase:
    """A step over latent rows, with the queries and matrices of its heads."""

    case: Case
    """Its q are the absorbed queries, rounded."""
    heads: LatentHeads
    queries: Tensor
    """`[T, Hq, nope + rope]`, a view."""
    spec: AttentionSpec

    def expected(self) -> Tensor:
        """The formula in float64, with absorbed queries that are not rounded -> `[T, Hq * value]`."""
        wide = LatentHeads(self.heads.key_up.cpu().double(), self.heads.value_up.cpu().double())
        case = replace(self.case.to("cpu"), q=wide.absorbed(self.queries.cpu().double()))
        return wide.results(dense_attention(case, self.spec)).flatten(1)

    def attend(self, backend: AttentionBackend) -> Tensor:
        """Plan, store and attend in the case's layer -> `[T, Hq * value]`."""
        plan = backend.plan(self.case.batch, self.spec)
        plan.store(self.case.layer, self.case.k, self.case.v)
        return attend_latent(plan, self.case.layer, self.heads, self.queries, self.case.k)


def make_latent_case(
    *,
    num_heads: int,
    nope: int,
    rope: int,
    rank: int,
    value: int,
    dtype: torch.dtype,
    device: str = "cpu",
    **fields: Any,
) -> LatentCase:
    """fields: of `make_case`."""
    shape = (num_heads, 1, rank + rope)
    case = make_case(heads=shape, value_dim=rank, dtype=dtype, **fields).to(device)
    generator = torch.Generator().manual_seed(1)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype).to(device)

    heads = LatentHeads(drawn(num_heads, nope, rank) / rank**0.5, drawn(num_heads, rank, value) / rank**0.5)
    queries = drawn(len(case.q), num_heads, nope + rope + 1)[..., : nope + rope]
    spec = make_spec(shape, value_dim=rank, scale=(nope + rope) ** -0.5)
    return LatentCase(replace(case, q=heads.absorbed(queries)), heads, queries, spec)


def run_step(backend: AttentionBackend, case: Case, spec: AttentionSpec) -> Tensor:
    """Plan, store and attend in the case's layer -> `[T, Hq * D]`."""
    plan = backend.plan(case.batch, spec)
    plan.store(case.layer, case.k, case.v)
    sinks = sinks_of(case, spec) if spec.sinks else None
    if spec.distance_bias:
        return plan.attend(case.layer, case.q, case.k, case.v, sinks, distance_bias_of(case, spec))
    return plan.attend(case.layer, case.q, case.k, case.v, sinks)


def sinks_of(case: Case, spec: AttentionSpec) -> Tensor:
    """`[Hq]`, between -1 and 3: some heads give most of their weight to no value."""
    return torch.linspace(-1, 3, spec.num_heads, dtype=case.q.dtype, device=case.q.device)


def distance_bias_of(case: Case, spec: AttentionSpec) -> Tensor:
    """`[Hq, 20]`: keys 19 tokens back and further have one bias."""
    return torch.linspace(-2, 2, spec.num_heads * 20, dtype=case.q.dtype, device=case.q.device).view(-1, 20)


def check_step(backend: AttentionBackend, case: Case, spec: AttentionSpec) -> None:
    """The step's output is the formula's, its keys and values are in their slots, and no other key or value changed."""
    before = case.kv_cache.clone()
    found = run_step(backend, case, spec).cpu().double()
    tolerance = TOLERANCES[case.q.dtype]
    real = [row for row, length in enumerate(_lengths_of_rows(case)) if length]
    torch.testing.assert_close(found[real], dense_attention(case.to("cpu"), spec)[real], atol=tolerance, rtol=tolerance)

    block_size, slots = case.kv_cache.shape[4], case.batch.slot_mapping
    places = (slots // block_size, slice(None), case.layer, slice(None), slots % block_size)
    written = case.kv_cache[places]
    assert torch.equal(written, torch.stack((case.k, case.v) if spec.value_dim is None else (case.k,), 2))
    before[places] = written
    numbers = before.isfinite()
    assert torch.equal(case.kv_cache[numbers], before[numbers])


def _lengths_of_rows(case: Case) -> list[int]:
    query_lens = case.batch.query_start_loc_cpu.diff()
    return case.batch.seq_lens_cpu.repeat_interleave(query_lens).tolist()
