"""LoRA products in Triton kernels: the contract, and what a captured graph needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed: what is installed for a CPU leaves it out")

import torch
from triton.runtime.jit import JITFunction

from pdserve.kernels.lora.lora_linear import NO_ADAPTER, LoraStack
from pdserve.kernels.lora.make_lora_ops import make_lora_ops
from pdserve.kernels.triton.lora_ops import TritonLoraOps
from tests.kernels.lora_contract import ALL, MAX_LORAS, LoraContract, adapter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TestTritonLora(LoraContract):
    device = DEVICE.type

    def make_ops(self, dtype: torch.dtype) -> TritonLoraOps:
        return TritonLoraOps(DEVICE, MAX_LORAS, 128)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_token_has_the_same_bits_alone_and_in_a_batch(self, dtype: torch.dtype) -> None:
        ops, sizes = self.make_ops(dtype), (40, 9)
        adapters = {slot: adapter(slot, rank, (0, 1), 50, sizes) for slot, rank in enumerate((6, 3, 1))}
        layer = self.layer(ops, adapters, dtype, 50, sizes)
        added, x = ops.layer(layer.linear.stack), layer.rows(23, 50)
        slots = np.array([2, NO_ADAPTER, *([0] * 18), 1, 2, 1])

        def products(rows: slice) -> torch.Tensor:
            y = torch.zeros(len(x[rows]), sum(sizes), dtype=dtype, device=DEVICE)
            if ops.set_rows(slots[rows], np.ones(len(y), np.int64)):
                added.add(y, x[rows])
            return y

        together = products(slice(0, 23))
        for row in (0, 1, 2, 19, 20, 22):
            assert torch.equal(products(slice(row, row + 1))[0], together[row])

    def test_launches_do_not_depend_on_the_adapters_of_the_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A graph keeps grids, addresses and numbers of the launches; the rows' adapters are in memory that it reads."""
        ops = self.make_ops(torch.float32)
        layer, launches, run = self.layer(ops, ALL), list[Any](), JITFunction.run

        def noted(self: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
            seen = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in args]
            # the sums between the two launches are memory of the graph
            launches[-1].append(
                (self.__name__, grid, [*seen[:4], *seen[5:]] if len(seen) == 7 else seen[:2] + seen[3:], kwargs)
            )
            return run(self, *args, grid=grid, **kwargs)

        monkeypatch.setattr(JITFunction, "run", noted)
        added, y, x = ops.layer(layer.linear.stack), layer.rows(9, 33), layer.rows(9, 24)
        launches.append([])
        assert ops.set_any_rows()
        before = y.clone()
        added.add(y, x)
        assert torch.equal(y, before), "no row has an adapter yet"
        for slots in ([0] * 9, [3, -1, 0, 0, 1, -1, -1, 3, 2], [-1] * 8 + [1]):
            launches.append([])
            assert ops.set_rows(np.array(slots), np.ones(9, np.int64))
            added.add(y, x)
        assert len(launches[0]) == 2
        assert all(each == launches[0] for each in launches)

    def test_arguments_that_do_not_fit_are_refused(self) -> None:
        ops = self.make_ops(torch.float32)
        stack = LoraStack(24, (8,), max_loras=MAX_LORAS, max_rank=2, dtype=torch.float32, device=DEVICE)
        added = ops.layer(stack)
        ops.set_rows(np.array([0]), np.array([3]))
        y, x = torch.zeros(3, 8, device=DEVICE), torch.zeros(3, 24, device=DEVICE)
        for wrong_y, wrong_x in ((y, x[:2]), (y, x[:, ::2]), (y, x.bfloat16())):
            with pytest.raises(ValueError, match=r"with (24 to 8|matrices)"):
                added.add(wrong_y, wrong_x)


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert isinstance(make_lora_ops("triton", torch.float32, DEVICE, max_loras=1, max_tokens=8), TritonLoraOps)
