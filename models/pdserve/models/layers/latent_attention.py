"""Multi-head latent attention: the cache has one row per token and layer, from which all heads make their keys and values.

A row is `[c, k_rope]`. c: kv_lora_rank numbers, normed; k_rope: rotated, the same for all heads. `LatentHeads` attends over rows.
Source: DeepSeek-V2 (Liu et al. 2024), section 2.1.2 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionPlan
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.attention.latent_heads import LatentHeads, attend_latent
from pdserve.kernels.cpu.linear import Linear, make_linear
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.kernels.layers.rotary import pair_neighbours, rotate_heads
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_loader import WeightLoader

if TYPE_CHECKING:
    from pdserve.models.config.latent_shape import LatentShape

_NORM_EPS = 1e-6
"""Of the norms over `q_lora_rank` and `kv_lora_rank` numbers, whatever `rms_norm_eps` is, as in transformers."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One layer's attention; a rank has its heads, and the whole row."""

    index: int
    """The layer's index in the blocks of its KV cache group."""
    spec: AttentionSpec
    shape: LatentShape
    query: Linear
    """Hidden state, or the normed `q_lora_rank` numbers -> this rank's heads, `nope_dim + rope_dim` numbers each."""
    query_down: Linear | None
    """Hidden state -> `q_lora_rank` numbers; None: `query` takes the hidden state."""
    query_norm: RmsNorm | None
    row: Linear
    """Hidden state -> `kv_lora_rank + rope_dim` numbers."""
    row_norm: RmsNorm
    """Of the first `kv_lora_rank`."""
    heads: LatentHeads
    output: Linear

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        prefix: str,
        index: int,
        spec: AttentionSpec,
        shape: LatentShape,
        hidden_size: int,
        *,
        bias: bool,
    ) -> LatentAttention:
        """Read `{prefix}.q_proj`, or `q_a_proj`, `q_a_layernorm` and `q_b_proj`, and `kv_a_proj_with_mqa`, `kv_a_layernorm`,
        `kv_b_proj` and `o_proj`.

        spec: with the heads of all ranks. bias: of the projections from and to the hidden state. Raises: ConfigError.
        """
        own = weights.shard.heads(spec.num_heads)
        num_heads, rank, nope, rope = spec.num_heads, shape.kv_lora_rank, shape.nope_dim, shape.rope_dim
        name, inputs, query_down, query_norm = "q_proj", hidden_size, None, None
        if shape.q_lora_rank:
            name, inputs = "q_b_proj", shape.q_lora_rank
            added = weights.tensor(f"{prefix}.q_a_proj.bias", inputs) if bias else None
            query_down = make_linear(weights.matrix(f"{prefix}.q_a_proj", inputs, hidden_size), added)
            query_norm = _norm(weights, f"{prefix}.q_a_layernorm.weight", inputs, shape.query_factor)
        size = nope + rope
        query = weights.tensor(f"{prefix}.{name}.weight", num_heads * size, inputs, part=_rows(own, size, num_heads))
        query = query.view(len(own), size, inputs)
        row = weights.tensor(f"{prefix}.kv_a_proj_with_mqa.weight", rank + rope, hidden_size)
        row_bias = weights.tensor(f"{prefix}.kv_a_proj_with_mqa.bias", rank + rope) if bias else None
        if not shape.rotates_neighbours:
            query = torch.cat((query[:, :nope], _paired(query[:, nope:], rope)), 1)
            row = torch.cat((row[:rank], pair_neighbours(row[rank:], rope)))
            if row_bias is not None:
                row_bias = torch.cat((row_bias[:rank], pair_neighbours(row_bias[rank:], rope)))
        both = nope + shape.value_dim
        up = weights.tensor(f"{prefix}.kv_b_proj.weight", num_heads * both, rank, part=_rows(own, both, num_heads))
        up = up.view(len(own), both, rank)
        return cls(
            index=index,
            spec=AttentionSpec(
                num_heads=len(own), num_kv_heads=1, head_dim=spec.head_dim, scale=spec.scale, value_dim=rank,
                kv_cache_group=spec.kv_cache_group,
            ),
            shape=shape,
            query=make_linear(query.flatten(0, 1)),
            query_down=query_down,
            query_norm=query_norm,
            row=make_linear(row, row_bias),
            row_norm=_norm(weights, f"{prefix}.kv_a_layernorm.weight", rank, shape.row_factor),
            heads=LatentHeads(up[:, :nope].contiguous(), up[:, nope:].transpose(1, 2).contiguous()),
            output=weights.row_parallel(f"{prefix}.o_proj", hidden_size, num_heads * shape.value_dim, bias=bias),
        )  # fmt: skip

    def attend(self, x: Tensor, phases: Tensor, plan: AttentionPlan, ops: LayerOps) -> Tensor:
        """x `[T, H]`, phases `[T, 1, rope_dim / 2]` -> `[T, Hq * value_dim]`, the input of `output`. Writes rows into the cache."""
        rows = self.store(x, phases, plan, ops)
        queries = self._queries(x)
        _rotate(queries[..., self.shape.nope_dim :], phases)
        return attend_latent(plan, self.index, self.heads, queries, rows)

    def store(self, x: Tensor, phases: Tensor, plan: AttentionPlan, ops: LayerOps) -> Tensor:
        """Write rows into the cache. Arguments of `attend` -> rows `[T, 1, kv_lora_rank + rope_dim]`."""
        rank = self.shape.kv_lora_rank
        rows = self.row(x).unsqueeze(1)
        rows[..., :rank] = self.row_norm(rows[..., :rank])
        _rotate(rows[..., rank:], phases)
        plan.store(self.index, rows, rows[..., :rank])
        return rows

    def _queries(self, x: Tensor) -> Tensor:
        """`[T, Hq, nope_dim + rope_dim]`"""
        if self.query_down is not None and self.query_norm is not None:
            x = self.query_norm(self.query_down(x))
        return self.query(x).view(len(x), self.spec.num_heads, -1)


def _norm(weights: WeightLoader, name: str, size: int, factor: float) -> RmsNorm:
    """A norm whose result has a factor, which is kept in float32 as part of the weights."""
    if factor == 1.0:
        return weights.norm(name, size, _NORM_EPS)
    return RmsNorm(weights.tensor(name, size, dtype=torch.float32) * factor, _NORM_EPS)


def _rotate(x: Tensor, phases: Tensor) -> None:
    """`rotate_heads` of a view, whose memory may begin at any number."""
    if x.dtype is not torch.float32 or not any(number % 2 for number in (x.storage_offset(), *x.stride()[:-1])):
        rotate_heads(x, phases)
        return
    # complex numbers must not begin in the middle of a pair
    whole = x.clone(memory_format=torch.contiguous_format)
    rotate_heads(whole, phases)
    x.copy_(whole)


def _rows(own: range, size: int, num_heads: int) -> Part | None:
    """The rows of a rank's heads."""
    return None if len(own) == num_heads else Part(0, own.start * size, own.stop * size)


def _paired(heads: Tensor, size: int) -> Tensor:
    """heads `[Hq, rope_dim, in]`"""
    return pair_neighbours(heads.flatten(0, 1), size).view_as(heads)
