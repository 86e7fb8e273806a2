"""The contract of `LayerOps.grouped_experts`. A test class binds it: `class TestMine(GroupedExpertsContract)` with `make_ops`."""

from __future__ import annotations

import abc

import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import swiglu
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layers.expert_stack import ExpertStack
from pdserve.kernels.layers.expert_weights import ExpertWeights
from pdserve.kernels.layers.gated_activations import ClampedSwiglu, Gate, geglu_tanh, squared_relu
from pdserve.kernels.layers.grouped_matrix import GroupedMatrix
from pdserve.kernels.layers.packed_groups import PackedGroups

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
CLAMPED = ClampedSwiglu(1.7, 1.5)
# num_experts, hidden and inner size, tokens, experts per token
SHAPES = ((5, 24, 40, 7, 2), (3, 8, 72, 45, 3), (40, 64, 24, 1, 1), (1, 40, 8, 20, 1), (2, 16, 16, 0, 2))


def drawn_stack(
    num_experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    gate: Gate | None,
    *,
    has_biases: bool,
    group: tuple[int, int] | None = None,
    rounds_inputs: bool = False,
) -> ExpertStack:
    """group: bits and size of groups of quantized matrices. rounds_inputs: they are in float8."""
    generator = torch.Generator().manual_seed(hidden + inner)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).to(dtype)

    experts, num_rows = [], inner if gate is squared_relu else 2 * inner
    for _ in range(num_experts):
        gate_up, down = drawn(num_rows, hidden), drawn(hidden, inner)
        biases = (drawn(num_rows), drawn(hidden)) if has_biases else (None, None)
        if group is None:
            experts.append(ExpertWeights(gate_up, down, *biases))
        else:
            quantized = [
                GroupedMatrix.in_float8(each, group[1]) if rounds_inputs else GroupedMatrix.quantized(each, *group)
                for each in (gate_up, down)
            ]
            experts.append(ExpertWeights(quantized[0], quantized[1], *biases))
    return ExpertStack.of(experts, gate)


def expected(x: Tensor, weights: Tensor, experts: Tensor, stack: ExpertStack) -> Tensor:
    """The sum, one token and expert at a time in float64."""
    gate_up, down = (each if isinstance(each, Tensor) else each.widened() for each in (stack.gate_up, stack.down))
    out = torch.zeros(x.shape, dtype=torch.float64)
    rows = stack.gate_up.rounded(x.float()) if isinstance(stack.gate_up, PackedGroups) else x
    for token, row in enumerate(rows.double()):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            inner = gate_up[expert].double() @ row
            if stack.gate_up_bias is not None:
                inner += stack.gate_up_bias[expert].double()
            activated = (stack.gate or swiglu)(inner[None])
            if isinstance(stack.down, PackedGroups):
                activated = stack.down.rounded(activated.to(x.dtype).float()).double()
            product = down[expert].double() @ activated[0]
            if stack.down_bias is not None:
                product += stack.down_bias[expert].double()
            out[token] += weight * product
    return out


def moved(stack: ExpertStack, device: str) -> ExpertStack:
    gate_up_bias, down_bias = (
        None if bias is None else bias.to(device) for bias in (stack.gate_up_bias, stack.down_bias)
    )
    return ExpertStack(stack.gate_up.to(device), stack.down.to(device), gate_up_bias, down_bias, stack.gate)


class GroupedExpertsContract(abc.ABC):
    device = "cpu"

    @abc.abstractmethod
    def make_ops(self) -> LayerOps:
        """Make the implementation under test."""

    def check(self, x: Tensor, weights: Tensor, experts: Tensor, stack: ExpertStack) -> Tensor:
        """Compare with `expected`. What lies between the rows of x is NaN."""
        held = torch.full((len(x), x.shape[1] + 24), torch.nan, dtype=x.dtype)
        held[:, : x.shape[1]] = x
        rows = held.to(self.device)[:, : x.shape[1]]
        there = moved(stack, self.device)
        found = self.make_ops().grouped_experts(rows, weights.to(self.device), experts.to(self.device), there)
        assert found.dtype is x.dtype
        tolerance = TOLERANCES[x.dtype]
        exact = expected(x, weights, experts, stack)
        torch.testing.assert_close(found.cpu().double(), exact, atol=tolerance, rtol=tolerance)
        return found

    @pytest.mark.diagonal(2)
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_the_weighted_sum(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        num_experts, hidden, inner, num_tokens, top_k = shape
        generator = torch.Generator().manual_seed(num_tokens)
        x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
        weights = torch.rand(num_tokens, top_k, generator=generator).to(dtype)
        experts = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
        has_biases = num_tokens % 2 > 0
        gate = CLAMPED if has_biases else None
        self.check(x, weights, experts, drawn_stack(num_experts, hidden, inner, dtype, gate, has_biases=has_biases))

    @pytest.mark.parametrize("has_biases", [False, True])
    @pytest.mark.parametrize("group", [None, (4, 32)], ids=["floats", "groups"])
    def test_experts_without_a_gate(self, group: tuple[int, int] | None, has_biases: bool) -> None:
        stack = drawn_stack(
            3, 96, 72 if group is None else 64, torch.float32, squared_relu, has_biases=has_biases, group=group
        )
        generator = torch.Generator().manual_seed(3)
        x, weights = torch.randn(19, 96, generator=generator), torch.rand(19, 2, generator=generator)
        self.check(x, weights, torch.rand(19, 3, generator=generator).argsort(1)[:, :2], stack)

    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    @pytest.mark.parametrize("group", [(4, 16), (4, 32), (8, 32), (8, 96)], ids=str)
    def test_matrices_in_groups(self, group: tuple[int, int], dtype: torch.dtype) -> None:
        """Several tiles of outputs, and inputs that do not fill a run."""
        stack = drawn_stack(3, 96, 96, dtype, CLAMPED, has_biases=True, group=group)
        generator = torch.Generator().manual_seed(group[1])
        x, weights = (
            torch.randn(19, 96, generator=generator).to(dtype),
            torch.rand(19, 2, generator=generator).to(dtype),
        )
        self.check(x, weights, torch.rand(19, 3, generator=generator).argsort(1)[:, :2], stack)

    @pytest.mark.parametrize("group", [32, 96])
    def test_matrices_and_inputs_in_float8(self, group: int) -> None:
        stack = drawn_stack(3, 96, 96, torch.float32, CLAMPED, has_biases=True, group=(8, group), rounds_inputs=True)
        generator = torch.Generator().manual_seed(group)
        x, weights = torch.randn(19, 96, generator=generator), torch.rand(19, 2, generator=generator)
        self.check(x, weights, torch.rand(19, 3, generator=generator).argsort(1)[:, :2], stack)

    @pytest.mark.parametrize("gate", [None, CLAMPED, geglu_tanh], ids=["silu", "clamped", "gelu"])
    def test_activations_far_from_zero(self, gate: Gate | None) -> None:
        stack = drawn_stack(2, 16, 24, torch.float32, gate, has_biases=False)
        x = (
            torch.randn(6, 16, generator=torch.Generator().manual_seed(2))
            * torch.tensor([1, 5, 20, 60, 200, 0.0])[:, None]
        )
        self.check(x, torch.rand(6, 1), torch.tensor([[0], [1]] * 3), stack)

    def test_all_tokens_at_one_expert(self) -> None:
        """More rows than a program takes at once, and experts without any."""
        stack = drawn_stack(4, 16, 24, torch.float32, None, has_biases=True)
        x, weights = torch.randn(37, 16), torch.rand(37, 1)
        self.check(x, weights, torch.full((37, 1), 2), stack)

    def test_a_token_does_not_depend_on_the_others(self) -> None:
        stack = moved(drawn_stack(3, 16, 24, torch.float32, None, has_biases=False), self.device)
        x, weights = torch.randn(21, 16, device=self.device), torch.rand(21, 2, device=self.device)
        experts = torch.rand(21, 3).argsort(1)[:, :2].to(self.device)
        ops, order = self.make_ops(), torch.randperm(21)
        found = ops.grouped_experts(x[order], weights[order], experts[order], stack)
        there = ops.grouped_experts(x, weights, experts, stack)[order]
        torch.testing.assert_close(found, there, atol=1e-6, rtol=0)
