"""`FusedLayers`: a step through all layers of a decoder in one call, where an implementation of `LayerOps` can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionPlan
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import Linear
from pdserve.kernels.layers.rms_norm import HeadNorm, RmsNorm


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A decoder layer of attention and a SwiGLU, each added to the residual stream before the norm of what follows."""

    qkv: Linear
    """Queries, keys and values side by side."""
    output: Linear
    gate_up: Linear
    """Gate and up side by side."""
    down: Linear
    qk_norm: HeadNorm | None
    mlp_norm: RmsNorm
    next_norm: RmsNorm
    """The next layer's, or the last."""
    spec: AttentionSpec
    """Without sinks or distance bias."""
    rope: int
    """Index of its phases."""
    index: int
    """The layer's index in the blocks of its KV cache group."""


class FusedLayers(Protocol):
    """All layers of one decoder. One thread at a time calls it."""

    def __call__(
        self,
        residual: Tensor,
        x: Tensor,
        phases: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        output_rows: Tensor | None,
        before_call: Callable[[], None] | None,
    ) -> Tensor | None:
        """Write keys and values of a step's tokens into the cache, and compute the last norm; None, and nothing is written, for
        steps that it leaves to calls layer by layer. The result has the bits of those.

        residual `[T, H]`, overwritten; x `[T, H]`: its first norm; phases: `[T, 1, D / 2]` by `LayerParts.rope`; plans: of each
        layer; output_rows: `[N]` int64, ascending, None: all T; before_call: called before each part of a long step, at least once
        -> `[N, H]`. Raises: ValueError for a slot or a block number outside the cache.
        """
