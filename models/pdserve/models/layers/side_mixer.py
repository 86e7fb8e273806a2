"""A mixer of tokens that is computed next to the attention of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerPlan
from pdserve.kernels.layers.fused_layers import LayerParts
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.layers.decoder_layer import Attention


@dataclass(frozen=True, slots=True)
class SideMixer:
    """The first of two layers with one input: its output is added to that of the attention of the next, which joins it.

    Both together are one layer of the checkpoint, which has two caches.
    """

    input_norm: RmsNorm | None
    """Of both."""
    attention: Attention
    multiplier: float = 1.0
    """Factor of the output."""

    def forward(
        self,
        residual: Tensor,
        x: Tensor,
        next_norm: RmsNorm | None,
        phases: Tensor,
        plan: LayerPlan,
        ops: LayerOps,
        output_rows: Tensor | None = None,
        carried: Tensor | None = None,
        of_tokens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual stream and x as they are, for the next layer, and the output. Arguments: as of `DecoderLayer.forward`."""
        output = self.attention.output(self.attention.attend(x, phases, plan, ops))  # type: ignore[arg-type]  # as in a layer
        return residual, x, output if self.multiplier == 1.0 else output.mul_(self.multiplier)

    def store(self, x: Tensor, phases: Tensor, plan: LayerPlan, ops: LayerOps) -> None:
        """Write the states. Arguments: as of `forward`."""
        self.attention.store(x, phases, plan, ops)  # type: ignore[arg-type]  # each has the plan of its spec

    def parts(self, next_norm: RmsNorm | None, rope: int) -> LayerParts | None:
        """None: it is not part of `LayerOps.fuse_layers`."""
        return None
