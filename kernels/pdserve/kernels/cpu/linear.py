"""Linear layers on a CPU and elsewhere.

GroupedLinear  integers of 4 or 8 bits in groups (`grouped_linear.py`; on a GPU `triton/grouped_linear.py`)
Int8Linear     integers of 8 bits, with rounded inputs (`int8_linear.py`)
PackedLinear   oneDNN's layout of the weight, where the CPU multiplies its dtype; C++ multiplies in bfloat16 over the same memory
BlockedLinear  bfloat16 where the CPU multiplies none: C++ multiplies few rows; for more, parts of the weight become float32
WidenedLinear  weights of 16 bits where neither does: parts of the weight become float32
PlainLinear    torch, any device and dtype
"""

from __future__ import annotations

import platform
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kernels.cpu.grouped_linear import GroupedLinear
from pdserve.kernels.cpu.int8_linear import Int8Linear, Int8Matrix, has_amx
from pdserve.kernels.cpu.matrices import Matrix
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.kernels.layers.packed_groups import fits
from pdserve.kernels.native.native_bfloat import (
    CHANNELS,
    PAIRS_LEVEL,
    TILES_LEVEL,
    NativeBfloatRows,
    has_pairs,
    in_blocks,
    packed_inputs,
)
from pdserve.kernels.native.native_library import NATIVE_DTYPES, NativeLibrary, built_library

_PACKED_FLOAT32_NUMEL = 1 << 20
"""Number of float32 weights below which a layer fits a core's cache, and packing only adds its fixed cost per call."""
_WIDENED_ROWS = 4
"""Number of rows from which a widened product is faster than torch's in 16 bits; measured with AVX2."""
_NATIVE_ROWS_BEFORE_WIDENED = {"avx512": 256}
_OTHER_NATIVE_ROWS_BEFORE_WIDENED = 24
"""Number of rows up to which C++ in bfloat16 is faster than widened products, by the fastest level; measured with AVX2. With
AVX-512 16 rows take 2.8 ms where 256 widened ones take 50 (4,864 x 896), so that 16 times as many rows take less in C++."""
_WIDENED_OUTPUTS = 512
"""Number of outputs whose weights are widened at once: few enough for a core's caches, and measured with AVX2."""

_NATIVE_ROWS, _NATIVE_ROWS_WITH_AMX = 64, 8
"""Number of rows up to which C++ computes without bfloat16 instructions, and without AMX where oneDNN has it: up to so few rows the
weights' bytes decide."""


OutputHead = Callable[[Tensor], Tensor]
"""Hidden states `[N, H]` -> logits `[N, V]`."""


class Linear(Protocol):
    """`y = x weight^T + bias`; weight `[out, in]`."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]`."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`: `[T, out]`, `[T, in]` -> `[T, out]`; the residual may be overwritten."""
        ...


class PlainLinear:
    """Any device and dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._bias is not None:
            residual = residual.add_(self._bias)
        return residual.addmm_(x, self._transposed)


class _WidenedProducts(ABC):
    """A weight of 16 bits on a CPU that multiplies none, where torch takes one product after the other.

    A part of the weight becomes float32 and is multiplied while it is in the cache, then the next part: no second copy of the
    weight is kept. Sums are float32, and rounded once.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._num_outputs = len(weight)
        self._bias = None if bias is None else bias.float()

    @abstractmethod
    def _parts(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Outputs, and their weights `[in, outputs]` in float32, valid until the next part is taken. x: float32 input."""

    def _widened(self, x: Tensor) -> Tensor:
        return self._sums(x).to(x.dtype)

    def _add_widened(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual.copy_(self._sums(x).add_(residual))

    def in_float32(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, out]` float32: the sums before they are rounded."""
        return self._sums(x)

    def _sums(self, x: Tensor) -> Tensor:
        x = x.float()
        sums = x.new_empty((len(x), self._num_outputs))
        for outputs, part in self._parts(x):
            torch.mm(x, part, out=sums[:, outputs])
        return sums if self._bias is None else sums.add_(self._bias)


class WidenedLinear(_WidenedProducts):
    """The weight as it is; few rows are torch's."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._weight = weight
        self._plain = PlainLinear(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._widened(x) if len(x) >= _WIDENED_ROWS else self._plain(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._add_widened(residual, x) if len(x) >= _WIDENED_ROWS else self._plain.add_to(residual, x)

    def _parts(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        widened = x.new_empty((_WIDENED_OUTPUTS, self._weight.shape[1]))
        for first in range(0, self._num_outputs, _WIDENED_OUTPUTS):
            outputs = slice(first, first + _WIDENED_OUTPUTS)
            part = self._weight[outputs]
            yield outputs, widened[: len(part)].copy_(part).t()


class BlockedLinear(_WidenedProducts):
    """The weight in blocks that C++ multiplies in bfloat16, which few rows are. At least one pair of inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, library: NativeLibrary) -> None:
        super().__init__(weight, bias)
        blocks = in_blocks(weight)
        self.native = NativeBfloatRows(blocks, weight.shape[1], weight, bias, library)
        """Computes at most `native_rows` rows."""
        self.native_rows = _NATIVE_ROWS_BEFORE_WIDENED.get(library.levels[0], _OTHER_NATIVE_ROWS_BEFORE_WIDENED)
        self._pairs = blocks.view(torch.int32).squeeze(-1).transpose(0, 1)
        """`[in / 2, blocks, CHANNELS]`: the first input in the low half, as processors of both architectures read memory."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.native(x) if len(x) <= self.native_rows else self._widened(x)

    def in_float32(self, x: Tensor) -> Tensor:
        return self.native.in_float32(x) if len(x) <= self.native_rows else self._sums(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if len(x) <= self.native_rows and residual.stride(1) == 1:
            return self.native.add_to(residual, x)
        return self._add_widened(residual, x)

    def _parts(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        num_pairs, num_blocks, _ = self._pairs.shape
        at_once = _WIDENED_OUTPUTS // CHANNELS
        widened = x.new_empty((num_pairs, 2, at_once, CHANNELS), dtype=torch.int32)
        numbers = widened.view(torch.float32).view(2 * num_pairs, _WIDENED_OUTPUTS)
        for first in range(0, num_blocks, at_once):
            pairs = self._pairs[:, first : first + at_once]
            # bfloat16 is the upper half of float32
            torch.bitwise_left_shift(pairs, 16, out=widened[:, 0, : pairs.shape[1]])
            torch.bitwise_and(pairs, -1 << 16, out=widened[:, 1, : pairs.shape[1]])
            outputs = slice(first * CHANNELS, min(self._num_outputs, first * CHANNELS + _WIDENED_OUTPUTS))
            yield outputs, numbers[:, : outputs.stop - outputs.start]


class PackedLinear:
    """A weight in the layout of oneDNN's matrix product, for any number of rows.

    C++ multiplies in bfloat16 over the same memory, where it is built and oneDNN's layout is the one that it reads.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias
        # Calling the overload directly skips overload resolution, which costs as much as a small product.
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._multiply_with = torch.ops.mkldnn._linear_pointwise.binary
        self.native = _native_rows(self._packed, weight, bias)
        """Computes at most `native_rows` rows; None where oneDNN computes all."""
        self.native_rows = _most_rows()

    def __call__(self, x: Tensor) -> Tensor:
        if self.native is not None and len(x) <= self.native_rows:
            return self.native(x)
        y: Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.native is not None and len(x) <= self.native_rows and residual.stride(1) == 1:
            return self.native.add_to(residual, x)
        y: Tensor = self._multiply_with(x, residual, self._packed, self._bias, "add")
        return y


def _native_rows(packed: Tensor, weight: Tensor, bias: Tensor | None) -> NativeBfloatRows | None:
    if weight.dtype is not torch.bfloat16 or (library := built_library()) is None:
        return None
    padded = packed_inputs(packed, weight)
    return None if padded is None else NativeBfloatRows(packed, padded, weight, bias, library)


def _most_rows() -> int:
    """Number of rows up to which C++ takes no longer than oneDNN."""
    library = built_library()
    fastest = "baseline" if library is None else library.levels[0]
    if fastest == TILES_LEVEL or (fastest == PAIRS_LEVEL and not has_amx()):
        return sys.maxsize
    return _NATIVE_ROWS_WITH_AMX if has_amx() else _NATIVE_ROWS


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """True if oneDNN multiplies this dtype of 16 bits here, by instructions of the CPU.

    With AVX-512 it takes bfloat16 on CPUs without such instructions, too, and emulates it: 256 rows take twice as long as in C++,
    and 16 rows nearly three times.
    """
    ops = torch.ops.mkldnn
    if dtype is not torch.bfloat16:
        return bool(ops._is_mkldnn_fp16_supported())
    return bool(ops._is_mkldnn_bf16_supported()) and not _emulates_bfloat16()


def _emulates_bfloat16() -> bool:
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return is_x86 and not torch.cpu._is_avx512_bf16_supported() and not has_amx()


def make_linear(weight: Matrix, bias: Tensor | None = None) -> Linear:
    """The fastest layer for this weight; a packed one keeps no reference to it."""
    if isinstance(weight, Int8Matrix):
        return Int8Linear(weight, bias)
    if isinstance(weight, GroupedMatrix):
        if weight.values.device.type != "cuda":
            return GroupedLinear(weight, bias)
        # lazy: CPU services never import Triton
        from pdserve.kernels.triton.grouped_linear import TritonGroupedLinear

        return TritonGroupedLinear(weight, bias)
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"weight {tuple(weight.shape)} and bias {None if bias is None else tuple(bias.shape)}")
    if weight.is_cpu and torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        if weight.dtype in (torch.bfloat16, torch.float16) and not onednn_multiplies(weight.dtype):
            library = built_library() if weight.dtype is torch.bfloat16 and has_pairs(weight) else None
            return WidenedLinear(weight, bias) if library is None else BlockedLinear(weight, bias, library)
        if weight.dtype is torch.bfloat16:
            return PackedLinear(weight, bias)
        if weight.dtype is torch.float32 and weight.numel() >= _PACKED_FLOAT32_NUMEL:
            return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def multiplies_groups(
    device: torch.device, dtype: torch.dtype, num_inputs: int, group_size: int, *, is_float: bool
) -> bool:
    """True if a device multiplies inputs of this dtype by a `GroupedMatrix` that is not widened."""
    if device.type != "cuda":
        return dtype in NATIVE_DTYPES and built_library() is not None and not is_float
    if find_spec("triton") is None or not fits(num_inputs, group_size):
        return False
    # older GPUs have no instruction that widens float8
    return not is_float or not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)


def multiplies_float8(device: torch.device) -> bool:
    """True if a device multiplies inputs in float8 by matrices in float8."""
    if device.type != "cuda" or find_spec("triton") is None or torch.version.hip is not None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)


def products_by(dtype: torch.dtype) -> str:
    """The code that multiplies matrices of this dtype in main memory on this machine, by number of rows, as text for people."""
    linear = make_linear(torch.zeros(1024, _PACKED_FLOAT32_NUMEL // 1024, dtype=dtype))
    library = built_library()
    in_cpp = "" if library is None else f"C++ ({library.levels[0]})"
    match linear:
        case BlockedLinear():
            return f"{in_cpp} up to {linear.native_rows} rows, then float32 parts"
        case WidenedLinear():
            return f"torch below {_WIDENED_ROWS} rows, then float32 parts"
        case PackedLinear() if linear.native is None:
            return "oneDNN"
        case PackedLinear():
            return (
                in_cpp
                if linear.native_rows == sys.maxsize
                else f"{in_cpp} up to {linear.native_rows} rows, then oneDNN"
            )
    return "torch"


def make_output_head(weight: Tensor, bias: Tensor | None = None) -> OutputHead:
    """A product whose results are float32 for weights of any dtype, and never rounded to that dtype.

    In bfloat16 the two best of 50,000 logits are often equal after rounding, and the token with the smaller id would win.
    weight: `[V, H]`; hidden states have its dtype. bias: `[V]`.
    """
    if weight.dtype is torch.float32:
        return make_linear(weight, bias)
    if not weight.is_cpu:
        return _DeviceHead(weight, bias)
    linear = make_linear(weight, bias)
    if isinstance(linear, PackedLinear) and linear.native is not None:
        return linear.native.in_float32
    return (linear if isinstance(linear, BlockedLinear) else WidenedLinear(weight, bias)).in_float32


class _DeviceHead:
    """A GPU's product of 16-bit factors: its sums are float32, and are written as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._transposed = weight.t()
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        logits = torch.mm(x, self._transposed, out_dtype=torch.float32)
        return logits if self._bias is None else logits.add_(self._bias)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of gate_up `[T, 2 * I]`, in place -> a view `[T, I]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate, inplace=True).mul_(up)
