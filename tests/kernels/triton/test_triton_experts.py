"""Mixtures of experts in Triton kernels: the contract, odd sizes, and what a captured graph needs."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
from triton.runtime.jit import JITFunction

from pdserve.kernels.triton.layer_ops import TritonLayerOps
from tests.kernels.grouped_experts_contract import GroupedExpertsContract, drawn_stack, moved

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TestTritonExperts(GroupedExpertsContract):
    device = DEVICE

    def make_ops(self) -> TritonLayerOps:
        return TritonLayerOps(torch.device(DEVICE))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_sizes_that_fill_no_tile(self, dtype: torch.dtype) -> None:
        stack = drawn_stack(3, 37, 19, dtype, None, has_biases=True)
        x, weights = torch.randn(9, 37).to(dtype), torch.rand(9, 2).to(dtype)
        self.check(x, weights, torch.rand(9, 3).argsort(1)[:, :2], stack)

    def test_a_token_has_the_same_bits_in_any_order(self) -> None:
        stack = moved(drawn_stack(3, 24, 24, torch.bfloat16, None, has_biases=False), DEVICE)
        x, weights = torch.randn(19, 24, device=DEVICE).bfloat16(), torch.rand(19, 2, device=DEVICE).bfloat16()
        experts = torch.rand(19, 3).argsort(1)[:, :2].to(DEVICE)
        ops, order = self.make_ops(), torch.randperm(19)
        found = ops.grouped_experts(x[order], weights[order], experts[order], stack)
        assert torch.equal(found, ops.grouped_experts(x, weights, experts, stack)[order])

    def test_launches_do_not_depend_on_the_chosen_experts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A graph keeps grids and numbers of the launches."""
        stack = moved(drawn_stack(5, 16, 16, torch.float32, None, has_biases=False), DEVICE)
        x, weights = torch.randn(9, 16, device=DEVICE), torch.rand(9, 2, device=DEVICE)
        launches, run = list[Any](), JITFunction.run

        def noted(self: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
            numbers = [value for value in args if not isinstance(value, torch.Tensor)]
            launches[-1].append((self.__name__, grid, numbers, kwargs))
            return run(self, *args, grid=grid, **kwargs)

        monkeypatch.setattr(JITFunction, "run", noted)
        for experts in (torch.zeros(9, 2, dtype=torch.int64), torch.arange(18).view(9, 2) % 5):
            launches.append([])
            self.make_ops().grouped_experts(x, weights, experts.to(DEVICE), stack)
        assert len(launches[0]) == 2
        assert launches[0] == launches[1]

    def test_arguments_that_do_not_fit_are_refused(self) -> None:
        stack = moved(drawn_stack(3, 8, 8, torch.float32, None, has_biases=False), DEVICE)
        x, weights = torch.zeros(2, 8, device=DEVICE), torch.ones(2, 2, device=DEVICE)
        experts = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
        for wrong in (x[:1], x[:, :7], torch.zeros(8, 2, device=DEVICE).t(), x.bfloat16()):
            with pytest.raises(ValueError, match=r"with (experts|matrices)"):
                self.make_ops().grouped_experts(wrong, weights, experts, stack)
        with pytest.raises(ValueError, match=r"with (experts|matrices)"):
            self.make_ops().grouped_experts(x, weights[:, :1], experts, stack)
