"""`MlpNextToExperts`: an MLP and a mixture of experts side by side, with norms of their own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.sparse_mlp import SparseMlp


@dataclass(frozen=True, slots=True)
class MlpNextToExperts:
    """`mlp_post_norm(mlp(mlp_norm(x))) + experts_post_norm(experts(x))`; the input is the stream itself."""

    mlp_norm: RmsNorm
    mlp: Mlp
    mlp_post_norm: RmsNorm
    experts: SparseMlp
    """Normalises its input."""
    experts_post_norm: RmsNorm

    def __call__(self, x: Tensor, ops: LayerOps) -> Tensor:
        """`[T, H]` -> `[T, H]`."""
        dense = self.mlp_post_norm(self.mlp(self.mlp_norm(x), ops))
        return self.experts_post_norm(self.experts(x, ops)).add(dense)

    def add_norm(self, residual: Tensor, x: Tensor, norm: RmsNorm, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """`s = residual + self(x)` -> s and `norm(s)`; all `[T, H]`. The residual may be overwritten."""
        return ops.add_norm(residual, self(x, ops), None, norm)
