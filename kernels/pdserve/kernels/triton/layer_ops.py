"""`TritonLayerOps`: layer operations in Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionPlan
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import Linear
from pdserve.kernels.layer_ops import Block
from pdserve.kernels.layers.expert_stack import ExpertStack, grouped_products
from pdserve.kernels.layers.fused_layers import FusedLayers, LayerParts
from pdserve.kernels.layers.gated_activations import GatedActivation
from pdserve.kernels.layers.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.sampled_rows import PackedRows
from pdserve.kernels.triton.add_norm import add_norm
from pdserve.kernels.triton.block_digests import block_digests, secret_words
from pdserve.kernels.triton.grouped_experts import grouped_experts
from pdserve.kernels.triton.launch_configs import LaunchConfigs, launch_configs
from pdserve.kernels.triton.move_blocks import move_blocks
from pdserve.kernels.triton.rotate_and_store import rotate_and_store
from pdserve.kernels.triton.sample_tokens import sample_tokens
from pdserve.kernels.triton.swiglu import swiglu


class TritonLayerOps:
    """Implements `LayerOps` for one device. In Triton's interpreter also for CPUs, for tests."""

    def __init__(self, device: torch.device, configs: LaunchConfigs | None = None) -> None:
        """configs: default: the device's row of the table."""
        self._configs = configs or launch_configs(device)
        self._secret = secret_words().to(device)

    def add_norm(self, residual: Tensor, x: Tensor, linear: Linear | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """Two launches: the product adds to the residual and the norm follows, or a plain product, then addition and norm.

        In passes over `[T, H]` in addition to the product itself, the first way needs 4 (the product reads and writes the residual,
        the norm reads it and writes its result), the second 5 (the product writes, the kernel reads both and writes both), and it
        rounds the product once more. The second is for products whose epilogue cannot add (`add_in_product` of the table is False),
        and for experts, whose sum is no product.
        """
        if linear is not None and self._configs.add_in_product:
            residual = linear.add_to(residual, x)
            return residual, add_norm(residual, None, norm, self._configs)
        added = x if linear is None else linear(x)
        return residual, add_norm(residual, added, norm, self._configs)

    def rotate_and_store(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        qk_norm: HeadNorm | None,
        phases: Tensor,
        plan: AttentionPlan,
        layer: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One launch. A token with slot -1 is written to no page, its row of qkv is rotated like any other."""
        rotate_and_store(qkv, spec, qk_norm, phases, plan.kv_cache, plan.slot_mapping, layer, self._configs)
        q, k, v = qkv.split_with_sizes((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
        return q, k, v

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up, self._configs)

    def grouped_experts(self, x: Tensor, weights: Tensor, experts: Tensor, stack: ExpertStack) -> Tensor:
        """Two launches in addition to the sorting and the sum in torch; activations of another form in torch."""
        activation = GatedActivation.of(stack.gate)
        if activation is None:
            return grouped_products(x, weights, experts, stack, self.swiglu)
        return grouped_experts(x, weights, experts, stack, activation, self._configs)

    def fuse_layers(self, layers: Sequence[LayerParts]) -> FusedLayers | None:
        """None: steps of decode rows are captured in graphs."""
        return None

    def move_blocks(self, source: Tensor, target: Tensor, pairs: Sequence[Block]) -> None:
        move_blocks(source, target, pairs, self._configs)

    def digests(self, pool: Tensor, blocks: Sequence[int]) -> Tensor:
        return block_digests(pool, blocks, self._secret, self._configs)

    def sample(self, logits: Tensor, rows: PackedRows) -> Tensor:
        return sample_tokens(logits, rows, self._configs)
