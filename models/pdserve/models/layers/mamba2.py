"""Mamba 2: a selective scan after a short convolution of its inputs.

A sequence's state has, per run of heads, the last columns of the convolution and the matrices of its heads. Runs of one group have
the same columns of b and c, and each keeps them, so that any rank can have any run. Source: the code of Bamba in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear, make_linear
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.rank_group import RankGroup
from pdserve.kernels.state.causal_conv import CausalConv, ColumnPart
from pdserve.kernels.state.selective_scan import SELECTIVE_SCAN
from pdserve.kernels.state.state_backend import StatePlan
from pdserve.kernels.state.state_spec import StateSpec
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_loader import WeightLoader

if TYPE_CHECKING:
    from pdserve.models.config.mamba2_shape import Mamba2Shape


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """`x * silu(gate)`: x `[T, H, P]` float32, gate `[T, H * P]` -> `[T, H, P]` float32."""
    return x * F.silu(gate.float()).view(x.shape)


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """`norm(x * silu(gate))`, or `norm(x) * silu(gate)`, over the heads of each group."""

    weight: Tensor
    """`[H * P]`, of this rank's heads."""
    is_before_gate: bool
    eps: float
    group_of_head: Tensor
    """`[H]` int64"""
    num_groups: int
    """Of all ranks."""
    group_size: int
    """Numbers of a group."""
    ranks: RankGroup | None
    """The ranks that share groups; None: each group is one rank's."""

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x `[T, H, P]` float32, gate `[T, H * P]` -> `[T, H, P]` float32."""
        if self.is_before_gate:
            return gated(self._normed(x), gate)
        return self._normed(gated(x, gate))

    def _normed(self, x: Tensor) -> Tensor:
        squares = x.new_zeros((len(x), self.num_groups)).index_add_(1, self.group_of_head, x.square().sum(-1))
        if self.ranks is not None:
            squares = self.ranks.all_reduce(squares)
        factors = torch.rsqrt(squares / self.group_size + self.eps).index_select(1, self.group_of_head)
        return x * factors.unsqueeze(-1) * self.weight.view(x.shape[1:])


@dataclass(frozen=True, slots=True)
class Mamba2:
    """One layer; a rank has its runs of heads, and the b and c of their groups."""

    index: int
    """The layer's index in the blocks of its KV cache group."""
    spec: StateSpec
    shape: Mamba2Shape
    """Of all ranks."""
    inputs: Linear
    """Hidden state -> gates, x, b, c and steps."""
    group_of_head: Tensor
    """`[H]` int64: the place of each head's group among those of this rank."""
    conv: CausalConv
    """Of x, b and c."""
    step_bias: Tensor
    """`[H]` float32"""
    rates: Tensor
    """`[H, 1, 1]` float32, negative: `-exp(A_log)`."""
    skip: Tensor
    """`[H]` float32: factor of x in the result."""
    norm: GroupNorm | None
    """None: only the gate."""
    output: Linear
    input_multiplier: float = 1.0
    """Factor of the hidden state."""
    multipliers: Tensor | None = None
    """Factors of the outputs of `inputs`; None: there are none."""

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        prefix: str,
        index: int,
        spec: StateSpec,
        shape: Mamba2Shape,
        hidden_size: int,
        eps: float,
        *,
        input_multiplier: float = 1.0,
        multipliers: Sequence[float] | None = None,
    ) -> Mamba2:
        """Read `{prefix}.in_proj`, `conv1d`, `dt_bias`, `A_log`, `D`, `norm` and `out_proj`.

        spec, shape: with the runs of all ranks. multipliers: of gates, x, b, c and steps. Raises: ConfigError.
        """
        shard, inner = weights.shard, shape.inner_size
        runs = shard.heads(shape.num_runs)
        runs_per_group = shape.num_runs // shape.num_groups
        group_of_run = [run // runs_per_group for run in runs]
        groups = range(group_of_run[0], group_of_run[-1] + 1)
        heads = range(runs.start * shape.heads_per_run, runs.stop * shape.heads_per_run)
        all_bc = shape.num_groups * shape.state_size
        x = range(heads.start * shape.head_dim, heads.stop * shape.head_dim)
        b = range(groups.start * shape.state_size, groups.stop * shape.state_size)
        channels = [x, _after(b, inner), _after(b, inner + all_bc)]
        steps = _after(heads, 2 * (inner + all_bc))
        rows = [x, *(_after(each, inner) for each in channels), steps]
        name, num_rows = f"{prefix}.in_proj", 2 * (inner + all_bc) + shape.num_heads
        matrix = weights.stack([weights.matrix(name, num_rows, hidden_size, _part(each)) for each in rows], [name])
        added = None
        if shape.projection_bias:
            added = torch.cat([weights.tensor(f"{name}.bias", num_rows, part=_part(each)) for each in rows])

        def convolved(name: str, *sizes: int) -> Tensor:
            name, num = f"{prefix}.conv1d.{name}", inner + 2 * all_bc
            return torch.cat([weights.tensor(name, num, *sizes, part=_part(each)) for each in channels])

        def vector(name: str) -> Tensor:
            return weights.tensor(f"{prefix}.{name}", shape.num_heads, part=_part(heads), dtype=torch.float32)

        step_bias = vector("dt_bias")
        own_groups = torch.tensor(group_of_run, device=step_bias.device) - groups.start
        firsts = torch.tensor([group_of_run.index(group) for group in groups], device=step_bias.device)
        bc = ColumnPart(shape.state_size, own_groups, firsts)
        conv = CausalConv(
            convolved("weight", 1, shape.conv_length).squeeze(1), convolved("bias") if shape.conv_bias else None,
            [ColumnPart(shape.heads_per_run * shape.head_dim), bc, bc], has_silu=True,
        )  # fmt: skip
        of_heads = torch.tensor(group_of_run, device=step_bias.device).repeat_interleave(shape.heads_per_run)
        is_cut = shard.group is not None and shape.num_groups % shard.size != 0
        norm = None
        if shape.norm is not None:
            norm = GroupNorm(
                weights.tensor(f"{prefix}.norm.weight", inner, part=_part(x)), shape.norm == "before_gate", eps, of_heads,
                shape.num_groups, inner // shape.num_groups, shard.group if is_cut else None,
            )  # fmt: skip
        factors = None
        if multipliers is not None:
            values = [value for value, each in zip(multipliers, rows, strict=True) for _ in each]
            factors = torch.tensor(values, dtype=weights.dtype, device=step_bias.device)
        return cls(
            index=index,
            spec=StateSpec(num_heads=len(runs), head_size=spec.head_size, kv_cache_group=spec.kv_cache_group),
            shape=shape,
            inputs=make_linear(matrix, added),
            group_of_head=of_heads - groups.start,
            conv=conv,
            step_bias=step_bias,
            rates=vector("A_log").exp().neg().view(-1, 1, 1),
            skip=vector("D"),
            norm=norm,
            output=weights.row_parallel(f"{prefix}.out_proj", hidden_size, inner, bias=shape.output_bias),
            input_multiplier=input_multiplier,
            multipliers=factors,
        )

    def attend(self, x: Tensor, phases: Tensor, plan: StatePlan, ops: LayerOps) -> Tensor:
        """x `[T, H]` -> `[T, H * P]`, the input of `output`. Reads and writes the states of the step's sequences."""
        inner = len(self.skip) * self.shape.head_dim
        made = self.inputs(x if self.input_multiplier == 1.0 else x * self.input_multiplier)
        if self.multipliers is not None:
            made = made * self.multipliers
        gate, mixed, steps = torch.split(made, [inner, len(self.conv.weight), len(self.skip)], -1)
        found = self._found(plan, mixed, steps)
        found = gated(found, gate) if self.norm is None else self.norm(found, gate)
        return found.flatten(1).to(x.dtype)

    def _found(self, plan: StatePlan, mixed: Tensor, steps: Tensor) -> Tensor:
        """mixed `[T, C]`, steps `[T, H]` -> `[T, H, P]` float32. Reads and writes states."""
        plan.keep(self._found, mixed, steps)
        shape, num, inner = self.shape, len(mixed), len(self.skip) * self.shape.head_dim
        bc = (len(self.conv.weight) - inner) // 2
        made = plan.convolve(self.index, self.conv, mixed).float()
        own, b, c = torch.split(made, [inner, bc, bc], -1)
        own = own.view(num, -1, shape.head_dim)
        b, c = (each.view(num, -1, shape.state_size).index_select(1, self.group_of_head) for each in (b, c))
        steps = F.softplus(steps.float() + self.step_bias).unsqueeze(-1)
        tokens = own * steps, b, c, self.rates.expand(num, -1, -1, -1), steps
        matrix = shape.head_dim, shape.state_size
        found = plan.recur(self.index, SELECTIVE_SCAN, tokens, self.conv.num_kept, matrix)
        return found + own * self.skip.unsqueeze(-1)

    def store(self, x: Tensor, phases: Tensor, plan: StatePlan, ops: LayerOps) -> None:
        """Write the states. Arguments of `attend`."""
        self.attend(x, phases, plan, ops)


def _after(rows: range, first: int) -> range:
    return range(rows.start + first, rows.stop + first)


def _part(rows: range) -> Part:
    return Part(0, rows.start, rows.stop)
