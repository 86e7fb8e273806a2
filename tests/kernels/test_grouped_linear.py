"""Products with integers of 4 and 8 bits in groups: the numbers that they stand for, with the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu.grouped_linear import GroupedLinear
from pdserve.kernels.cpu.linear import make_linear
from pdserve.kernels.cpu.matrices import stack_rows, with_rows
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix, can_group
from pdserve.kernels.native import native_library
from pdserve.kernels.native.native_grouped import NativeGroupedRows, in_blocks, in_words, places_of
from pdserve.kernels.native.native_library import built_library

LIBRARY = built_library()
LEVELS = [] if LIBRARY is None else LIBRARY.levels
SHAPES = [(64, 64, 32), (70, 96, 8), (1, 32, 32), (200, 128, 128), (130, 256, 16)]
"""Outputs, inputs, and inputs of a group."""


def matrix_of(outputs: int, inputs: int, group: int, bits: int, *, has_offsets: bool, seed: int = 0) -> GroupedMatrix:
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (bits - 1)
    values = torch.randint(-half, half, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = torch.rand(outputs, inputs // group, generator=generator) * 0.1 + 0.01
    offsets = torch.randn(outputs, inputs // group, generator=generator) * 0.1 if has_offsets else None
    return GroupedMatrix(values, scales, offsets, bits)


def inputs_of(rows: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, count, generator=torch.Generator().manual_seed(rows)).to(dtype)


def reference(matrix: GroupedMatrix, bias: Tensor | None, x: Tensor) -> Tensor:
    y = x.double() @ matrix.widened().double().t()
    return y if bias is None else y + bias.double()


def assert_near(found: Tensor, expected: Tensor) -> None:
    """In 16 bits a weight, or a sum, is rounded once."""
    bound = 1e-5 if found.dtype is torch.float32 else 1e-2
    assert (
        (found.double() - expected).abs().max() <= bound * expected.abs().max()
        if found.numel()
        else not expected.numel()
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_few_rows_in_cpp(shape: tuple[int, int, int], bits: int, has_offsets: bool, level: str) -> None:
    assert LIBRARY is not None
    outputs, inputs, group = shape
    matrix = matrix_of(outputs, inputs, group, bits, has_offsets=has_offsets)
    bias = torch.randn(outputs)
    offsets = None if matrix.offsets is None else in_blocks(matrix.offsets)
    words, scales = in_words(matrix.values, bits), in_blocks(matrix.scales)
    for dtype in (torch.float32, torch.bfloat16):
        for added in (None, bias):
            native = NativeGroupedRows(words, scales, offsets, added, outputs, bits, LIBRARY, level)
            whole = inputs_of(23, inputs, dtype)
            first = native(whole)
            assert_near(first, reference(matrix, added, whole))
            assert_near(native.in_float32(whole), reference(matrix, added, whole))
            for rows in (slice(0, 1), slice(3, 5), slice(2, 9), slice(20, 23)):
                assert torch.equal(native(whole[rows]), first[rows])
            residual = inputs_of(23, outputs, dtype)
            found = native.add_to(residual.clone(), whole)
            assert_near(found, reference(matrix, added, whole) + residual.double())
            # rows that are not next to each other
            spread = torch.empty(23, 3 * inputs, dtype=dtype)[:, inputs : 2 * inputs].copy_(whole)
            assert torch.equal(native(spread), first)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_library", [True, False])
def test_any_number_of_rows(bits: int, dtype: torch.dtype, has_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_library:
        monkeypatch.setattr("pdserve.kernels.cpu.grouped_linear.built_library", lambda: None)
    matrix = matrix_of(1100, 96, 32, bits, has_offsets=bits == 4)
    bias = torch.randn(1100, dtype=dtype)
    linear = make_linear(matrix, bias)
    assert isinstance(linear, GroupedLinear)
    for rows in (0, 1, 31, 32, 33, 100):
        x = inputs_of(rows, 96, dtype)
        assert_near(linear(x), reference(matrix, bias, x))
        residual = inputs_of(rows, 1100, dtype)
        expected = reference(matrix, bias, x) + residual.double()
        assert_near(linear.add_to(residual, x), expected)


def test_threads_change_no_bit() -> None:
    matrix = matrix_of(3000, 1024, 32, 4, has_offsets=True)
    linear, x = make_linear(matrix), inputs_of(3, 1024, torch.float32)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(linear(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_every_integer(bits: int) -> None:
    count = 32 // bits
    half = 1 << (bits - 1)
    values = torch.arange(-half, half, dtype=torch.int8).repeat(70)[: 70 * count].view(70, count)
    words = in_words(values, bits)
    assert words.shape == (2, 1, 64)
    for number, place in enumerate(places_of(bits)):
        found = (words << (32 - bits - bits * place)) >> (32 - bits)
        assert torch.equal(found.flatten()[:70], values[:, number].int())
    assert not words.flatten()[70:].any()


def test_rounded_weights_and_their_size() -> None:
    weight = torch.randn(60, 256)
    for bits, largest in ((4, 7), (8, 127)):
        matrix = GroupedMatrix.quantized(weight, bits, 32)
        assert matrix.group_size == 32
        assert int(matrix.values.abs().max()) == largest
        step = matrix.scales.repeat_interleave(32, 1)
        assert ((matrix.widened() - weight).abs() <= step * 0.501).all()
        assert matrix.nbytes == 60 * 256 * bits // 8 + 60 * 8 * 4
    assert GroupedMatrix.quantized(torch.zeros(3, 32), 4, 32).widened().eq(0).all()
    assert can_group(96, 32, 4)
    assert not can_group(100, 32, 4)
    assert not can_group(96, 4, 4)


def test_stacked_and_arranged_rows() -> None:
    fours = matrix_of(10, 64, 32, 4, has_offsets=True)
    eights = matrix_of(6, 64, 16, 8, has_offsets=False, seed=1)
    both = stack_rows([fours, eights, fours])
    assert isinstance(both, GroupedMatrix)
    assert (both.num_bits, both.group_size) == (8, 16)
    assert torch.equal(both.widened(), torch.cat([fours.widened(), eights.widened(), fours.widened()]))
    with pytest.raises(TypeError, match="quantized in different ways"):
        stack_rows([matrix_of(4, 96, 32, 4, has_offsets=False), matrix_of(4, 96, 48, 4, has_offsets=False)])
    with pytest.raises(TypeError, match="are quantized, and some are not"):
        stack_rows([fours, torch.zeros(3, 64)])
    turned = with_rows(fours, lambda rows: rows.flip(0))
    assert isinstance(turned, GroupedMatrix)
    assert torch.equal(turned.widened(), fours.widened().flip(0))
    part = fours.columns(slice(32, 64), slice(1, 2))
    assert torch.equal(part.widened(), fours.widened()[:, 32:])


def test_other_shapes_are_refused() -> None:
    if LIBRARY is None:
        pytest.skip("no C++")
    matrix = matrix_of(10, 64, 32, 4, has_offsets=False)
    native = NativeGroupedRows(in_words(matrix.values, 4), in_blocks(matrix.scales), None, None, 10, 4, LIBRARY)
    with pytest.raises(ValueError, match="of a weight"):
        native(torch.zeros(2, 65))
    with pytest.raises(ValueError, match="of a weight"):
        native.add_to(torch.zeros(2, 11), torch.zeros(2, 64))
    assert native_library.GroupedCall.__doc__
