"""`NativeFusedLayers`: a step through all layers in one C++ call and one parallel region (`fused_layers.h`).

Between two products of a small model, Python, torch and the start of threads take as long as the products themselves. The functions
are those of `native_bfloat.py`, `native_layer_ops.py` and `native_attention.py`, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, Array, byref, c_void_p, pointer

import torch
from torch import Tensor

from pdserve.kernels.attention.attention_backend import AttentionPlan
from pdserve.kernels.cpu.linear import BlockedLinear, Linear, PackedLinear
from pdserve.kernels.layers.fused_layers import LayerParts
from pdserve.kernels.native.native_attention import CHANGED, NativeAttentionPlan
from pdserve.kernels.native.native_bfloat import CHANNELS, NativeBfloatRows
from pdserve.kernels.native.native_library import (
    NATIVE_DTYPES,
    DecodeArguments,
    FusedCall,
    FusedLayer,
    FusedNorm,
    NativeLibrary,
    PrefillArguments,
)

_KINDS = (PackedLinear, BlockedLinear)
"""Layers whose weights C++ may read."""
_LAYER_ROWS = 2048
"""Number of layers times rows of one call: a step of many rows is several calls, so that its progress is visible between them."""


class NativeFusedLayers:
    """Implements `FusedLayers`."""

    def __init__(self, layers: Sequence[LayerParts], library: NativeLibrary, level: int) -> None:
        """layers: at least one, of which `can_fuse` says True. level: index in `library.levels`."""
        # held here, since the call has only addresses
        self._layers = tuple(layers)
        self._run, self._level, self._sum_rows = library.fused_layers, level, library.fused_sum_rows
        specs = [layer.spec for layer in layers]
        unique = list(dict.fromkeys(specs))
        self._first_of_spec = [specs.index(spec) for spec in unique]
        self._num_ropes = 1 + max(layer.rope for layer in layers)
        self._max_rows = min(linear.native_rows for layer in layers for linear in _packed(layer))
        self._native = (FusedLayer * len(layers))()
        for made, layer in zip(self._native, layers, strict=True):
            made.qkv, made.output, made.gate_up, made.down = (native.matrix for native in _natives(layer))
            if layer.qk_norm is not None:
                made.qk_norm = _norm(layer.qk_norm.weights, layer.qk_norm.eps)
            made.mlp_norm = _norm(layer.mlp_norm.weight, layer.mlp_norm.eps)
            made.next_norm = _norm(layer.next_norm.weight, layer.next_norm.eps)
            # gates and ups share no block of channels, so they are multiplied with each other as they are computed
            made.is_gated = made.gate_up.num_outputs % (2 * CHANNELS) == 0
            made.spec, made.rope, made.index = unique.index(layer.spec), layer.rope, layer.index
        hidden_size = self._native[0].qkv.num_inputs
        self._sizes = (
            max(made.qkv.num_outputs for made in self._native),
            max(made.output.num_inputs for made in self._native),
            max(0 if made.is_gated else made.gate_up.num_outputs for made in self._native),
            max(made.down.num_inputs for made in self._native),
            hidden_size,
        )
        """Numbers per row of the room for qkv, attended, gate_up, inner and chosen."""
        self._constants = FusedCall(
            hidden_size=hidden_size, num_outputs=-1, parallel=library.parallel, barrier=library.barrier
        )
        self._rooms = [torch.empty(0, dtype=torch.bfloat16)] * len(self._sizes)
        self._num_sums = -(-max(self._sizes[0], hidden_size) // CHANNELS) * CHANNELS
        """The same of sums, in float32."""
        self._sums = torch.empty(0)

    def __call__(
        self,
        residual: Tensor,
        x: Tensor,
        phases: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        output_rows: Tensor | None,
        before_call: Callable[[], None] | None,
    ) -> Tensor | None:
        num_rows = len(residual)
        if not 0 < num_rows <= self._max_rows or residual.dtype is not torch.bfloat16:
            return None
        of_specs = [_native_plan(plans[index]) for index in self._first_of_spec]
        found = [plan for plan in of_specs if plan is not None]
        if len(found) < len(of_specs):
            return None
        out = x.clone(memory_format=torch.contiguous_format)
        residual = residual.contiguous()
        if self._rooms[0].numel() < num_rows * self._sizes[0]:
            self._rooms = [torch.empty(num_rows * size, dtype=torch.bfloat16) for size in self._sizes]
            self._sums = torch.empty(self._sum_rows(num_rows) * self._num_sums)
        angles = [phase.contiguous() for phase in phases[: self._num_ropes]]
        slots = [plan.slot_mapping.contiguous() for plan in found]
        decodes, chunks = zip(*(plan.calls() for plan in found), strict=True)
        call = FusedCall.from_buffer_copy(self._constants)
        call.num_rows, call.num_threads = num_rows, torch.get_num_threads()
        call.decodes = (POINTER(DecodeArguments) * len(found))(*map(pointer, decodes))
        of_chunks = (POINTER(PrefillArguments)() if chunk is None else pointer(chunk) for chunk in chunks)
        call.chunks = (POINTER(PrefillArguments) * len(found))(*of_chunks)
        call.slots, call.phases = _addresses(slots), _addresses(angles)
        call.residual, call.x = residual.data_ptr(), out.data_ptr()
        call.qkv, call.attended, call.gate_up, call.inner, call.chosen = (room.data_ptr() for room in self._rooms)
        call.sums = self._sums.data_ptr()
        if output_rows is not None:
            output_rows = output_rows.contiguous()
            call.output_rows = output_rows.data_ptr()
        num_layers = len(self._native)
        at_once = max(1, _LAYER_ROWS // num_rows)
        for first in range(0, num_layers, at_once):
            call.layers, call.num_layers = pointer(self._native[first]), min(at_once, num_layers - first)
            if output_rows is not None and first + at_once >= num_layers:
                call.num_outputs = len(output_rows)
            if before_call is not None:
                before_call()
            if self._run(byref(call), self._level):
                raise ValueError(CHANGED)
        return out if output_rows is None else out[: len(output_rows)]


def can_fuse(layer: LayerParts) -> bool:
    """True if C++ reads all of the layer's weights."""
    if not all(isinstance(linear, _KINDS) and linear.native is not None for linear in _linears(layer)):
        return False
    spec = layer.spec
    heads, size = spec.num_heads + spec.num_kv_heads, spec.head_dim
    qkv, output, gate_up, down = (native.matrix for native in _natives(layer))
    hidden = qkv.num_inputs
    norms: list[tuple[Tensor, tuple[int, ...]]] = [
        (layer.mlp_norm.weight, (hidden,)),
        (layer.next_norm.weight, (hidden,)),
    ]
    if layer.qk_norm is not None:
        norms.append((layer.qk_norm.weights, (heads, size)))
    return (
        not spec.sinks
        and not spec.distance_bias
        and spec.causal
        and qkv.num_outputs == (heads + spec.num_kv_heads) * size
        and output.num_inputs == spec.num_heads * size
        and output.num_outputs == gate_up.num_inputs == down.num_outputs == hidden
        and gate_up.num_outputs == 2 * down.num_inputs
        and all(weight.is_contiguous() and weight.dtype in NATIVE_DTYPES for weight, _ in norms)
        and all(tuple(weight.shape) == shape for weight, shape in norms)
    )


def _linears(layer: LayerParts) -> tuple[Linear, Linear, Linear, Linear]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _packed(layer: LayerParts) -> list[PackedLinear | BlockedLinear]:
    return [linear for linear in _linears(layer) if isinstance(linear, _KINDS)]


def _natives(layer: LayerParts) -> list[NativeBfloatRows]:
    return [linear.native for linear in _packed(layer) if linear.native is not None]


def _norm(weight: Tensor, eps: float) -> FusedNorm:
    return FusedNorm(weight=weight.data_ptr(), weight_dtype=NATIVE_DTYPES[weight.dtype], eps=eps)


def _native_plan(plan: AttentionPlan) -> NativeAttentionPlan | None:
    """The plan if C++ reads its pages, in bfloat16."""
    return plan if isinstance(plan, NativeAttentionPlan) and plan.kv_cache.dtype is torch.bfloat16 else None


def _addresses(tensors: Sequence[Tensor]) -> Array[c_void_p]:
    return (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
