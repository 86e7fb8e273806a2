"""The gated MLP of Llama and its relatives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.linear import Linear
from pdserve.kernels.rms_norm import RmsNorm
from pdserve.models.weights.weight_loader import WeightLoader


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`down(silu(gate x) * up x)`."""

    gate_up: Linear
    """Gate and up side by side."""
    down: Linear

    @classmethod
    def load(cls, weights: WeightLoader, prefix: str, hidden_size: int, inner_size: int, *, bias: bool) -> GatedMlp:
        """Read `{prefix}.gate_proj`, `up_proj` and `down_proj`. inner_size: I. Raises: ConfigError."""
        return cls(
            gate_up=weights.column_parallel(
                [f"{prefix}.gate_proj", f"{prefix}.up_proj"], inner_size, hidden_size, bias=bias
            ),
            down=weights.row_parallel(f"{prefix}.down_proj", hidden_size, inner_size, bias=bias),
        )

    def __call__(self, x: Tensor, ops: LayerOps) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        return self.down(ops.swiglu(self.gate_up(x)))

    def add_norm(self, residual: Tensor, x: Tensor, norm: RmsNorm, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """`s = residual + mlp(x)` -> s and `norm(s)`; all `[T, H]`. The residual may be overwritten."""
        return ops.add_norm(residual, ops.swiglu(self.gate_up(x)), self.down, norm)
