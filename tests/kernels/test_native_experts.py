"""Mixtures of experts in C++: every instruction set of this CPU against float64, and the independence of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu.int8_linear import Int8Matrix
from pdserve.kernels.cpu.linear import swiglu
from pdserve.kernels.cpu.matrices import tensors
from pdserve.kernels.layers import experts as module
from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.experts import LoopedExperts, make_experts, route_top_k
from pdserve.kernels.layers.gated_activations import ClampedSwiglu, Gate, GatedActivation, geglu_tanh, squared_relu
from pdserve.kernels.native import native_experts
from pdserve.kernels.native.native_experts import NativeExperts
from pdserve.kernels.native.native_library import NativeLibrary
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from tests.support.run.torch_threads import num_threads

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""Norm of the error over that of the result."""
CLAMPED = ClampedSwiglu(1.7, 2.0)
GATES: dict[Gate | None, Gate] = {None: swiglu, CLAMPED: CLAMPED, squared_relu: squared_relu}
# num_experts, hidden and inner size, tokens, experts per token
SHAPES = (
    (1, 1, 1, 1, 1),
    (3, 7, 5, 2, 2),
    (5, 64, 128, 9, 3),
    (8, 97, 65, 40, 4),
    (4, 130, 33, 21, 4),
    (16, 192, 200, 1, 8),
)


def activation_of(gate: Gate | None) -> GatedActivation:
    activation = GatedActivation.of(gate)
    assert activation is not None
    return activation


def drawn_layer(
    num_experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    *,
    has_biases: bool = False,
    gate: Gate | None = None,
) -> list[ExpertWeights]:
    generator = torch.Generator().manual_seed(hidden * inner)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).to(dtype)

    layer: list[ExpertWeights] = []
    num_rows = inner if gate is squared_relu else 2 * inner
    for _ in range(num_experts):
        biases = (drawn(num_rows), drawn(hidden)) if has_biases else (None, None)
        layer.append(ExpertWeights(drawn(num_rows, hidden), drawn(hidden, inner), *biases))
    return layer


def drawn_tokens(
    num_experts: int, hidden: int, num_tokens: int, top_k: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, generator=generator).mul(2).to(dtype)
    logits = torch.randn(num_tokens, num_experts, generator=generator).to(dtype)
    return (x, *route_top_k(logits, top_k, normalise=True))


def expected(x: Tensor, weights: Tensor, experts: Tensor, layer: list[ExpertWeights], act: Gate) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for weight, number in zip(weights[token].double(), experts[token].tolist(), strict=True):
            gate_up, down = (matrix.double() for matrix in tensors(layer[number][:2]))
            inner_bias, bias = (None if each is None else each.double() for each in layer[number][2:])
            inner = gate_up @ row + (0 if inner_bias is None else inner_bias)
            out[token] += weight * (down @ act(inner[None])[0] + (0 if bias is None else bias))
    return out


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("has_biases", [False, True])
def test_every_instruction_set_computes_the_weighted_sum(
    built: NativeLibrary, dtype: torch.dtype, has_biases: bool
) -> None:
    """Odd sizes, blocks that are not full, and more rows of an expert than are multiplied at once."""
    for num_experts, hidden, inner, num_tokens, top_k in SHAPES:
        x, weights, experts = drawn_tokens(num_experts, hidden, num_tokens, top_k, dtype)
        before = x.clone()
        for gate, act in GATES.items():
            layer = drawn_layer(num_experts, hidden, inner, dtype, has_biases=has_biases, gate=gate)
            exact = expected(x, weights, experts, layer, act)
            for level in built.levels:
                native = NativeExperts(layer, activation_of(gate), built, level)
                found = native(x, weights, experts)
                assert found.dtype is dtype
                error = (found.double() - exact).norm() / exact.norm()
                assert error < TOLERANCES[dtype], (level, hidden, inner)
                # columns apart, and rows apart
                assert torch.equal(native(x.t().contiguous().t(), weights, experts), found)
                assert torch.equal(native(torch.cat([x, x], 1)[:, :hidden], weights, experts), found)
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_token_has_the_same_bits_whatever_is_beside_it(built: NativeLibrary, dtype: torch.dtype) -> None:
    """Alone, in any order and number of tokens, with any number of threads, and with its experts in any order."""
    layer = drawn_layer(6, 80, 300, dtype)
    x, weights, experts = drawn_tokens(6, 80, 45, 3, dtype)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(1))
    for level in built.levels:
        native = NativeExperts(layer, GatedActivation(), built, level)
        with num_threads(1):
            whole = native(x, weights, experts)
        for threads in (2, 3, 20):
            with num_threads(threads):
                assert torch.equal(native(x, weights, experts), whole)
        assert torch.equal(native(x[order], weights[order], experts[order]), whole[order])
        assert torch.equal(native(x, weights.flip(1), experts.flip(1)), whole)
        for token in range(0, 45, 11):
            part = slice(token, token + 1)
            assert torch.equal(native(x[part], weights[part], experts[part]), whole[part])
    assert native(x[:0], weights[:0], experts[:0]).shape == (0, 80)


def quantized(layer: list[ExpertWeights]) -> list[ExpertWeights]:
    found = []
    for each in layer:
        gate_up, down = (Int8Matrix.quantized(matrix) for matrix in tensors(each[:2]))
        found.append(ExpertWeights(gate_up, down, each.gate_up_bias, each.down_bias))
    return found


@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.float16], ids=str)
@pytest.mark.parametrize("has_biases", [False, True])
def test_int8_experts(built: NativeLibrary, dtype: torch.dtype, has_biases: bool) -> None:
    """Beside products of one expert at a time, which round the same rows to eight bits; the bits of each instruction set."""
    for num_experts, hidden, inner, num_tokens, top_k in SHAPES:
        x, weights, experts = drawn_tokens(num_experts, hidden, num_tokens, top_k, dtype)
        for gate in GATES:
            layer = drawn_layer(num_experts, hidden, inner, torch.float32, has_biases=has_biases, gate=gate)
            layer = quantized(layer)
            exact = LoopedExperts(layer, gate)(x.float(), weights.float(), experts, TorchLayerOps())
            found = NativeExperts(layer, activation_of(gate), built)(x, weights, experts)
            assert found.dtype is dtype
            # another last bit of an activation may round to another of 255 steps
            assert (found - exact).norm() / exact.norm() < (3e-3 if dtype is torch.float32 else 6e-3), (hidden, inner)
            for int8_level in built.int8_levels:
                native = NativeExperts(layer, activation_of(gate), built, int8_level=int8_level)
                assert torch.equal(native(x, weights, experts), found)
                assert torch.equal(native(x[:1], weights[:1], experts[:1]), found[:1])


def test_one_quantized_matrix_beside_others_is_refused(built: NativeLibrary) -> None:
    layer = drawn_layer(2, 8, 8, torch.float32)
    for mixed in ([*quantized(layer[:1]), layer[1]], [layer[0], *quantized(layer[1:])]):
        with pytest.raises(TypeError, match="quantized"):
            NativeExperts(mixed, GatedActivation(), built)


def test_numbers_that_are_not_finite_stay_in_their_token(built: NativeLibrary) -> None:
    layer = drawn_layer(4, 32, 48, torch.float32)
    x, weights, experts = drawn_tokens(4, 32, 5, 2, torch.float32)
    for level in built.levels:
        native = NativeExperts(layer, GatedActivation(), built, level)
        before = native(x, weights, experts)
        for bad in (torch.nan, torch.inf, -torch.inf):
            changed = x.clone()
            changed[2, 7] = bad
            found = native(changed, weights, experts)
            assert not found[2].isfinite().any()
            others = [0, 1, 3, 4]
            assert torch.equal(found[others], before[others])
        # gates far beyond the range of exp
        large = native(1e4 * x, weights, experts)
        exact = expected(1e4 * x, weights, experts, layer, swiglu)
        assert (large - exact).norm() / exact.norm() < 2e-6


def test_an_expert_without_tokens_is_not_read(built: NativeLibrary) -> None:
    layer = drawn_layer(5, 16, 24, torch.float32)
    layer[3] = ExpertWeights(torch.full((48, 16), torch.nan), torch.full((16, 24), torch.nan))
    native = NativeExperts(layer, GatedActivation(), built)
    experts = torch.tensor([[0, 4], [1, 2], [2, 0]])
    assert native(torch.randn(3, 16), torch.rand(3, 2), experts).isfinite().all()


def test_arguments_that_do_not_fit(built: NativeLibrary) -> None:
    native = NativeExperts(drawn_layer(3, 8, 8, torch.float32), GatedActivation(), built)
    x, weights = torch.randn(2, 8), torch.rand(2, 2)
    for wrong in (-1, 3, 2**40):
        with pytest.raises(ValueError, match="not one of 3"):
            native(x, weights, torch.tensor([[0, 1], [2, wrong]]))
    chosen = torch.tensor([[0, 1], [2, 1]])
    for x in (torch.randn(3, 8), torch.randn(2, 9), torch.randn(2, 8).bfloat16()):
        with pytest.raises(ValueError, match="with experts"):
            native(x, weights, chosen)
    with pytest.raises(ValueError, match="with experts"):
        native(torch.randn(2, 8), torch.rand(2, 3), chosen)


def test_what_c_plus_plus_does_not_compute_is_left_to_torch(
    built: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "built_library", lambda: built)
    monkeypatch.setattr(module, "has_amx", lambda: False)
    layer = drawn_layer(2, 8, 8, torch.float32)
    assert isinstance(make_experts(layer), NativeExperts)
    assert isinstance(make_experts(layer, CLAMPED), NativeExperts)
    assert isinstance(make_experts(layer, geglu_tanh), LoopedExperts)
    assert isinstance(make_experts(drawn_layer(2, 8, 8, torch.float16)), LoopedExperts)
    assert isinstance(make_experts(quantized(layer)), NativeExperts)
    monkeypatch.setattr(module, "has_amx", lambda: True)
    assert isinstance(make_experts(layer), LoopedExperts)
    monkeypatch.setattr(module, "has_amx", lambda: False)
    monkeypatch.setattr(module, "built_library", lambda: None)
    assert isinstance(make_experts(layer), LoopedExperts)


def test_an_expert_is_laid_out_before_the_next_is_read(built: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a layer of many experts is held twice."""
    events: list[str] = []
    blocked = native_experts._blocked

    def recorded(matrix: Tensor) -> Tensor:
        events.append("laid out")
        return blocked(matrix)

    def read() -> Iterator[ExpertWeights]:
        for weights in drawn_layer(2, 8, 8, torch.float32):
            events.append("read")
            yield weights

    monkeypatch.setattr(native_experts, "_blocked", recorded)
    NativeExperts(read(), GatedActivation(), built)
    assert events == ["read", "laid out", "laid out", "laid out"] * 2
