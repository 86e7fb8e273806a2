"""Residual addition and RMS normalisation of whole rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.kernels.triton.launch_configs import LaunchConfigs


@triton.jit
def add_norm_rows(
    x, residual, weight, out, x_stride, residual_stride, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    """`s = residual + x`, rounded to the dtype of `residual`; `out = s / sqrt(mean(s^2) + eps) * weight`, in float32.

    One program per row. Without ADD, s is the residual, and x is not read. Reference: `RmsNorm`.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < H
    stream = residual + row * residual_stride + at
    value = tl.load(stream, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(stream, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / H + eps)
    factors = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * H + at, (value * scale * factors).to(out.dtype.element_ty), mask=mask)


def add_norm(residual: Tensor, x: Tensor | None, norm: RmsNorm, configs: LaunchConfigs) -> Tensor:
    """The norm of `residual + x`; the sum overwrites `residual`. x None: the norm of `residual`, which is left unchanged.

    All tensors are `[T, H]`; rows of the inputs may be strided. Raises: ValueError for shapes or strides that do not fit.
    """
    num_rows, size = residual.shape
    added = residual if x is None else x
    if added.shape != residual.shape or norm.weight.shape != (size,) or residual.stride(1) != 1 or added.stride(1) != 1:
        raise ValueError(f"residual {tuple(residual.shape)}, x {tuple(added.shape)}, weight {tuple(norm.weight.shape)}")
    out = residual.new_empty((num_rows, size))
    if num_rows:
        block = triton.next_power_of_2(size)
        add_norm_rows[(num_rows,)](
            added, residual, norm.weight, out, added.stride(0), residual.stride(0), norm.eps,
            H=size, BLOCK=block, ADD=x is not None, num_warps=configs.norm_warps(block), enable_fp_fusion=True,
        )  # fmt: skip
    return out
