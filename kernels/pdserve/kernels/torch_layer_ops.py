"""`TorchLayerOps`: layer operations in torch, for CPUs and for devices without Triton; the reference of other ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionPlan
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import Linear, swiglu
from pdserve.kernels.layer_ops import Block, SampleTokens, check_digested, check_pairs
from pdserve.kernels.layers.expert_stack import ExpertStack, grouped_products
from pdserve.kernels.layers.fused_layers import FusedLayers, LayerParts
from pdserve.kernels.layers.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.layers.rotary import rotate_heads


class TorchLayerOps:
    """Implements `LayerOps`."""

    sample: SampleTokens | None = None

    def add_norm(self, residual: Tensor, x: Tensor, linear: Linear | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """The addition is fused with the matrix product."""
        residual = residual.add_(x) if linear is None else linear.add_to(residual, x)
        return residual, norm(residual)

    def rotate_and_store(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        qk_norm: HeadNorm | None,
        phases: Tensor,
        plan: AttentionPlan,
        layer: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # queries and keys are adjacent, so one call normalises both and one rotates both
        qk = qkv[:, : spec.num_heads + spec.num_kv_heads]
        if qk_norm is not None:
            qk_norm(qk)
        rotate_heads(qk, phases)
        q, k, v = qkv.split_with_sizes((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
        plan.store(layer, k, v)
        return q, k, v

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)

    def grouped_experts(self, x: Tensor, weights: Tensor, experts: Tensor, stack: ExpertStack) -> Tensor:
        return grouped_products(x, weights, experts, stack, self.swiglu)

    def fuse_layers(self, layers: Sequence[LayerParts]) -> FusedLayers | None:
        return None

    def move_blocks(self, source: Tensor, target: Tensor, pairs: Sequence[Block]) -> None:
        check_pairs(source, target, pairs)
        if pairs:
            read, written = torch.tensor(pairs).t().to(target.device)
            target[written] = source[read]

    def digests(self, pool: Tensor, blocks: Sequence[int]) -> Tensor:
        check_digested(pool, blocks)
        held = pool[torch.tensor(blocks, dtype=torch.int64).to(pool.device)].cpu()
        found = [xxhash.xxh3_64_intdigest(block.view(torch.uint8).numpy()) for block in held]
        return torch.from_numpy(np.array(found, np.uint64).view(np.int64)).to(pool.device)
