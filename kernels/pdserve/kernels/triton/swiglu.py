"""The activation of the gated MLP."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.triton.launch_configs import LaunchConfigs


@triton.jit
def swiglu_rows(gate_up, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`gate / (1 + exp(-gate)) * up` in float32, rounded once. Reference: `linear.swiglu`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    gate = tl.load(gate_up + row * stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + SIZE + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


def swiglu(gate_up: Tensor, configs: LaunchConfigs) -> Tensor:
    """`[T, 2 * I]`, rows may be strided -> `[T, I]`, contiguous."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} with strides {gate_up.stride()}")
    out = gate_up.new_empty((num_rows, size))
    if num_rows:
        block = min(configs.swiglu_block, triton.next_power_of_2(size))
        swiglu_rows[(num_rows, triton.cdiv(size, block))](
            gate_up, out, gate_up.stride(0),
            SIZE=size, BLOCK=block, num_warps=configs.swiglu_warps, enable_fp_fusion=True,
        )  # fmt: skip
    return out
