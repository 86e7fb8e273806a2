"""Gated delta nets: linear attention whose state is a matrix per value head, after a short convolution.

The convolution is over queries, keys and values; each key head serves a group of value heads. A sequence's state has, per key head,
the last columns of the convolution, and the matrices of its value heads. Source: the code of Qwen3-Next in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear, make_linear
from pdserve.kernels.cpu.matrices import with_rows
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.state.causal_conv import causal_conv
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.state_backend import StatePlan
from pdserve.kernels.state.state_spec import StateSpec
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_loader import WeightLoader

if TYPE_CHECKING:
    from pdserve.models.config.delta_shape import DeltaShape

_NORM_EPS = 1e-6
"""Of queries and keys, whatever `rms_norm_eps` is, as in transformers."""


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """One layer; a rank has its key heads, and their value heads."""

    index: int
    """The layer's index in the blocks of its KV cache group."""
    spec: StateSpec
    shape: DeltaShape
    """Of all ranks."""
    qkvz: Linear
    """Hidden state -> per key head its query, key, values and gates."""
    ba: Linear
    """Hidden state -> per key head the strengths and the decays of its values."""
    weight: Tensor
    """`[C, K]`: of the convolution, per key head its query, key and values."""
    dt_bias: Tensor
    """`[Hv]` float32"""
    decay: Tensor
    """`[Hv]` float32, negative: `-exp(A_log)`."""
    norm: Tensor
    """`[Dv]`"""
    eps: float
    output: Linear

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        prefix: str,
        index: int,
        spec: StateSpec,
        shape: DeltaShape,
        hidden_size: int,
        eps: float,
        *,
        is_split: bool = False,
    ) -> GatedDeltaNet:
        """Read `{prefix}.in_proj_qkvz`, `in_proj_ba`, `conv1d`, `dt_bias`, `A_log`, `norm` and `out_proj`.

        spec, shape: with the heads of all ranks. is_split: read `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` in place of
        the first two, whose rows are those of all queries, then of all keys, and so on. Raises: ConfigError.
        """
        shard, heads, per_key = weights.shard, shape.num_key_heads, shape.values_per_key
        own = shard.heads(heads)
        values = per_key * shape.value_dim
        if is_split:
            parts = {"in_proj_qkv": (shape.key_dim, shape.key_dim, values), "in_proj_z": (values,)}
            strengths = {"in_proj_b": (per_key,), "in_proj_a": (per_key,)}
        else:
            parts, strengths = {"in_proj_qkvz": (shape.channels_per_key + values,)}, {"in_proj_ba": (2 * per_key,)}

        def vector(name: str) -> Tensor:
            part = None if len(own) == heads else _rows_of(own, per_key)
            return weights.tensor(f"{prefix}.{name}", heads * per_key, part=part, dtype=torch.float32)

        kernel = weights.tensor(
            f"{prefix}.conv1d.weight", heads * shape.channels_per_key, 1, shape.conv_length
        ).squeeze(1)
        kernel = _by_head(
            kernel, sizes=[heads * size for size in (shape.key_dim, shape.key_dim, values)], num_heads=heads
        )
        channels = slice(own.start * shape.channels_per_key, own.stop * shape.channels_per_key)
        return cls(
            index=index,
            spec=StateSpec(num_heads=len(own), head_size=spec.head_size, kv_cache_group=spec.kv_cache_group),
            shape=shape,
            qkvz=_read(weights, prefix, parts, heads, hidden_size),
            ba=_read(weights, prefix, strengths, heads, hidden_size),
            weight=kernel[channels].contiguous(),
            dt_bias=vector("dt_bias"),
            decay=vector("A_log").exp().neg(),
            norm=weights.tensor(f"{prefix}.norm.weight", shape.value_dim),
            eps=eps,
            output=weights.row_parallel(f"{prefix}.out_proj", hidden_size, heads * values, bias=False),
        )

    def attend(self, x: Tensor, phases: Tensor, plan: StatePlan, ops: LayerOps) -> Tensor:
        """x `[T, H]` -> `[T, Hv * Dv]`, the input of `output`. Reads and writes the states of the step's sequences."""
        shape, num_tokens, heads = self.shape, len(x), self.spec.num_heads
        per_key = shape.values_per_key
        qkvz = self.qkvz(x).view(num_tokens, heads, -1)
        mixed, gate = torch.split(qkvz, [shape.channels_per_key, per_key * shape.value_dim], -1)
        beta, step = self.ba(x).view(num_tokens, heads, 2, per_key).unbind(2)
        found = self._found(plan, mixed.flatten(1), beta.flatten(1), step.flatten(1))
        return self._normed(found.to(x.dtype), gate.reshape(num_tokens, -1, shape.value_dim)).flatten(1)

    def _found(self, plan: StatePlan, mixed: Tensor, beta: Tensor, step: Tensor) -> Tensor:
        """mixed `[T, C]`, beta and step `[T, Hv]` -> `[T, Hv, Dv]` float32. Reads and writes states."""
        plan.keep(self._found, mixed, beta, step)
        shape, heads = self.shape, self.spec.num_heads
        num_columns = shape.channels_per_key * (shape.conv_length - 1)
        states = plan.read(self.index)
        columns = states[..., :num_columns].reshape(len(states), -1, shape.conv_length - 1)
        matrices = states[..., num_columns:].reshape(len(states), -1, shape.key_dim, shape.value_dim)
        made, columns = causal_conv(mixed, columns, self.weight, None, plan)
        found, matrices = self._delta(F.silu(made).view(len(mixed), heads, -1), beta, step, matrices, plan)
        parts = columns.view(len(states), heads, -1), matrices.view(len(states), heads, -1)
        plan.write(self.index, torch.cat(parts, -1))
        return found

    def store(self, x: Tensor, phases: Tensor, plan: StatePlan, ops: LayerOps) -> None:
        """Write the states. Arguments of `attend`."""
        self.attend(x, phases, plan, ops)

    def _delta(
        self, mixed: Tensor, beta: Tensor, step: Tensor, matrices: Tensor, plan: StatePlan
    ) -> tuple[Tensor, Tensor]:
        """mixed `[T, Hk, C]`, beta and step `[T, Hv]`, matrices `[B, Hv, Dk, Dv]` -> `[T, Hv, Dv]` float32, and those after it."""
        shape = self.shape
        sizes = [shape.key_dim, shape.key_dim, shape.values_per_key * shape.value_dim]
        query, key, value = torch.split(mixed, sizes, -1)
        query, key = (_unit(each.float()).repeat_interleave(shape.values_per_key, 1) for each in (query, key))
        query = query * shape.key_dim**-0.5
        value = value.reshape(len(value), -1, shape.value_dim).float()
        beta = beta.sigmoid().float()
        decay = self.decay * F.softplus(step.float() + self.dt_bias)
        return DELTA_RULE.over_step((query, key, value, decay, beta), matrices, plan)

    def _normed(self, found: Tensor, gate: Tensor) -> Tensor:
        """`norm(found) * silu(gate)`, both `[T, Hv, Dv]`."""
        wide = found.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.norm * wide.to(found.dtype) * F.silu(gate.float())).to(found.dtype)


def _read(
    weights: WeightLoader, prefix: str, parts: Mapping[str, Sequence[int]], heads: int, hidden_size: int
) -> Linear:
    """This rank's rows of some matrices, per key head those of each part. parts: name -> rows of a head in each part of it.

    heads: of all ranks. Raises: ConfigError.
    """
    own, matrices, sizes = weights.shard.heads(heads), [], []
    for name, its_sizes in parts.items():
        first, rows = 0, heads * sum(its_sizes)
        for size in its_sizes:
            part = None if len(own) * size == rows else _rows_of(own, size, first)
            matrices.append(weights.matrix(f"{prefix}.{name}", rows, hidden_size, part))
            sizes.append(len(own) * size)
            first += heads * size
    stacked = weights.stack(matrices, [f"{prefix}.{name}" for name in parts])
    return make_linear(with_rows(stacked, partial(_by_head, sizes=sizes, num_heads=len(own))))


def _rows_of(heads: range, size: int, first: int = 0) -> Part:
    """Rows of some heads of `size` rows, where those of all heads begin at `first`."""
    return Part(0, first + heads.start * size, first + heads.stop * size)


def _by_head(rows: Tensor, *, sizes: Sequence[int], num_heads: int) -> Tensor:
    """Parts of `sizes` rows, each head by head -> head by head, each with its rows of all parts; `[R, ...]`."""
    heads = [part.view(num_heads, -1, *rows.shape[1:]) for part in torch.split(rows, list(sizes))]
    return torch.cat(heads, 1).flatten(0, 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
