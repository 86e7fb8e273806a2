"""Gated delta nets: linear attention whose state is a matrix per value head, after a short convolution.

The convolution is over queries, keys and values; each key head serves a group of value heads. A sequence's state has, per key head,
the last columns of the convolution, and the matrices of its value heads. A matrix decays as a whole, or in Kimi's delta attention
each of its rows by itself. Sources: the code of Qwen3-Next and of Kimi Linear in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.state.causal_conv import CausalConv, ColumnPart
from pdserve.kernels.state.delta_rule import DELTA_RULE
from pdserve.kernels.state.state_backend import StatePlan
from pdserve.kernels.state.state_spec import StateSpec
from pdserve.models.layers.delta_inputs import DeltaInputs, HeadInputs, LowRankInputs, by_head, read_by_head, rows_of
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
    inputs: DeltaInputs
    conv: CausalConv
    """Of queries, keys and values, per key head its query, key and values."""
    dt_bias: Tensor
    """`[Hv, 1]`, or `[Hv, Dk]` with a decay per channel; float32"""
    decay: Tensor
    """`[Hv, 1]` float32, negative: `-exp(A_log)`."""
    norm: Tensor
    """`[Dv]`"""
    eps: float
    output: Linear
    gate: Callable[[Tensor], Tensor] = F.silu
    """Of the gates, in float32; its result is a factor of what is normed."""

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
            part = None if len(own) == heads else rows_of(own, per_key)
            return weights.tensor(f"{prefix}.{name}", heads * per_key, part=part, dtype=torch.float32).unsqueeze(-1)

        kernel = weights.tensor(
            f"{prefix}.conv1d.weight", heads * shape.channels_per_key, 1, shape.conv_length
        ).squeeze(1)
        kernel = by_head(
            kernel, sizes=[heads * size for size in (shape.key_dim, shape.key_dim, values)], num_heads=heads
        )
        channels = slice(own.start * shape.channels_per_key, own.stop * shape.channels_per_key)
        return cls(
            index=index,
            spec=StateSpec(num_heads=len(own), head_size=spec.head_size, kv_cache_group=spec.kv_cache_group),
            shape=shape,
            inputs=HeadInputs(
                read_by_head(weights, prefix, parts, heads, hidden_size),
                read_by_head(weights, prefix, strengths, heads, hidden_size), len(own), shape.channels_per_key,
            ),
            conv=_conv(kernel[channels].contiguous(), shape),
            dt_bias=vector("dt_bias"),
            decay=vector("A_log").exp().neg(),
            norm=weights.tensor(f"{prefix}.norm.weight", shape.value_dim),
            eps=eps,
            output=weights.row_parallel(f"{prefix}.out_proj", hidden_size, heads * values, bias=False),
        )  # fmt: skip

    @classmethod
    def load_kimi(
        cls,
        weights: WeightLoader,
        prefix: str,
        index: int,
        spec: StateSpec,
        shape: DeltaShape,
        hidden_size: int,
        eps: float,
    ) -> GatedDeltaNet:
        """Read what `LowRankInputs` reads, and `{prefix}.q_conv1d`, `k_conv1d`, `v_conv1d`, `dt_bias`, `A_log`, `o_norm`, `o_proj`.

        spec, shape: with the heads of all ranks, which have one size. Raises: ConfigError.
        """
        heads, size = shape.num_key_heads, shape.key_dim
        own = weights.shard.heads(heads)
        is_whole = len(own) == heads
        part = None if is_whole else rows_of(own, size)
        kernels = [
            weights.tensor(f"{prefix}.{name}_conv1d.weight", heads * size, 1, shape.conv_length, part=part)
            for name in "qkv"
        ]
        return cls(
            index=index,
            spec=StateSpec(num_heads=len(own), head_size=spec.head_size, kv_cache_group=spec.kv_cache_group),
            shape=shape,
            inputs=LowRankInputs.load(weights, prefix, heads, size, hidden_size),
            conv=_conv(by_head(torch.cat(kernels).squeeze(1), sizes=[len(own) * size] * 3, num_heads=len(own)), shape),
            dt_bias=weights.tensor(f"{prefix}.dt_bias", heads * size, part=part, dtype=torch.float32).view(-1, size),
            decay=weights.tensor(
                f"{prefix}.A_log", 1, 1, heads, 1, part=None if is_whole else Part(2, own.start, own.stop), dtype=torch.float32
            ).view(-1, 1).exp().neg(),
            # its code rounds nothing between the norm and the gate
            norm=weights.tensor(f"{prefix}.o_norm.weight", size, dtype=torch.float32),
            eps=eps,
            output=weights.row_parallel(f"{prefix}.o_proj", hidden_size, heads * size, bias=False),
            gate=torch.sigmoid,
        )  # fmt: skip

    def attend(self, x: Tensor, phases: Tensor, plan: StatePlan, ops: LayerOps) -> Tensor:
        """x `[T, H]` -> `[T, Hv * Dv]`, the input of `output`. Reads and writes the states of the step's sequences."""
        mixed, gate, beta, step = self.inputs(x)
        found = self._found(plan, mixed, beta, step)
        return self._normed(found.to(x.dtype), gate.view(len(x), -1, self.shape.value_dim)).flatten(1)

    def _found(self, plan: StatePlan, mixed: Tensor, beta: Tensor, step: Tensor) -> Tensor:
        """The first, third and fourth part of `Mixed` -> `[T, Hv, Dv]` float32. Reads and writes states."""
        plan.keep(self._found, mixed, beta, step)
        shape = self.shape
        made = plan.convolve(self.index, self.conv, mixed).view(len(mixed), self.spec.num_heads, -1)
        tokens = self._tokens(made, beta, step)
        return plan.recur(self.index, DELTA_RULE, tokens, self.conv.num_kept, (shape.key_dim, shape.value_dim))

    def store(self, x: Tensor, phases: Tensor, plan: StatePlan, ops: LayerOps) -> None:
        """Write the states. Arguments of `attend`."""
        self.attend(x, phases, plan, ops)

    def _tokens(self, mixed: Tensor, beta: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        """mixed `[T, Hk, C]`, beta and step of `Mixed` -> the tokens of `DELTA_RULE`."""
        shape = self.shape
        sizes = [shape.key_dim, shape.key_dim, shape.values_per_key * shape.value_dim]
        query, key, value = torch.split(mixed, sizes, -1)
        query, key = (_unit(each.float()).repeat_interleave(shape.values_per_key, 1) for each in (query, key))
        query = query * shape.key_dim**-0.5
        value = value.reshape(len(value), -1, shape.value_dim).float()
        beta = beta.sigmoid().float()
        decay = self.decay * F.softplus(step.float() + self.dt_bias)
        return query, key, value, decay, beta

    def _normed(self, found: Tensor, gate: Tensor) -> Tensor:
        """The norm of `found` times the gate, both `[T, Hv, Dv]`."""
        wide = found.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.norm * wide.to(self.norm.dtype) * self.gate(gate.float())).to(found.dtype)


def _conv(kernel: Tensor, shape: DeltaShape) -> CausalConv:
    """kernel: `[C, K]`, of this rank's key heads."""
    return CausalConv(kernel, None, [ColumnPart(shape.channels_per_key)], has_silu=True)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
