"""torch's fused attention of a chunk over itself, with the log-sum-exp that joins it to attention over earlier keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from pdserve.kernels.attention.attention_spec import AttentionSpec

FusedAttention = Callable[[Tensor, Tensor, Tensor, AttentionSpec], tuple[Tensor, Tensor]]
"""q `[n, Hq, D]`, k and v `[n, Hkv, D]`, rows may be strided -> `[n, Hq, D]`, a view, and the natural logarithm of the softmax's
denominators, `[n, Hq]` float32, a view."""
_aten = torch.ops.aten


def _of_cpu(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        *_by_head(q, k, v), is_causal=spec.causal, scale=spec.scale
    )
    return out[0].transpose(0, 1), lse[0].t()


def _flash(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(
        *_by_head(q, k, v), is_causal=spec.causal, scale=spec.scale
    )
    return out[0].transpose(0, 1), lse[0].t()


def _cudnn(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *_by_head(q, k, v), attn_bias=None, compute_log_sumexp=True, is_causal=spec.causal, scale=spec.scale
    )
    # [1, Hq, n, 1]
    return out[0].transpose(0, 1), lse[0, :, :, 0].t()


def _by_head(*tensors: Tensor) -> list[Tensor]:
    """Each `[n, H, D]` as `[1, H, n, D]`. All three kernels divide the query heads among the KV heads themselves."""
    return [tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors]


_ON_GPUS: Mapping[str, tuple[FusedAttention, Callable[[SDPAParams], bool], Callable[[], bool]]] = {
    "cudnn": (_cudnn, can_use_cudnn_attention, torch.backends.cuda.cudnn_sdp_enabled),
    "flash": (_flash, can_use_flash_attention, torch.backends.cuda.flash_sdp_enabled),
}


def fused_attention(spec: AttentionSpec, kv_cache: Tensor, names: Sequence[str]) -> FusedAttention | None:
    """The first kernel of `names` that supports heads of this spec, of the cache's dtype on its device; None: there is none.

    names: of `cudnn` and `flash`; a CPU has one of its own. `torch.backends.cuda.enable_cudnn_sdp(False)` and the like
    exclude one.
    """
    if spec.softcap is not None or spec.sinks or spec.distance_bias:
        return None
    if kv_cache.is_cpu:
        return _of_cpu
    # torch's own front end pads other heads
    if spec.head_dim % 8:
        return None
    sizes = ((1, heads, 64, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))
    q, k, v = (kv_cache.new_empty(size) for size in sizes)
    params = SDPAParams(q, k, v, None, 0.0, spec.causal, spec.num_heads != spec.num_kv_heads)
    for name in names:
        attend, supports, is_enabled = _ON_GPUS[name]
        if is_enabled() and supports(params):
            return attend
    return None
