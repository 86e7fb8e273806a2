"""One transformer block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerPlan
from pdserve.kernels.layers.fused_layers import LayerParts
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.layers.gated_delta_net import GatedDeltaNet
from pdserve.models.layers.latent_attention import LatentAttention
from pdserve.models.layers.mamba import Mamba
from pdserve.models.layers.mamba2 import Mamba2
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.layers.short_conv import ShortConv
from pdserve.models.layers.token_inputs import TokenInput


class FeedForward(Protocol):
    """A layer that computes each token independently: `Mlp` or `SparseMlp`."""

    def __call__(self, x: Tensor, ops: LayerOps) -> Tensor:
        """`[T, H]` -> `[T, H]`, new memory."""
        ...

    def add_norm(self, residual: Tensor, x: Tensor, norm: RmsNorm, ops: LayerOps) -> tuple[Tensor, Tensor]:
        """`s = residual + self(x)` -> s and `norm(s)`; all `[T, H]`. The residual may be overwritten."""
        ...


Attention = SelfAttention | LatentAttention | ShortConv | GatedDeltaNet | Mamba | Mamba2
"""The part of a layer that mixes tokens."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention and MLP, each added to the residual stream after a norm of its own.

    Each addition is computed together with the norm that follows it, which after the last part belongs to the next layer.
    """

    input_norm: RmsNorm | None
    """None: the attention's input is the stream itself."""
    attention: Attention
    mlp_norm: RmsNorm | None
    """None: the MLP's input is the stream itself."""
    mlp: FeedForward | None
    """None: the layer ends with its attention."""
    attention_post_norm: RmsNorm | None = None
    """Normalises the attention's output before it is added; None: no norm."""
    mlp_post_norm: RmsNorm | None = None
    """The same of the MLP."""
    attention_multiplier: float = 1.0
    """Factor of the attention's output."""
    mlp_multiplier: float = 1.0
    """Factor of the MLP's output."""
    scale: Tensor | None = None
    """`[1]`: factor of the stream after the layer; None: there is none."""
    token_input: TokenInput | None = None
    """What is added of a token's id before the factor; None: nothing. Needs `scale`."""
    shortcut: FeedForward | None = None
    """A second MLP, or experts, with the input of `mlp`, whose output is added at the end of the next layer; None: no such part."""
    joins_mixer: bool = False
    """True: what the last layer left, a `SideMixer`, is added to the attention's output, before the norm of the MLP."""

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
        """The residual stream after this layer, its `next_norm`, and the output of `shortcut` `[T, H]`.

        residual `[T, H]`, may be overwritten; x `[T, H]`: `input_norm(residual)`, or residual itself without the norm; phases
        `[T, 1, D / 2]`; plan: the step's plan for `attention.spec`; output_rows `[N]`: tokens whose result is needed, None: all T
        -> `[N, H]` each. carried `[T, H]`: what the last layer left: the output of its `shortcut`, or of a mixer. of_tokens
        `[T, P]`: for `token_input`.
        """
        attended = self.attention.attend(x, phases, plan, ops)  # type: ignore[arg-type]  # each has the plan of its spec
        if output_rows is not None:
            residual, attended = residual.index_select(0, output_rows), attended.index_select(0, output_rows)
            carried = None if carried is None else carried.index_select(0, output_rows)
        mixed = carried if self.joins_mixer else None
        norm = next_norm if self.mlp is None else self.mlp_norm
        if self.attention_post_norm is None and norm is not None and self.attention_multiplier == 1.0 and mixed is None:
            residual, x = ops.add_norm(residual, attended, self.attention.output, norm)
        else:
            added = _finished(self.attention.output(attended), self.attention_post_norm, self.attention_multiplier)
            residual, x = _add_norm(residual, added if mixed is None else added.add_(mixed), norm, ops)
        if self.mlp is None:
            return residual, x, None
        left = None if self.shortcut is None else self.shortcut(x, ops)
        if carried is not None and mixed is None:
            residual = residual.add_(carried)
        if self.mlp_post_norm is None and next_norm is not None and self.mlp_multiplier == 1.0 and self.scale is None:
            return *self.mlp.add_norm(residual, x, next_norm, ops), left
        added = _finished(self.mlp(x, ops), self.mlp_post_norm, self.mlp_multiplier)
        if self.scale is None:
            return *_add_norm(residual, added, next_norm, ops), left
        residual, _ = _add_norm(residual, added, None, ops)
        if self.token_input is not None and of_tokens is not None:
            rows = of_tokens if output_rows is None else of_tokens.index_select(0, output_rows)
            residual = residual.add_(self.token_input(residual, rows))
        residual = residual.mul_(self.scale)
        return residual, residual if next_norm is None else next_norm(residual), left

    def store(self, x: Tensor, phases: Tensor, plan: LayerPlan, ops: LayerOps) -> None:
        """Write keys and values, or states, into the cache. Arguments: as of `forward`."""
        self.attention.store(x, phases, plan, ops)  # type: ignore[arg-type]  # each has the plan of its spec

    def parts(self, next_norm: RmsNorm | None, rope: int) -> LayerParts | None:
        """This layer for `LayerOps.fuse_layers`; None if it has more, or other, parts. rope: index of its phases."""
        attention, mlp = self.attention, self.mlp
        has_post_norm = self.attention_post_norm is not None or self.mlp_post_norm is not None
        if (
            has_post_norm
            or self.attention_multiplier != 1.0
            or self.mlp_multiplier != 1.0
            or self.shortcut is not None
            or self.joins_mixer
            or self.mlp_norm is None
            or next_norm is None
            or not isinstance(mlp, Mlp)
            or mlp.gate is not None
            or mlp.gate_multiplier != 1.0
            or not isinstance(attention, SelfAttention)
            or attention.projection_norm is not None
            or attention.sinks is not None
            or attention.value_dim is not None
            or attention.gate is not None
            or attention.input_multiplier != 1.0
            or attention.scales_queries
            or attention.value_norm is not None
            or attention.shared is not None
            or self.scale is not None
        ):
            return None
        return LayerParts(
            qkv=attention.qkv, output=attention.output, gate_up=mlp.gate_up, down=mlp.down, qk_norm=attention.qk_norm,
            mlp_norm=self.mlp_norm, next_norm=next_norm, spec=attention.spec, rope=rope, index=attention.index,
        )  # fmt: skip


def _finished(output: Tensor, norm: RmsNorm | None, factor: float) -> Tensor:
    """`factor * norm(output)`. Overwrites its argument."""
    if norm is not None:
        output = norm(output)
    return output if factor == 1.0 else output.mul_(factor)


def _add_norm(residual: Tensor, added: Tensor, norm: RmsNorm | None, ops: LayerOps) -> tuple[Tensor, Tensor]:
    """`s = residual + added` -> s and `norm(s)`; without a norm, s twice. Overwrites both arguments."""
    if norm is not None:
        return ops.add_norm(residual, added, None, norm)
    residual = residual.add_(added)
    return residual, residual
