"""Linear layers with int8 weights, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu import int8_linear
from pdserve.kernels.cpu.int8_linear import Int8Linear, Int8Matrix, quantize_rows
from pdserve.kernels.cpu.linear import make_linear
from pdserve.kernels.cpu.matrices import stack_rows, tensors
from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.experts import GroupedExperts, make_experts
from pdserve.kernels.native.build_library import BuildError, build
from pdserve.kernels.native.native_library import NativeLibrary
from pdserve.kernels.torch_layer_ops import TorchLayerOps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


KERNELS = ("onednn", "torch", "torch in pieces", "onednn and C++", "C++")


def choose(kernel: str, monkeypatch: pytest.MonkeyPatch, built: NativeLibrary | None) -> None:
    """Have layers made by one of `KERNELS`, which the processor chooses otherwise. Skips those that are not there."""
    if "onednn" in kernel and not int8_linear.has_fast_int8():
        pytest.skip("this CPU has no VNNI")
    if "C++" in kernel and built is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(int8_linear, "has_fast_int8", lambda: "onednn" in kernel)
    monkeypatch.setattr(int8_linear, "has_amx", lambda: "onednn" in kernel)
    monkeypatch.setattr(int8_linear, "built_library", lambda: built if "C++" in kernel else None)
    if "pieces" in kernel:
        monkeypatch.setattr(int8_linear, "has_exact_int_mm", lambda: False)


@pytest.fixture(scope="module")
def built() -> NativeLibrary | None:
    try:
        return NativeLibrary(str(build()))
    except BuildError:
        return None


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, built: NativeLibrary | None) -> str:
    choose(request.param, monkeypatch, built)
    return str(request.param)


def _case(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Int8Matrix, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + inputs + outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    x = (torch.randn(rows, inputs, generator=generator) * torch.rand(rows, 1, generator=generator) * 9).to(dtype)
    return Int8Matrix.quantized(weight), bias, x


def _reference(matrix: Int8Matrix, bias: Tensor | None, x: Tensor) -> Tensor:
    ranges = x.double().abs().amax(-1, keepdim=True).clamp_min(1e-30)
    # numbers between two steps are rounded as float32 sees them
    rounded = torch.floor((x.float() * (127 / ranges.float()) + 128.5).double()) - 128
    assert ((rounded - x.double() * 127 / ranges).abs() <= 0.5 + 1e-4).all()
    y = (rounded @ matrix.values.double().t()) * matrix.scales.double() * (ranges / 127)
    return y if bias is None else y + bias.double()


@pytest.mark.diagonal(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 96), (3, 33, 17), (1, 1, 1), (37, 256, 130), (0, 16, 8)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_layer_computes_the_formula(
    kernel: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, has_bias: bool
) -> None:
    matrix, bias, x = _case(rows, inputs, outputs, dtype)
    given = bias if has_bias else None
    layer = make_linear(matrix, given)
    y = layer(x)
    assert (y.dtype, y.shape) == (dtype, (rows, outputs))
    expected = _reference(matrix, given, x)
    torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    # y is rounded before it is added, and the sum may be smaller than both
    eps = torch.finfo(dtype).eps
    added = layer.add_to(torch.ones(rows, outputs, dtype=dtype), x)
    torch.testing.assert_close(added.double(), expected + 1, rtol=4 * eps, atol=1e-4 + 2 * eps)


def test_a_row_has_the_same_bits_in_any_batch(kernel: str) -> None:
    matrix, bias, x = _case(65, 512, 192, torch.bfloat16)
    layer = Int8Linear(matrix, bias)
    whole = layer(x)
    for start, count in ((0, 1), (64, 1), (3, 7), (16, 32)):
        assert torch.equal(layer(x[start : start + count]), whole[start : start + count])


def _extremes(inputs: int, outputs: int) -> tuple[Int8Matrix, Tensor]:
    """The largest sums: 2816 products of 127 * 127 are beyond float32's integers; every other number differs.

    The scales keep the outputs, and twice the outputs, within float16, where an infinity would hide a difference.
    """
    matrix = Int8Matrix(torch.full((outputs, inputs), 127, dtype=torch.int8), torch.linspace(1e-3, 2e-2, outputs))
    matrix.values[1::2, 3] = -128
    generator = torch.Generator().manual_seed(inputs + outputs)
    x = torch.cat([torch.ones(1, inputs), -torch.ones(1, inputs), torch.randn(12, inputs, generator=generator)])
    x[2, 5:] = x[2, 5:].abs() + 1
    return matrix, x


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_products_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, built: NativeLibrary | None, dtype: torch.dtype
) -> None:
    """Shapes of whole blocks and others, sums beyond float32's integers, and numbers of rows on both sides of every tile.

    With AMX oneDNN corrects its sums in float32, so that those beyond 2^24 differ: by two roundings of the largest output at most.
    """
    cases = [_case(14, *shape, torch.float32) for shape in ((33, 17), (1, 1), (130, 257), (64, 128), (500, 70))]
    num_ordinary = len(cases)
    for matrix, x in (_extremes(2816, 48), _extremes(4867, 3)):
        cases.append((matrix, torch.linspace(-2, 2, len(matrix.scales)), x))
    found: dict[str, list[Tensor]] = {}
    for kernel in KERNELS:
        with monkeypatch.context() as patch:
            try:
                choose(kernel, patch, built)
            except pytest.skip.Exception:
                continue
            outputs = found[kernel] = []
            for matrix, bias, x in cases:
                rows = x.to(dtype)
                for layer in (Int8Linear(matrix, None), Int8Linear(matrix, bias.to(dtype))):
                    outputs += [layer(rows[:count]) for count in (0, 1, 2, 3, 5, 6, 7, 8, 9, 14)]
                    outputs += [
                        layer.add_to(layer(rows[-1:]).repeat(len(rows), 1)[:count], rows[:count]) for count in (1, 9)
                    ]
    assert len(found) > 1 or built is None
    for kernel, outputs in found.items():
        of_case = len(outputs) // len(cases)
        num_equal = num_ordinary if "onednn" in kernel and torch.cpu._is_amx_tile_supported() else len(cases)
        for place, (output, expected) in enumerate(zip(outputs, found["torch in pieces"], strict=True)):
            assert expected.isfinite().all()
            if place < num_equal * of_case:
                assert torch.equal(output, expected), kernel
            else:
                limit = 2 * max(1e-4, torch.finfo(dtype).eps) * float(expected.abs().max()) if len(expected) else 0.0
                torch.testing.assert_close(output, expected, rtol=0, atol=limit)


@pytest.mark.usefixtures("kernel")
def test_one_copy_is_kept() -> None:
    """At most 1.1 times the int8 matrix, whichever kernels read it."""
    matrix = Int8Matrix.quantized(torch.randn(256, 896))
    layer = Int8Linear(matrix, None)
    held = 0
    seen: set[int] = set()
    waiting: list[object] = [layer]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            held += torch.ops.mkldnn._nbytes(each) if each.is_mkldnn else each.nbytes
        elif isinstance(each, tuple):
            waiting += each
        elif type(each).__module__.startswith("pdserve") and not isinstance(each, NativeLibrary):
            waiting += vars(each).values()
    assert matrix.values.nbytes <= held <= 1.1 * matrix.values.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_is_rounded_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 70).to(dtype)
    weight[3] = 0
    matrix = Int8Matrix.quantized(weight)
    assert matrix.values.abs().amax() == 127
    dequantized = matrix.values.float() * matrix.scales[:, None]
    error = (dequantized - weight.float()).abs()
    assert (error <= matrix.scales[:, None] * 0.501).all()
    assert (dequantized.to(dtype)[3] == 0).all()
    assert matrix.nbytes == 40 * 70 + 40 * 4


def test_rows_of_zeros_and_of_no_number(kernel: str) -> None:
    matrix, _, x = _case(4, 32, 8, torch.float32)
    x[0] = 0
    x[1, 5] = torch.nan
    x[2, 7] = torch.inf
    y = Int8Linear(matrix, None)(x)
    assert (y[0] == 0).all()
    # the engine ends a sequence by these, and its batch mates continue
    assert not y[1].isfinite().any()
    assert not y[2].isfinite().any()
    assert torch.equal(y[3:], Int8Linear(matrix, None)(x[3:]))


def test_values_of_rows_use_the_whole_range() -> None:
    values, scales = quantize_rows(torch.tensor([[1.0, -1.0, 0.0, 0.25], [0.0, 0.0, 0.0, 0.0]]))
    assert values.tolist() == [[255, 1, 128, 160], [128, 128, 128, 128]]
    assert scales[0].item() == pytest.approx(1 / 127)


def test_matrices_are_stacked_by_kind() -> None:
    one, two = (Int8Matrix.quantized(torch.randn(rows, 8)) for rows in (3, 5))
    both = stack_rows([one, two])
    assert isinstance(both, Int8Matrix)
    assert torch.equal(both.values, torch.cat([one.values, two.values]))
    assert torch.equal(both.scales, torch.cat([one.scales, two.scales]))
    with pytest.raises(TypeError, match="some of 2 matrices are quantized"):
        stack_rows([one, torch.randn(3, 8)])
    with pytest.raises(TypeError, match="2 of 2"):
        tensors([one, two])


def test_experts_are_quantized_one_by_one() -> None:
    matrices = [(torch.randn(24, 16), torch.randn(16, 12)) for _ in range(3)]
    weights = [ExpertWeights(gate_up, down) for gate_up, down in matrices]
    experts = make_experts(
        ExpertWeights(Int8Matrix.quantized(gate_up), Int8Matrix.quantized(down)) for gate_up, down in matrices
    )
    assert not isinstance(experts, GroupedExperts)
    x = torch.randn(5, 16)
    routing, chosen = torch.rand(5, 2), torch.tensor([[0, 1], [2, 1], [1, 0], [2, 0], [0, 2]])

    ops = TorchLayerOps()
    exact = make_experts(weights)(x, routing, chosen, ops)
    error = (experts(x, routing, chosen, ops) - exact).norm() / exact.norm()
    assert 0 < error < 0.03
