"""Products with bfloat16 matrices in C++, where oneDNN has bfloat16 over its memory: instruction sets, threads, layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu import linear
from pdserve.kernels.cpu.linear import BlockedLinear, PackedLinear, WidenedLinear, onednn_multiplies
from pdserve.kernels.native.native_bfloat import PAIRS_LEVEL, TILES_LEVEL, NativeBfloatRows, in_blocks, packed_inputs
from pdserve.kernels.native.native_library import NativeLibrary
from tests.support.run.torch_threads import num_threads

HAS_BFLOAT16 = onednn_multiplies(torch.bfloat16)


def _packed(weight: Tensor) -> Tensor:
    if not HAS_BFLOAT16:
        pytest.skip("oneDNN has no bfloat16 here")
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed


def _made(weight: Tensor, bias: Tensor | None, library: NativeLibrary, level: str | None = None) -> NativeBfloatRows:
    if not HAS_BFLOAT16:
        return NativeBfloatRows(in_blocks(weight), weight.shape[1], weight, bias, library, level)
    packed = _packed(weight)
    padded = packed_inputs(packed, weight)
    if padded is None:
        pytest.skip("oneDNN has another layout here")
    return NativeBfloatRows(packed, padded, weight, bias, library, level)


def _weight(num_outputs: int, num_inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_every_instruction_set_and_number_of_rows(built: NativeLibrary) -> None:
    """Random shapes, rows of other strides, with and without a bias and a residual: within a rounding of the exact sums."""
    generator = torch.Generator().manual_seed(1)
    for number, num_rows in enumerate((1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 25, 31, 33, 70, 97, 200)):
        outputs, inputs = (int(torch.randint(16, most, (), generator=generator)) for most in (300, 1200))
        # whole tiles of AMX, less than one, or some and a rest of pairs
        inputs = 30 if number % 5 == 4 else inputs * 2 if number % 3 else -(-inputs // 16) * 32
        weight = _weight(outputs, inputs, number)
        bias = torch.randn(outputs, generator=generator).bfloat16() if number % 2 else None
        x = torch.randn(num_rows, inputs + 9, generator=generator).bfloat16()[:, 2 : 2 + inputs]
        residual = torch.randn(num_rows, outputs + 3, generator=generator).bfloat16()[:, 1 : 1 + outputs]
        expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
        for level in built.levels:
            layer = _made(weight, bias, built, level)
            torch.testing.assert_close(layer(x).double(), expected, rtol=2**-8, atol=1e-4 * inputs)
            torch.testing.assert_close(layer(x.t().contiguous().t()).double(), expected, rtol=2**-8, atol=1e-4 * inputs)
            held = torch.full((num_rows, outputs + 3), 7.0).bfloat16()
            held[:, 1 : 1 + outputs] = residual
            found = layer.add_to(held[:, 1 : 1 + outputs], x)
            torch.testing.assert_close(found.double(), residual.double() + expected, rtol=2**-8, atol=1e-4 * inputs)
            # nothing beside the rows is written
            assert (held[:, 0] == 7).all()
            assert (held[:, 1 + outputs :] == 7).all()


@pytest.mark.parametrize("num_outputs", [64, 65, 300, 7])
def test_blocks_have_the_order_of_onednn(built: NativeLibrary, num_outputs: int) -> None:
    weight, x = _weight(num_outputs, 128), _weight(30, 128, 1)
    blocks = in_blocks(weight)
    # block, pair, channel, input of the pair
    assert blocks.shape == (-(-num_outputs // 64), 64, 64, 2)
    assert torch.equal(blocks.permute(0, 2, 1, 3).reshape(-1, 128)[:num_outputs], weight)
    found = NativeBfloatRows(blocks, 128, weight, None, built)(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=2**-8, atol=1e-2)
    if HAS_BFLOAT16:
        assert torch.equal(found, _made(weight, None, built)(x))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(64, 2), (300, 130), (1000, 96)])
def test_a_weight_in_blocks_is_multiplied_in_cpp_or_widened(
    built: NativeLibrary, monkeypatch: pytest.MonkeyPatch, num_outputs: int, num_inputs: int, has_bias: bool
) -> None:
    weight, bias = _weight(num_outputs, num_inputs), _weight(1, num_outputs, 1)[0] if has_bias else None
    monkeypatch.setattr(built, "levels", ["avx2"])
    layer = BlockedLinear(weight, bias, built)
    for num_rows in (0, 1, 24, 25, 70):
        x, residual = _weight(num_rows, num_inputs + 3, 2)[:, :num_inputs], _weight(num_rows, num_outputs, 3)
        expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
        torch.testing.assert_close(layer(x).double(), expected, rtol=2**-8, atol=1e-2)
        for rest in (residual.clone(), residual.clone().t().contiguous().t()):
            found = layer.add_to(rest, x)
            torch.testing.assert_close(found.double(), residual.double() + expected, rtol=2**-8, atol=1e-2)
    counted = _count_rows(layer, monkeypatch)
    for num_rows in (24, 25, 3):
        layer(_weight(num_rows, num_inputs))
    assert counted == [24, 3]


@pytest.mark.parametrize(("level", "most"), [("avx512", 256), ("avx2", 24), ("baseline", 24)])
def test_rows_in_cpp_by_instruction_set(
    built: NativeLibrary, monkeypatch: pytest.MonkeyPatch, level: str, most: int
) -> None:
    monkeypatch.setattr(built, "levels", [level])
    layer = BlockedLinear(_weight(64, 32), None, built)
    counted = _count_rows(layer, monkeypatch)
    for num_rows in (1, most, most + 1):
        layer(_weight(num_rows, 32))
    assert counted == [1, most]


def _exact_sums(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight `[130, 512]`, rows, and their sums in float64, which float32 holds, and bfloat16 does not."""
    weight = torch.randint(-64, 65, (130, 512), generator=torch.Generator().manual_seed(2)).bfloat16()
    x = torch.randint(-64, 65, (num_rows, 512), generator=torch.Generator().manual_seed(3)).bfloat16()
    exact = x.double() @ weight.double().t()
    assert (exact.bfloat16().double() != exact).any()
    return weight, x, exact


def test_widened_sums_are_rounded_once(built: NativeLibrary) -> None:
    weight, x, exact = _exact_sums(40)
    residual, bias = torch.full((40, 130), 3.0).bfloat16(), torch.full((130,), 5.0).bfloat16()
    for layer in (BlockedLinear(weight, bias, built), WidenedLinear(weight, bias)):
        assert torch.equal(layer(x), (exact + 5).bfloat16())
        assert torch.equal(layer.add_to(residual.clone(), x), (exact + 8).bfloat16())


def test_sums_are_rounded_once(built: NativeLibrary) -> None:
    weight, x, exact = _exact_sums(9)
    residual, bias = torch.full((9, 130), 3.0).bfloat16(), torch.full((130,), 5.0).bfloat16()
    for level in built.levels:
        assert torch.equal(_made(weight, None, built, level)(x), exact.bfloat16())
        assert torch.equal(_made(weight, bias, built, level).add_to(residual.clone(), x), (exact + 8).bfloat16())


def test_sums_in_float32_are_not_rounded(built: NativeLibrary) -> None:
    weight, x, exact = _exact_sums(40)
    bias = torch.full((130,), 5.0).bfloat16()
    layers: list[NativeBfloatRows | BlockedLinear | WidenedLinear] = [
        *(_made(weight, bias, built, level) for level in built.levels),
        BlockedLinear(weight, bias, built),
        WidenedLinear(weight, bias),
    ]
    for layer in layers:
        for num_rows in (0, 1, 7, 24, 25, 40):
            found = layer.in_float32(x[:num_rows])
            assert found.dtype is torch.float32
            assert torch.equal(found.double(), exact[:num_rows] + 5)


def test_a_row_has_the_same_bits_in_any_company_and_with_any_number_of_threads(built: NativeLibrary) -> None:
    weight = _weight(1000, 900)
    x = torch.randn(230, 900, generator=torch.Generator().manual_seed(4)).bfloat16()
    for level in built.levels:
        layer = _made(weight, None, built, level)
        with num_threads(1):
            alone = torch.cat([layer(x[row : row + 1]) for row in range(len(x))])
        for threads in (1, 2, 3, 20):
            with num_threads(threads):
                for num_rows in (2, 7, 8, 33, 70, 97, 230):
                    assert torch.equal(layer(x[:num_rows]), alone[:num_rows])


def test_not_finite_inputs_stay_in_their_row(built: NativeLibrary) -> None:
    layer = _made(_weight(100, 64), None, built)
    x = torch.ones(3, 64).bfloat16()
    x[1, 5] = torch.nan
    y = layer(x)
    assert y[1].isnan().all()
    assert y[0].isfinite().all()
    assert torch.equal(y[0], y[2])


def test_other_shapes_are_refused(built: NativeLibrary) -> None:
    layer = _made(_weight(100, 64), None, built)
    with pytest.raises(ValueError, match="weight"):
        layer(torch.ones(3, 62).bfloat16())
    with pytest.raises(ValueError, match="weight"):
        layer.add_to(torch.ones(2, 100).bfloat16(), torch.ones(3, 64).bfloat16())


def test_a_layout_that_cpp_does_not_read_is_left_to_onednn(
    built: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = _weight(200, 128)
    packed = _packed(weight)
    assert packed_inputs(packed, weight) is not None
    # memory in another order, an odd number of inputs, numbers that do not show the order
    assert packed_inputs(packed, weight.flip(0)) is None
    assert packed_inputs(packed, weight.flip(1)) is None
    odd = _weight(200, 127)
    assert packed_inputs(_packed(odd), odd) is None
    same = torch.ones(200, 128).bfloat16()
    assert packed_inputs(_packed(same), same) is None
    monkeypatch.setattr(linear, "packed_inputs", lambda packed, weight: None)
    alone, x = PackedLinear(weight, None), torch.ones(3, 128).bfloat16()
    assert alone.native is None
    torch.testing.assert_close(alone(x).double(), x.double() @ weight.double().t(), rtol=2**-8, atol=1e-2)


def _count_rows(layer: PackedLinear | BlockedLinear, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that C++ will have multiplied."""
    assert layer.native is not None
    counted: list[int] = []
    native = layer.native

    def count(x: Tensor) -> Tensor:
        counted.append(len(x))
        return native(x)

    monkeypatch.setattr(layer, "native", count)
    return counted


@pytest.mark.parametrize("has_amx", [True, False])
def test_a_packed_layer_leaves_rows_beyond_a_number_to_onednn(
    built: NativeLibrary, monkeypatch: pytest.MonkeyPatch, has_amx: bool
) -> None:
    monkeypatch.setattr(linear, "built_library", lambda: built)
    monkeypatch.setattr(linear, "has_amx", lambda: has_amx)
    monkeypatch.setattr(built, "levels", built.levels[built.levels.index("avx2") :])
    _packed(_weight(200, 128))  # skips where oneDNN has no bfloat16
    layer = PackedLinear(_weight(200, 128), None)
    counted = _count_rows(layer, monkeypatch)
    most = 8 if has_amx else 64
    for num_rows in (1, most, most + 1):
        layer(torch.ones(num_rows, 128).bfloat16())
    assert counted == [1, most]


@pytest.mark.parametrize(("level", "has_amx"), [(PAIRS_LEVEL, False), (TILES_LEVEL, True)])
def test_cpp_multiplies_any_number_of_rows_with_bfloat16_instructions(
    built: NativeLibrary, monkeypatch: pytest.MonkeyPatch, level: str, has_amx: bool
) -> None:
    if level not in built.levels:
        pytest.skip(f"this CPU, or the library for it, has no {level}")
    monkeypatch.setattr(linear, "built_library", lambda: built)
    monkeypatch.setattr(linear, "has_amx", lambda: has_amx)
    monkeypatch.setattr(built, "levels", built.levels[built.levels.index(level) :])
    layer = PackedLinear(_weight(200, 128), None)
    counted = _count_rows(layer, monkeypatch)
    x = torch.randn(700, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert torch.equal(layer(x)[13:14], layer(x[13:14]))
    assert counted == [700, 1]
