"""The MLP of Llama and its relatives, and that of models without a gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.cpu.linear import Linear
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.gated_activations import Gate, geglu_tanh, squared_relu
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.weights.weight_loader import WeightLoader

GATES: Mapping[str, Gate | None] = {"silu": None, "gelu_pytorch_tanh": geglu_tanh, "relu2": squared_relu}
"""Name of an activation in config.json -> its gate; None: `LayerOps.swiglu` computes it. `relu2` is of MLPs without a gate."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(act(multiplier * gate x) * up x)`, or without a gate `down(act(up x))`."""

    gate_up: Linear
    """The weights of gate and up in one matrix, gate first; without a gate those of up."""
    down: Linear
    gate: Gate | None = None
    """None: SiLU."""
    gate_multiplier: float = 1.0
    """Factor of `gate x`."""

    @classmethod
    def load(
        cls,
        weights: WeightLoader,
        prefix: str,
        hidden_size: int,
        inner_size: int,
        *,
        bias: bool,
        activation: str = "silu",
        is_fused: bool = False,
        projections: Sequence[str] = (),
    ) -> Mlp:
        """Read gate, up and down by their names in `projections`; with is_fused the first two are one matrix, without a bias.

        projections: empty: `gate_proj`, `up_proj` and `down_proj`, or `gate_up_proj` and `down_proj`; without a gate up and down.
        inner_size: I. activation: a name in `GATES`. Raises: ConfigError.
        """
        if is_fused:
            fused, last = projections or ("gate_up_proj", "down_proj")
            gate_up = weights.fused_column_parallel(f"{prefix}.{fused}", 2, inner_size, hidden_size)
        else:
            *halves, last = projections or ("gate_proj", "up_proj", "down_proj")
            gate_up = weights.column_parallel(
                [f"{prefix}.{name}" for name in halves], inner_size, hidden_size, bias=bias
            )
        down = weights.row_parallel(f"{prefix}.{last}", hidden_size, inner_size, bias=bias)
        return cls(gate_up, down, GATES[activation])

    def __call__(self, x: Tensor, ops: LayerOps) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        return self.down(self._inner(x, ops))

    def add_norm(self, residual: Tensor, x: Tensor, norm: RmsNorm, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """(s, `norm(s)`) with `s = residual + mlp(x)`; all `[T, H]`. The residual may be overwritten."""
        return ops.add_norm(residual, self._inner(x, ops), self.down, norm)

    def _inner(self, x: Tensor, ops: LayerOps) -> Tensor:
        """`[T, H]` -> `[T, I]`"""
        gate_up = self.gate_up(x)
        if self.gate_multiplier != 1.0:
            gate_up[:, : gate_up.shape[1] // 2].mul_(self.gate_multiplier)
        return (ops.swiglu if self.gate is None else self.gate)(gate_up)
