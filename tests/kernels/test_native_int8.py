"""Products of rows with int8 matrices in C++: every instruction set of this CPU, threads, and oneDNN's layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu import int8_linear
from pdserve.kernels.cpu.int8_linear import Int8Linear, Int8Matrix, has_fast_int8, quantize_rows
from pdserve.kernels.native import native_int8
from pdserve.kernels.native.native_int8 import BlockedValues, NativeInt8Rows
from pdserve.kernels.native.native_library import NativeLibrary
from tests.support.run.torch_threads import num_threads

DTYPES = (torch.float32, torch.bfloat16)


def in_torch(matrix: Int8Matrix, bias: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> Int8Linear:
    with monkeypatch.context() as patch:
        patch.setattr(int8_linear, "has_fast_int8", lambda: False)
        patch.setattr(int8_linear, "built_library", lambda: None)
        return Int8Linear(matrix, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_has_the_same_bits(
    built: NativeLibrary, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random shapes and numbers of rows; rows of other strides; sums beyond float32's integers."""
    generator = torch.Generator().manual_seed(1)
    assert built.int8_levels[-1] == "baseline"
    for number in range(12):
        rows, inputs, outputs = (int(torch.randint(1, most, (), generator=generator)) for most in (20, 1500, 200))
        values = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, generator=generator)
        if number % 3 == 0:
            values.fill_(127 if number % 2 else -128)
        matrix = Int8Matrix(values, torch.rand(outputs, generator=generator) + 0.01)
        bias = torch.randn(outputs, generator=generator).to(dtype) if number % 2 else None
        x = (torch.randn(rows, inputs + 9, generator=generator) * 10.0 ** (number - 6)).to(dtype)[:, 2 : 2 + inputs]
        if number % 3 == 0:
            x = x.abs().clamp_min(x.abs().max() / 3)
        residual = torch.randn(rows, outputs + 3, generator=generator).to(dtype)[:, 1 : 1 + outputs]
        reference = in_torch(matrix, bias, monkeypatch)
        expected = reference(x)
        expected_sum = reference.add_to(residual.clone(), x)
        for level in built.int8_levels:
            layer = NativeInt8Rows(BlockedValues.of_tensor(values), values, matrix.scales, bias, built, level)
            assert torch.equal(layer(x), expected), level
            assert torch.equal(layer(x.t().contiguous().t()), expected), level
            held = torch.full((rows, outputs + 3), 7.0, dtype=dtype)
            held[:, 1 : 1 + outputs] = residual
            assert torch.equal(layer.add_to(held[:, 1 : 1 + outputs], x), expected_sum), level
            # nothing beside the rows is written
            assert (held[:, 0] == 7).all()
            assert (held[:, 1 + outputs :] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_rounded_as_in_torch(built: NativeLibrary, dtype: torch.dtype) -> None:
    """More than a million numbers: a factor that differs in its last bit changes one in some hundred thousand."""
    identity = Int8Matrix(torch.eye(64, dtype=torch.int8), torch.ones(64))
    x = torch.randn(30_000, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    values, scales = quantize_rows(x)
    expected = ((values.float() - 128) * scales).to(dtype)
    for level in built.int8_levels:
        layer = NativeInt8Rows(
            BlockedValues.of_tensor(identity.values), identity.values, identity.scales, None, built, level
        )
        assert torch.equal(layer(x), expected), level


def test_any_number_of_threads_has_the_same_bits(built: NativeLibrary) -> None:
    matrix = Int8Matrix.quantized(torch.randn(700, 300))
    layer = NativeInt8Rows(BlockedValues.of_tensor(matrix.values), matrix.values, matrix.scales, None, built)
    # enough rows that threads share rounding them, and few
    x = torch.randn(700, 300)
    with num_threads(1):
        expected = layer(x)
    for threads in (2, 3, 20):
        with num_threads(threads):
            assert torch.equal(layer(x), expected)
            assert torch.equal(layer(x[:3]), expected[:3])


@pytest.mark.skipif(not has_fast_int8(), reason="this CPU has no VNNI")
def test_another_layout_of_onednn_is_left_to_it(built: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = Int8Matrix.quantized(torch.randn(70, 90)), torch.randn(3, 90)
    monkeypatch.setattr(int8_linear, "built_library", lambda: built)
    monkeypatch.setattr(int8_linear, "has_amx", lambda: True)
    both = Int8Linear(matrix, None)
    assert both._native is not None
    native_int8._is_onednn_blocked.cache_clear()
    monkeypatch.setattr(native_int8, "blocked", lambda values: values.flatten())
    alone = Int8Linear(matrix, None)
    native_int8._is_onednn_blocked.cache_clear()
    assert alone._native is None
    assert torch.equal(alone(x), both(x))
