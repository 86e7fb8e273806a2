"""One launch that normalizes queries and keys, applies the rotary embedding, and writes keys and values to their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.layers.rms_norm import HeadNorm
from pdserve.kernels.triton.launch_configs import LaunchConfigs


# with a specialised layer number, Triton would compile once for 0, once for 1 and once for multiples of 16
@triton.jit(do_not_specialize=["layer"])
def rotate_and_store_heads(
    qkv, weights, phases, slots, pages,
    qkv_stride, block_stride, head_stride, layer_stride, value_stride, layer, eps,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, BS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one token: queries, keys and values are heads 0 to HQ + 2 HKV - 1 of its row of qkv.

    A query or key is normalized and multiplied by its weights. Then each pair of neighbours (e, o) becomes (e cos - o sin,
    e sin + o cos), in float32 and rounded once. phases `[T, D / 2, 2]` holds cos and sin, which take a thousand instructions and
    are computed once per step. Queries and keys are written back, keys and values to their slots unless the slot is below 0.
    Reference: `HeadNorm`, `rotate_heads`, `TorchAttentionPlan.store`.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    is_rotated = (head < HQ + HKV)[:, None]
    here = (head < HQ + 2 * HKV)[:, None] & (d < D)[None, :]
    row = qkv + token * qkv_stride + head[:, None] * D + d[None, :]
    given = tl.load(row, mask=here, other=0.0).to(tl.float32)
    values = given
    if NORM:
        scale = tl.rsqrt(tl.sum(given * given, 1) / D + eps)
        factors = tl.load(weights + head[:, None] * D + d[None, :], mask=here & is_rotated, other=0.0)
        values = given * scale[:, None] * factors.to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (BLOCK_H, BLOCK_D // 2, 2)))
    cos, sin = tl.split(tl.reshape(tl.load(phases + token * D + d, mask=d < D, other=0.0), (BLOCK_D // 2, 2)))
    cos, sin = cos[None, :], sin[None, :]
    rotated = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK_H, BLOCK_D))
    result = tl.where(is_rotated, rotated, given)
    tl.store(row, result.to(qkv.dtype.element_ty), mask=here & is_rotated)
    slot = tl.load(slots + token).to(tl.int64)
    plane = tl.maximum(head - HQ, 0)
    offsets = (plane % HKV).to(tl.int64) * head_stride + (plane // HKV) * value_stride
    page = pages + (slot // BS) * block_stride + layer.to(tl.int64) * layer_stride + (slot % BS) * D
    is_stored = here & (head >= tl.where(slot >= 0, HQ, HQ + 2 * HKV))[:, None]
    tl.store(page + offsets[:, None] + d[None, :], result.to(pages.dtype.element_ty), mask=is_stored)


def rotate_and_store(
    qkv: Tensor,
    spec: AttentionSpec,
    qk_norm: HeadNorm | None,
    phases: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int,
    configs: LaunchConfigs,
) -> None:
    """Overwrites qkv `[T, Hq + 2 * Hkv, D]`, whose rows may be strided, and the slots `[T]` of layer `layer`."""
    num_tokens, planes, head_dim = qkv.shape
    num_heads, num_kv_heads, block_size = spec.num_heads, spec.num_kv_heads, kv_cache.shape[4]
    if (planes, head_dim) != (num_heads + 2 * num_kv_heads, spec.head_dim) or qkv.stride()[1:] != (head_dim, 1):
        raise ValueError(f"qkv {tuple(qkv.shape)} with strides {qkv.stride()} does not fit {spec}")
    if phases.shape != (num_tokens, 1, head_dim // 2) or slot_mapping.shape != (num_tokens,):
        raise ValueError(f"phases {tuple(phases.shape)} and slots {tuple(slot_mapping.shape)} for {num_tokens} tokens")
    if kv_cache.shape[1] != num_kv_heads or kv_cache.shape[5] != head_dim or not kv_cache.is_contiguous():
        raise ValueError(f"kv_cache {tuple(kv_cache.shape)} does not fit {spec}")
    if qk_norm is not None and qk_norm.weights.shape != (num_heads + num_kv_heads, head_dim):
        raise ValueError(f"the weights of the norm are {tuple(qk_norm.weights.shape)} for {spec}")
    if not num_tokens:
        return
    wide = triton.next_power_of_2(head_dim)
    heads = min(triton.next_power_of_2(planes), max(1, configs.rotate_numbers // wide))
    strides = kv_cache.stride()
    rotate_and_store_heads[(num_tokens, triton.cdiv(planes, heads))](
        qkv, qkv if qk_norm is None else qk_norm.weights, torch.view_as_real(phases), slot_mapping, kv_cache,
        qkv.stride(0), strides[0], strides[1], strides[2], strides[3], layer, 0.0 if qk_norm is None else qk_norm.eps,
        HQ=num_heads, HKV=num_kv_heads, D=head_dim, BS=block_size,
        BLOCK_H=heads, BLOCK_D=wide, NORM=qk_norm is not None, num_warps=configs.rotate_warps, enable_fp_fusion=True,
    )  # fmt: skip
