"""Products with numbers of 4 and 8 bits in groups in Triton kernels: the numbers that they stand for, in any batch."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
from torch import Tensor

from pdserve.kernels.layers.grouped_matrix import GroupedMatrix, float8_inputs
from pdserve.kernels.layers.packed_groups import PackedGroups, fits
from pdserve.kernels.triton.grouped_linear import TritonGroupedLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = ["int4", "int8", "float8"]
SHAPES = [(64, 64, 32), (70, 96, 16), (1, 32, 32), (40, 256, 128), (33, 100, 100), (16, 192, 192)]
"""Outputs, inputs, and inputs of a group."""


def matrix_of(shape: tuple[int, int, int], form: str, *, has_offsets: bool) -> GroupedMatrix:
    outputs, inputs, group = shape
    generator = torch.Generator().manual_seed(inputs)
    if form == "float8":
        values = torch.randn(outputs, inputs, generator=generator).mul_(50).to(torch.float8_e4m3fn).view(torch.int8)
    else:
        half = 8 if form == "int4" else 128
        values = torch.randint(-half, half, (outputs, inputs), generator=generator, dtype=torch.int8)
    scales = torch.rand(outputs, inputs // group, generator=generator) * 0.1 + 0.01
    offsets = torch.randn(outputs, inputs // group, generator=generator) if has_offsets else None
    return GroupedMatrix(values, scales, offsets, 4 if form == "int4" else 8, form == "float8")


def packed(matrix: GroupedMatrix) -> PackedGroups:
    return PackedGroups.of(matrix).to(DEVICE)


def assert_near(found: Tensor, expected: Tensor) -> None:
    bound = 2e-6 if found.dtype is torch.float32 else 1e-2
    assert (found.cpu().double() - expected).abs().max() <= bound * expected.abs().max()


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """On a GPU. NumPy's products, which the interpreter takes, may round a row otherwise in another place of a tile."""
    if DEVICE == "cuda":
        assert torch.equal(found, expected)
    else:
        assert_near(found, expected.double())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_packed_numbers_are_those_of_the_matrix(form: str, shape: tuple[int, int, int], has_offsets: bool) -> None:
    matrix = matrix_of(shape, form, has_offsets=has_offsets)
    assert torch.equal(packed(matrix).widened().cpu(), matrix.widened())
    stacked = PackedGroups.stacked([packed(matrix), packed(matrix)])
    assert torch.equal(stacked.widened().cpu(), torch.stack([matrix.widened()] * 2))


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_products(shape: tuple[int, int, int], form: str, has_offsets: bool, dtype: torch.dtype) -> None:
    outputs, inputs, _ = shape
    matrix = matrix_of(shape, form, has_offsets=has_offsets)
    bias = torch.randn(outputs).to(dtype)
    for added in (None, bias):
        linear = TritonGroupedLinear(packed(matrix), None if added is None else added.to(DEVICE))
        for rows in (1, 5, 16, 19, 45):
            x = torch.full((rows, inputs + 8), torch.nan, dtype=dtype)
            x[:, :inputs] = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
            x = x.to(DEVICE)[:, :inputs]
            if DEVICE == "cpu" and rows > linear._configs.grouped_rows:
                # oneDNN's product with AMX multiplies what comes after a row of 100 numbers by 0, which a NaN does not survive
                x = x.contiguous()
            expected = x.cpu().double() @ matrix.widened().double().t() + (0 if added is None else added.double())
            found = linear(x)
            assert found.dtype is dtype
            assert_near(found, expected)
            residual = torch.randn(rows, outputs).to(dtype)
            assert_near(linear.add_to(residual.clone().to(DEVICE), x), expected + residual.double())


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_every_small_batch(form: str) -> None:
    linear = TritonGroupedLinear(packed(matrix_of((70, 192, 32), form, has_offsets=True)), None)
    x = torch.randn(16, 192, device=DEVICE).bfloat16()
    whole = linear(x)
    for rows in (slice(0, 1), slice(3, 8), slice(9, 16)):
        assert_same_bits(linear(x[rows]), whole[rows])


@pytest.mark.parametrize("form", FORMS)
def test_many_rows_are_multiplied_by_the_rounded_weights(form: str) -> None:
    """As numbers that are widened at loading."""
    matrix = matrix_of((70, 96, 32), form, has_offsets=True)
    x = torch.randn(70, 96, device=DEVICE).bfloat16()
    weight = matrix.widened().bfloat16().to(DEVICE)
    assert_near(TritonGroupedLinear(packed(matrix), None)(x), x.cpu().double() @ weight.cpu().double().t())


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_inputs_that_are_rounded_too(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    outputs, inputs, group = shape
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs))
    matrix = GroupedMatrix.in_float8(weight, group)
    assert (matrix.widened() - weight).abs().max() <= weight.abs().max() / 16
    bias = torch.randn(outputs).to(dtype)
    linear = TritonGroupedLinear(packed(matrix), bias.to(DEVICE))
    x = torch.full((150, inputs + 8), torch.nan, dtype=dtype)
    x[:, :inputs] = torch.randn(150, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[7, :inputs] = 0
    x[:, 3] *= 100  # a large input costs the others of its group precision
    x = x.to(DEVICE)[:, :inputs]
    values, scales = float8_inputs(x.cpu(), group)
    rounded = (values.double().view(150, -1, group) * scales.double().unsqueeze(-1)).flatten(1)
    expected = rounded @ matrix.widened().double().t() + bias.double()
    for rows in (1, 16, 19, 45, 150):
        assert_near(linear(x[:rows]), expected[:rows])
    residual = torch.randn(150, outputs).to(dtype)
    assert_near(linear.add_to(residual.clone().to(DEVICE), x), expected + residual.double())
    whole = linear(x[:16])
    for part in (slice(0, 1), slice(3, 8)):
        assert_same_bits(linear(x[part]), whole[part])


def test_groups_that_no_tile_holds_have_no_product() -> None:
    assert [fits(96, size) for size in (96, 48, 32, 16, 24, 8)] == [True, True, True, True, False, False]
    assert fits(100, 100)


def test_arguments_that_do_not_fit_are_refused() -> None:
    linear = TritonGroupedLinear(packed(matrix_of((64, 64, 32), "int4", has_offsets=False)), None)
    with pytest.raises(ValueError, match=r"\(2, 32\) -> \(2, 64\) of a weight \(64, 64\)"):
        linear(torch.zeros(2, 32, device=DEVICE))
    with pytest.raises(ValueError, match=r"of a weight \(64, 64\)"):
        linear.add_to(torch.zeros(2, 63, device=DEVICE), torch.zeros(2, 64, device=DEVICE))
    assert linear(torch.zeros(0, 64, device=DEVICE)).shape == (0, 64)
