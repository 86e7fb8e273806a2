"""Mamba, the first version: a selective scan of channels, each with steps of its own, after a short convolution.

A sequence's state has, per part of the channels, the last columns of the convolution and a row of N numbers of each channel.
Source: the code of Mamba, FalconMamba and Jamba in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear, make_linear
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.kernels.state.causal_conv import CausalConv, ColumnPart
from pdserve.kernels.state.selective_scan import SELECTIVE_SCAN
from pdserve.kernels.state.state_backend import StatePlan
from pdserve.kernels.state.state_spec import StateSpec
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_loader import WeightLoader

if TYPE_CHECKING:
    from pdserve.models.config.mamba_shape import MambaShape


@dataclass(frozen=True, slots=True)
class Mamba:
    """One layer; a rank has its parts of the channels."""

    index: int
    """The layer's index in the blocks of its KV cache group."""
    spec: StateSpec
    shape: MambaShape
    """Of all ranks."""
    inputs: Linear
    """Hidden state -> x and gates of this rank's channels."""
    conv: CausalConv
    """Of x."""
    selection: Linear
    """x -> the numbers from which steps are made, b and c."""
    norms: tuple[RmsNorm, ...]
    """Of these three; empty: there are none."""
    steps: Linear
    """-> the steps of this rank's channels, without their bias."""
    step_bias: Tensor
    """`[C]` float32"""
    rates: Tensor
    """`[parts, C / parts, N]` float32, negative: `-exp(A_log)`."""
    skip: Tensor
    """`[C]` float32: factor of x in the result."""
    output: Linear

    @classmethod
    def load(
        cls, weights: WeightLoader, prefix: str, index: int, spec: StateSpec, shape: MambaShape, hidden_size: int
    ) -> Mamba:
        """Read `{prefix}.in_proj`, `conv1d`, `x_proj`, `dt_proj`, `A_log`, `D` and `out_proj`, and the norms that the shape has.

        spec, shape: with the parts of all ranks. Raises: ConfigError.
        """
        shard, inner = weights.shard, shape.inner_size
        parts, size = shard.heads(shape.num_parts), inner // shape.num_parts
        first, stop = parts.start * size, parts.stop * size
        own = Part(0, first, stop)
        name, halves = f"{prefix}.in_proj", [own, Part(0, inner + first, inner + stop)]
        matrix = weights.stack([weights.matrix(name, 2 * inner, hidden_size, half) for half in halves], [name])
        added = None
        if shape.projection_bias:
            added = torch.cat([weights.tensor(f"{name}.bias", 2 * inner, part=half) for half in halves])
        sizes = {"dt": shape.step_rank, "b": shape.state_size, "c": shape.state_size}
        rates = weights.tensor(f"{prefix}.A_log", inner, shape.state_size, part=own, dtype=torch.float32).exp().neg()
        norms: list[RmsNorm] = []
        if shape.norms == "weighted":
            norms = [
                weights.norm(f"{prefix}.{of}_layernorm.weight", count, shape.norm_eps) for of, count in sizes.items()
            ]
        elif shape.norms == "plain":
            norms = [
                RmsNorm(torch.ones(each, dtype=weights.dtype, device=rates.device), shape.norm_eps)
                for each in sizes.values()
            ]
        return cls(
            index=index,
            spec=StateSpec(num_heads=len(parts), head_size=spec.head_size, kv_cache_group=spec.kv_cache_group),
            shape=shape,
            inputs=make_linear(matrix, added),
            conv=CausalConv(
                weights.tensor(f"{prefix}.conv1d.weight", inner, 1, shape.conv_length, part=own).squeeze(1),
                weights.tensor(f"{prefix}.conv1d.bias", inner, part=own) if shape.conv_bias else None,
                [ColumnPart(size)],
                has_silu=True,
            ),
            selection=weights.row_parallel(f"{prefix}.x_proj", sum(sizes.values()), inner, bias=False),
            norms=tuple(norms),
            steps=make_linear(weights.matrix(f"{prefix}.dt_proj", inner, shape.step_rank, own)),
            step_bias=weights.tensor(f"{prefix}.dt_proj.bias", inner, part=own, dtype=torch.float32),
            rates=rates.view(len(parts), size, -1),
            skip=weights.tensor(f"{prefix}.D", inner, part=own, dtype=torch.float32),
            output=weights.row_parallel(f"{prefix}.out_proj", hidden_size, inner, bias=shape.projection_bias),
        )

    def attend(self, x: Tensor, phases: Tensor, plan: StatePlan, ops: LayerOps) -> Tensor:
        """x `[T, H]` -> `[T, C]`, the input of `output`. Reads and writes the states of the step's sequences."""
        shape = self.shape
        mixed, gate = self.inputs(x).chunk(2, -1)
        made = self._convolved(plan, mixed)
        selected = torch.split(self.selection(made), [shape.step_rank, shape.state_size, shape.state_size], -1)
        if self.norms:
            selected = tuple(norm(each) for norm, each in zip(self.norms, selected, strict=True))
        return (self._scanned(plan, made, *selected) * F.silu(gate.float())).to(x.dtype)

    def _convolved(self, plan: StatePlan, mixed: Tensor) -> Tensor:
        """`[T, C]` -> `[T, C]`. Reads and writes states."""
        plan.keep(self._convolved, mixed)
        return plan.convolve(self.index, self.conv, mixed)

    def _scanned(self, plan: StatePlan, made: Tensor, step: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """made `[T, C]`, step `[T, R]`, b and c `[T, N]` -> `[T, C]` float32. Reads and writes states."""
        plan.keep(self._scanned, made, step, b, c)
        steps, own = F.softplus(self.steps(step).float() + self.step_bias), made.float()
        num_parts, size, _ = self.rates.shape
        x, steps = (each.view(-1, num_parts, size) for each in (own * steps, steps))
        # all channels have the same b and c
        b, c = (each.float().unsqueeze(1).expand(-1, num_parts, -1) for each in (b, c))
        tokens = x, b, c, self.rates.expand(len(x), -1, -1, -1), steps
        found = plan.recur(self.index, SELECTIVE_SCAN, tokens, self.conv.num_kept, (size, self.shape.state_size))
        return found.flatten(1) + own * self.skip

    def store(self, x: Tensor, phases: Tensor, plan: StatePlan, ops: LayerOps) -> None:
        """Write the states. Arguments of `attend`."""
        self.attend(x, phases, plan, ops)
