"""Layer operations on a CPU: norms, SwiGLU and rotation in C++ (`layer_rows.h`), everything else as `TorchLayerOps`.

Each takes one pass over its rows where torch operations take three to six. Numbers are float32 inside and are rounded once. A row
has the same bits whatever is next to it, with any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionPlan
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import Linear
from pdserve.kernels.layers.fused_layers import FusedLayers, LayerParts
from pdserve.kernels.layers.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.native.native_fused_layers import NativeFusedLayers, can_fuse
from pdserve.kernels.native.native_library import NATIVE_DTYPES, LayerCall, NativeLibrary
from pdserve.kernels.torch_layer_ops import TorchLayerOps

_NORM, _GATE, _ROTATE = range(3)


class NativeLayerOps(TorchLayerOps):
    """Implements `LayerOps` for tensors in main memory. Dtypes that C++ does not read are left to torch."""

    def __init__(self, library: NativeLibrary, level: str | None = None) -> None:
        """level: one of `library.levels`; default: the fastest."""
        self._native_library = library
        self._level = 0 if level is None else library.levels.index(level)

    def add_norm(self, residual: Tensor, x: Tensor, linear: Linear | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """The addition is fused with the matrix product."""
        residual = residual.add_(x) if linear is None else linear.add_to(residual, x)
        weight = norm.weight
        if not (_is_readable(residual) and _is_weight(weight, residual)):
            return residual, norm(residual)
        if weight.shape[0] != residual.shape[1]:
            raise ValueError(f"a norm of {weight.shape[0]} numbers over {tuple(residual.shape)}")
        out = torch.empty(residual.shape, dtype=residual.dtype)
        call = LayerCall(
            x=residual.data_ptr(), x_stride=residual.stride(0), out=out.data_ptr(), out_stride=out.stride(0),
            weight=weight.data_ptr(), dtype=NATIVE_DTYPES[residual.dtype], weight_dtype=NATIVE_DTYPES[weight.dtype],
            num_rows=len(residual), num_heads=1, size=residual.shape[1], eps=norm.eps,
        )  # fmt: skip
        self._run(call, _NORM)
        return residual, out

    def rotate_and_store(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        qk_norm: HeadNorm | None,
        phases: Tensor,
        plan: AttentionPlan,
        layer: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rotated, size = spec.num_heads + spec.num_kv_heads, spec.head_dim
        weights = None if qk_norm is None else qk_norm.weights
        if (
            not _is_readable(qkv)
            or qkv.stride(1) != size
            or phases.shape != (len(qkv), 1, size // 2)
            or not phases.is_contiguous()
            or (weights is not None and not _is_weight(weights, qkv))
        ):
            return super().rotate_and_store(qkv, spec, qk_norm, phases, plan, layer)
        if weights is not None and weights.shape != (num_rotated, size):
            raise ValueError(f"norms {tuple(weights.shape)} of {num_rotated} heads of {size}")
        dtype = NATIVE_DTYPES[qkv.dtype]
        call = LayerCall(
            x=qkv.data_ptr(), x_stride=qkv.stride(0), phases=phases.data_ptr(),
            weight=None if weights is None else weights.data_ptr(), dtype=dtype,
            weight_dtype=dtype if weights is None else NATIVE_DTYPES[weights.dtype], num_rows=len(qkv),
            num_heads=num_rotated, size=size, eps=0.0 if qk_norm is None else qk_norm.eps,
        )  # fmt: skip
        self._run(call, _ROTATE)
        q, k, v = qkv.split_with_sizes((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
        plan.store(layer, k, v)
        return q, k, v

    def swiglu(self, gate_up: Tensor) -> Tensor:
        if not _is_readable(gate_up):
            return super().swiglu(gate_up)
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty((num_rows, size), dtype=gate_up.dtype)
        call = LayerCall(
            x=gate_up.data_ptr(), x_stride=gate_up.stride(0), out=out.data_ptr(), out_stride=size,
            dtype=NATIVE_DTYPES[gate_up.dtype], num_rows=num_rows, num_heads=2, size=size,
        )  # fmt: skip
        self._run(call, _GATE)
        return out

    def fuse_layers(self, layers: Sequence[LayerParts]) -> FusedLayers | None:
        if not layers or not all(map(can_fuse, layers)):
            return None
        return NativeFusedLayers(layers, self._native_library, self._level)

    def _run(self, call: LayerCall, operation: int) -> None:
        call.num_threads = torch.get_num_threads()
        call.parallel = self._native_library.parallel
        self._native_library.layer_rows(byref(call), operation, self._level)


def _is_readable(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in NATIVE_DTYPES and x.stride(-1) == 1


def _is_weight(weight: Tensor, x: Tensor) -> bool:
    return weight.is_contiguous() and weight.dtype in (x.dtype, torch.float32)
