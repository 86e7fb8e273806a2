"""Writes keys and values to their pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.attention.kv_pages import has_latent_rows
from pdserve.kernels.triton.attention.attention_launch import layer_strides


@triton.jit(do_not_specialize=["layer"])
def store_heads(
    k, v, slots, pages, layer, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    block_stride, head_stride, layer_stride, D: tl.constexpr, LATENT: tl.constexpr, BS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One KV head of one token, to its slot; a slot below 0 is written nowhere. With LATENT a key is all there is. Reference:
    `TorchAttentionPlan.store`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    d = tl.arange(0, BLOCK_D)
    mask = d < tl.where(slot >= 0, D, 0)
    page = pages + slot // BS * block_stride + head * head_stride + layer.to(tl.int64) * layer_stride + slot % BS * D
    key = tl.load(k + token * k_token_stride + head * k_head_stride + d, mask=mask, other=0.0)
    tl.store(page + d, key, mask=mask)
    if not LATENT:
        value = tl.load(v + token * v_token_stride + head * v_head_stride + d, mask=mask, other=0.0)
        tl.store(page + BS * D + d, value, mask=mask)


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
    """k and v `[T, Hkv, D]`, rows may be strided; slots `[T]` int64, written in one layer of the cache. Over latent rows v is not
    read, since k contains it."""
    num_tokens, num_kv_heads, head_dim = k.shape
    store_heads[(num_tokens, num_kv_heads)](
        k, v, slots, kv_cache, layer, k.stride(0), k.stride(1), v.stride(0), v.stride(1), *layer_strides(kv_cache),
        D=head_dim, LATENT=has_latent_rows(kv_cache), BS=kv_cache.shape[4], BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
