"""Norms, rotation and linear layers against their formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pdserve.kernels.cpu.linear import (
    BlockedLinear,
    PackedLinear,
    PlainLinear,
    WidenedLinear,
    make_linear,
    make_output_head,
    onednn_multiplies,
    swiglu,
)
from pdserve.kernels.layers.rms_norm import HeadNorm, RmsNorm
from pdserve.kernels.layers.rotary import pair_neighbours, rotary_phases, rotate_heads
from pdserve.kernels.native.native_library import built_library

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
HAS_BFLOAT16 = onednn_multiplies(torch.bfloat16)
NEEDS_BFLOAT16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="oneDNN has no bfloat16 here")


def _close(found: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    tolerance = TOLERANCES[found.dtype] * scale
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.diagonal(2)
@DTYPES
@pytest.mark.parametrize("shape", [(1, 7), (5, 123), (3, 4, 64), (0, 8)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], size: float) -> None:
    x = (torch.randn(shape) * size + size).to(dtype)
    weight = torch.rand(shape[-1]).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    _close(RmsNorm(weight, 1e-6)(x), expected, 2)


@DTYPES
def test_head_norm_writes_into_a_slice(dtype: torch.dtype) -> None:
    x = torch.randn(3, 7, 10).to(dtype)
    weights = torch.rand(5, 10).to(dtype)
    wide = x.double()
    expected = wide.clone()
    expected[:, :5] = wide[:, :5] / (wide[:, :5].square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights.double()
    HeadNorm(weights, 1e-5)(x[:, :5])
    _close(x, expected, 2)


@DTYPES
@pytest.mark.parametrize("magnitude", [1.0, 1.3])
def test_rotation_of_neighbours_is_the_checkpoints_rotation_of_halves(dtype: torch.dtype, magnitude: float) -> None:
    head_dim, heads = 12, 5
    positions = torch.tensor([0, 1, 1000, 131071])
    inverse_frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    x = torch.randn(4, heads, head_dim).to(dtype)

    # With float32 angles, as every implementation has them: a float64 angle differs in its last digits.
    angles = (positions.view(-1, 1) * inverse_frequencies).double()
    cos, sin = (f(torch.cat((angles, angles), -1)).unsqueeze(1) * magnitude for f in (torch.cos, torch.sin))
    first, second = x.double().chunk(2, -1)
    expected = x.double() * cos + torch.cat((-second, first), -1) * sin

    neighbours = pair_neighbours(x.transpose(0, 2).reshape(head_dim, -1), head_dim)
    rotated = neighbours.view(head_dim, heads, 4).transpose(0, 2).contiguous()
    padded = torch.zeros(4, heads + 2, head_dim, dtype=dtype)
    padded[:, :heads] = rotated
    rotate_heads(padded[:, :heads], rotary_phases(positions, inverse_frequencies, torch.tensor(magnitude)))
    halves = torch.cat((padded[:, :heads, 0::2], padded[:, :heads, 1::2]), -1)
    _close(halves, expected, 2)
    assert not padded[:, heads:].any()


def test_pair_neighbours_keeps_heads_apart() -> None:
    rows = torch.arange(12).view(12, 1)
    assert pair_neighbours(rows, 6).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.diagonal(2)
@pytest.mark.parametrize(
    ("layer_type", "dtype"),
    [(kind, dtype) for kind in (PlainLinear, make_linear) for dtype in TOLERANCES]
    + [(PackedLinear, torch.float32), pytest.param(PackedLinear, torch.bfloat16, marks=NEEDS_BFLOAT16)]
    + [(WidenedLinear, torch.bfloat16), (WidenedLinear, torch.float16)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "height"), [(1, 5, 123), (123, 5, 123), (17, 64, 96), (0, 8, 8), (4, 40, 256), (6, 40, 700)]
)
def test_linear(
    layer_type: type[PlainLinear], dtype: torch.dtype, has_bias: bool, rows: int, width: int, height: int
) -> None:
    weight = torch.randn(height, width).to(dtype)
    bias = torch.randn(height).to(dtype) if has_bias else None
    x = torch.randn(rows, width + 3).to(dtype)[:, :width]
    residual = torch.randn(rows, height).to(dtype)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    layer = layer_type(weight, bias)
    _close(layer(x), expected, width**0.5)
    _close(layer.add_to(residual.clone(), x), residual.double() + expected, width**0.5)


def test_large_float32_weights_are_packed_and_right() -> None:
    generator = torch.Generator().manual_seed(0)  # so that the largest error is the same in every run
    weight = torch.randn(1024, 1024, generator=generator)
    layer = make_linear(weight)
    assert isinstance(layer, PackedLinear)
    for rows in (1, 33):
        x = torch.randn(rows, 1024, generator=generator)
        _close(layer(x), x.double() @ weight.double().t(), 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_widened_where_the_processor_multiplies_none(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.kernels.cpu.linear.onednn_multiplies", lambda dtype: False)
    has_blocks = dtype is torch.bfloat16 and built_library() is not None
    assert isinstance(make_linear(torch.ones(8, 8, dtype=dtype)), BlockedLinear if has_blocks else WidenedLinear)
    # no pairs of inputs
    assert isinstance(make_linear(torch.ones(8, 7, dtype=dtype)), WidenedLinear)
    assert isinstance(make_linear(torch.ones(8, 0, dtype=dtype)), WidenedLinear)
    monkeypatch.setattr("pdserve.kernels.cpu.linear.onednn_multiplies", lambda dtype: True)
    if dtype is torch.float16 or HAS_BFLOAT16:
        kind = PackedLinear if dtype is torch.bfloat16 else PlainLinear
        assert isinstance(make_linear(torch.ones(8, 8, dtype=dtype)), kind)


@pytest.mark.parametrize(
    ("machine", "onednn", "pairs", "tiles", "expected"),
    [
        ("x86_64", False, False, False, False),  # AVX2
        ("x86_64", True, False, False, False),  # AVX-512 of Skylake, Cascade Lake and Ice Lake
        ("x86_64", True, True, False, True),  # Cooper Lake, Zen 4 and later
        ("x86_64", True, False, True, True),
        ("aarch64", True, False, False, True),
    ],
)
def test_onednn_is_asked_only_where_the_cpu_multiplies_bfloat16(
    machine: str, onednn: bool, pairs: bool, tiles: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: pairs)
    monkeypatch.setattr("pdserve.kernels.cpu.linear.has_amx", lambda: tiles)
    assert onednn_multiplies(torch.bfloat16) is expected
    if not expected:
        kind = BlockedLinear if built_library() is not None else WidenedLinear
        assert isinstance(make_linear(torch.ones(8, 8).bfloat16()), kind)


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("width", [64, 63])
@DTYPES
def test_an_output_head_returns_float32_whatever_multiplies(
    dtype: torch.dtype, width: int, multiplies: bool, has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if multiplies and dtype is torch.bfloat16 and not HAS_BFLOAT16:
        pytest.skip("oneDNN has no bfloat16 here")
    monkeypatch.setattr("pdserve.kernels.cpu.linear.onednn_multiplies", lambda dtype: multiplies)
    if not has_library:
        monkeypatch.setattr("pdserve.kernels.cpu.linear.built_library", lambda: None)
    generator = torch.Generator().manual_seed(0)
    weight, x, bias = (
        torch.randint(-64, 65, shape, generator=generator).to(dtype) for shape in ((130, width), (70, width), (130,))
    )
    exact = x.double() @ weight.double().t()
    for num_rows in (0, 1, 8, 70):
        for found, expected in (
            (make_output_head(weight)(x[:num_rows]), exact),
            (make_output_head(weight, bias)(x[:num_rows]), exact + bias.double()),
        ):
            assert found.dtype is torch.float32
            assert torch.equal(found.double(), expected[:num_rows])


def test_a_bias_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="bias"):
        make_linear(torch.zeros(4, 3), torch.zeros(3))


@DTYPES
def test_swiglu(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 246).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    _close(swiglu(gate_up), gate * gate.sigmoid() * up, 2)
