"""A mixture of experts in C++ (`expert_rows.h`): one call sorts the tokens by expert, and reads each chosen expert's weights once.

Products, activations and the weighted sum are made in float32. The rows between the two products are rounded to the dtype of the
matrices; with int8 matrices both inputs are rounded as in `int8_linear.py`. The order of a token's sums depends only on the shapes
and its own experts: a token has the same bits whatever is next to it, with any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import addressof, byref
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.int8_linear import Int8Matrix
from pdserve.kernels.cpu.matrices import Matrix, tensors
from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.gated_activations import GatedActivation
from pdserve.kernels.native.native_int8 import BlockedValues, NativeInt8Rows
from pdserve.kernels.native.native_library import NATIVE_DTYPES, ExpertsCall, Int8Call, NativeLibrary

_CHANNELS = 64
"""Output channels of a block of a matrix."""
_TOGETHER = {torch.float32: 1, torch.bfloat16: 2}
"""Inputs of a channel that lie side by side."""


def _blocked(matrix: Tensor) -> Tensor:
    """`[out, in]` -> `[blocks, padded / together, 64, together]`, zeros after the matrix."""
    together = _TOGETHER[matrix.dtype]
    whole = F.pad(matrix, (0, -matrix.shape[1] % together, 0, -matrix.shape[0] % _CHANNELS)).contiguous()
    return whole.view(-1, _CHANNELS, whole.shape[1] // together, together).transpose(1, 2).contiguous()


class NativeExperts:
    """Implements `Experts` over blocked matrices, which are the only copy of the weights."""

    def __init__(
        self,
        experts: Iterable[ExpertWeights],
        activation: GatedActivation,
        library: NativeLibrary,
        level: str | None = None,
        int8_level: str | None = None,
    ) -> None:
        """experts: all quantized or none, read one by one; level, int8_level: one of `library.levels` and `library.int8_levels`;
        default: the fastest."""
        self._call = ExpertsCall(
            alpha=activation.alpha, limit=activation.limit, shift=activation.shift, parts=1 + activation.is_gated,
            parallel=library.parallel,
        )  # fmt: skip
        self._dtype: torch.dtype | None = None
        # held here, since the call has only addresses
        self._held: list[object] = []
        remaining = iter(experts)
        first = next(remaining)
        if isinstance(first.gate_up, Int8Matrix):
            self._take_int8(chain([first], remaining), library, int8_level)
        else:
            self._take_floats(chain([first], remaining))
        self._levels = tuple(
            0 if name is None else names.index(name)
            for name, names in ((level, library.levels), (int8_level, library.int8_levels))
        )
        self._apply = library.apply_experts

    def _take_floats(self, experts: Iterable[ExpertWeights]) -> None:
        matrices: list[tuple[Tensor, ...]] = []
        biases: list[tuple[Tensor, Tensor]] = []
        for expert in experts:
            gate_up, down = tensors([expert.gate_up, expert.down])
            matrices.append((*(_blocked(part) for part in gate_up.chunk(self._call.parts)), _blocked(down)))
            if expert.gate_up_bias is not None and expert.down_bias is not None:
                biases.append((expert.gate_up_bias, expert.down_bias))
            self._call.hidden_size, self._call.inner_size = down.shape
            self._dtype = down.dtype
        call, addresses = self._call, [_addresses(each) for each in zip(*matrices, strict=True)]
        *call_gates, call.ups, call.downs = (each.data_ptr() for each in addresses)
        call.gates = call_gates[0] if call_gates else None
        if biases:
            stacked = [torch.stack(each).float() for each in zip(*biases, strict=True)]
            call.inner_biases, call.biases = (each.data_ptr() for each in stacked)
            self._held.append(stacked)
        self._held += [matrices, addresses]
        call.num_experts = len(matrices)

    def _take_int8(self, experts: Iterable[ExpertWeights], library: NativeLibrary, level: str | None) -> None:
        def product(matrix: Matrix, bias: Tensor | None) -> NativeInt8Rows:
            if not isinstance(matrix, Int8Matrix):
                raise TypeError("some matrices of the experts are quantized, and some are not")
            blocks = BlockedValues.of_tensor(matrix.values)
            return NativeInt8Rows(blocks, matrix.values, matrix.scales, bias, library, level)

        products = [(product(each.gate_up, each.gate_up_bias), product(each.down, each.down_bias)) for each in experts]
        gate_ups, downs = ([each.constants for each in matrices] for matrices in zip(*products, strict=True))
        calls = (Int8Call * len(gate_ups))(*gate_ups), (Int8Call * len(downs))(*downs)
        call = self._call
        call.int8_gate_ups, call.int8_downs = map(addressof, calls)
        call.num_experts, call.hidden_size, call.inner_size = len(downs), downs[0].num_outputs, downs[0].num_inputs
        self._held += [products, calls]

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, ops: object = None) -> Tensor:
        """Sum over a token's k experts of weight times the expert's output, in ascending order of the experts.

        x `[T, H]` in the dtype of the matrices, any if these are int8; weights and experts `[T, k]`; ops: not called
        -> `[T, H]`. Raises: ValueError for another shape or dtype, and for an expert that is not there.
        """
        if self._dtype is None and x.dtype not in NATIVE_DTYPES:
            return self(x.float(), weights, experts).to(x.dtype)
        num_tokens, top_k = experts.shape
        call = ExpertsCall.from_buffer_copy(self._call)
        size, inner_size, num_experts = call.hidden_size, call.inner_size, call.num_experts
        num_places = num_tokens * top_k
        dtype = self._dtype or x.dtype
        if x.shape != (num_tokens, size) or weights.shape != experts.shape or x.dtype is not dtype:
            raise ValueError(
                f"x {tuple(x.shape)} {x.dtype} and weights {tuple(weights.shape)} with experts {tuple(experts.shape)} of {size} "
                f"inputs in {dtype}"
            )
        odd = -size % _TOGETHER[dtype]
        if odd or x.stride(1) != 1:
            x = F.pad(x, (0, odd)).contiguous()
        experts, weights = experts.to(torch.int64).contiguous(), weights.to(dtype).contiguous()
        out = torch.empty(num_tokens, size, dtype=dtype)
        numbers = torch.empty(2 * num_experts + 1 + num_places, dtype=torch.int64)
        sums = torch.empty(num_tokens * _padded(size))
        call.dtype, call.x, call.num_tokens, call.x_stride = NATIVE_DTYPES[dtype], x.data_ptr(), num_tokens, x.stride(0)
        call.top_k, call.experts, call.weights = top_k, experts.data_ptr(), weights.data_ptr()
        call.out, call.sums, call.num_threads = out.data_ptr(), sums.data_ptr(), torch.get_num_threads()
        call.starts = numbers.data_ptr()
        call.used = call.starts + 8 * (num_experts + 1)
        call.places = call.used + 8 * num_experts
        if call.int8_downs:
            inner = torch.empty(num_places * call.parts * inner_size)
            rows = torch.empty(num_places * (max(_padded(size), _padded(inner_size)) + 4), dtype=torch.uint8)
            call.row_scales = rows.data_ptr()
            call.rows = call.row_scales + 4 * num_places
        else:
            inner = torch.empty(num_places * _padded(inner_size), dtype=dtype)
        call.inner = inner.data_ptr()
        if self._apply(byref(call), *self._levels):
            raise ValueError(f"a token's expert is not one of {num_experts}")
        return out


def _padded(size: int) -> int:
    return -(-size // _CHANNELS) * _CHANNELS


def _addresses(matrices: Sequence[Tensor]) -> Tensor:
    return torch.tensor([matrix.data_ptr() for matrix in matrices], dtype=torch.int64)
