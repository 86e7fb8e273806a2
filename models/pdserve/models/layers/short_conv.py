"""Short convolutions over a sequence, with gates before and after: LFM2's.

    b, c, x = W_in h       z_t = b_t * x_t       y_t = sum_k w_k z_(t - K + 1 + k) + bias       out = W_out (c_t * y_t)

A sequence's state is its last K - 1 columns z. Source: the code of LFM2 in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import Linear, make_linear
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.state.causal_conv import CausalConv, ColumnPart
from pdserve.kernels.state.state_backend import StatePlan
from pdserve.kernels.state.state_spec import StateSpec
from pdserve.models.weights.rank_shard import Part
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, slots=True)
class ShortConv:
    """One layer's convolution; a rank has its heads' channels."""

    index: int
    """The layer's index in the blocks of its KV cache group."""
    spec: StateSpec
    inputs: Linear
    """Hidden state -> b, c and x of this rank's channels."""
    conv: CausalConv
    output: Linear

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        prefix: str,
        index: int,
        spec: StateSpec,
        hidden_size: int,
        length: int,
        *,
        bias: bool,
    ) -> ShortConv:
        """Read `{prefix}.in_proj`, `conv` and `out_proj`. spec: with the heads of all ranks. length: K. Raises: ConfigError."""
        shard = weights.shard
        own, size = shard.heads(spec.num_heads), hidden_size // spec.num_heads
        first, stop = own.start * size, own.stop * size
        parts = [Part(0, begin + first, begin + stop) for begin in range(0, 3 * hidden_size, hidden_size)]
        name = f"{prefix}.in_proj"
        matrix = weights.stack([weights.matrix(name, 3 * hidden_size, hidden_size, part) for part in parts], [name])
        added = None
        if bias:
            added = torch.cat([weights.tensor(f"{name}.bias", 3 * hidden_size, part=part) for part in parts])
        channels = None if shard.group is None else Part(0, first, stop)
        return cls(
            index=index,
            spec=StateSpec(num_heads=len(own), head_size=spec.head_size, kv_cache_group=spec.kv_cache_group),
            inputs=make_linear(matrix, added),
            conv=CausalConv(
                weights.tensor(f"{prefix}.conv.weight", hidden_size, 1, length, part=channels).squeeze(1),
                weights.tensor(f"{prefix}.conv.bias", hidden_size, part=channels) if bias else None,
                [ColumnPart(size)],
            ),
            output=weights.row_parallel(f"{prefix}.out_proj", hidden_size, hidden_size, bias=bias),
        )

    def attend(self, x: Tensor, phases: Tensor, plan: StatePlan, ops: LayerOps) -> Tensor:
        """x `[T, H]` -> `[T, C]`, the input of `output`. Reads and writes the states of the step's sequences."""
        b, c, values = self.inputs(x).chunk(3, -1)
        return self._convolved(plan, b * values).mul_(c)

    def _convolved(self, plan: StatePlan, columns: Tensor) -> Tensor:
        """`[T, C]` -> `[T, C]`. Reads and writes states."""
        plan.keep(self._convolved, columns)
        return plan.convolve(self.index, self.conv, columns)

    def store(self, x: Tensor, phases: Tensor, plan: StatePlan, ops: LayerOps) -> None:
        """Write the states. Arguments of `attend`."""
        self.attend(x, phases, plan, ops)
