"""The contract of every implementation of `LoraOps`. A test class binds it: `class TestMine(LoraContract)` with `make_ops`.

Ragged batches of decode rows and chunks, with several adapters and none, against a product per row in float64.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import make_linear
from pdserve.kernels.lora.lora_linear import NO_ADAPTER, LoraLinear, LoraMatrices, LoraOps, LoraStack

SIZES, MAX_LORAS, MAX_RANK = (16, 8, 9), 4, 6
Adapters = dict[int, dict[int, LoraMatrices]]
"""Slot -> index of a product -> matrices."""
BATCHES = [
    ([0], [1]),
    ([3, 0, 1, 0, 3, 3], [1] * 6),
    ([3] * 9 + [0] * 2, [1] * 11),
    ([NO_ADAPTER, 3, NO_ADAPTER, 1], [1] * 4),
    ([NO_ADAPTER, NO_ADAPTER], [1, 5]),
    ([1, NO_ADAPTER, 0, NO_ADAPTER, 3], [1, 1, 4, 3, 2]),
    ([0, 0, 3], [7, 2, 70]),
    ([2, 0], [1, 3]),
]
"""Slots and numbers of tokens of the rows."""


def adapter(
    seed: int, rank: int, products: Sequence[int] = (0, 1, 2), in_size: int = 24, sizes: Sequence[int] = SIZES
) -> dict[int, LoraMatrices]:
    generator = torch.Generator().manual_seed(seed)
    return {
        index: LoraMatrices(
            torch.randn(rank, in_size, generator=generator), torch.randn(rank, sizes[index], generator=generator)
        )
        for index in products
    }


ALL: Adapters = {0: adapter(1, 6), 1: adapter(2, 1, (1,)), 3: adapter(3, 4, (0, 2))}


@dataclass
class Layer:
    """A layer with adapters, and the numbers that it must give."""

    linear: LoraLinear
    weight: Tensor
    adapters: Adapters
    dtype: torch.dtype
    device: str

    def rows(self, num_tokens: int, size: int, scale: float = 1.0) -> Tensor:
        """Random numbers `[num_tokens, size]`; what lies between the rows is NaN.

        In bfloat16 it is 0 on a CPU: with AMX the layer's own product, oneDNN's, multiplies what follows a row by 0.
        """
        is_read = self.dtype is torch.bfloat16 and self.device == "cpu"
        held = torch.full((num_tokens, size + 5), 0.0 if is_read else torch.nan, dtype=self.dtype)
        held[:, :size] = torch.randn(num_tokens, size) * scale
        return held.to(self.device)[:, :size]

    def expected(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        """float64; slots: of each token."""
        x, y = x.cpu().double(), x.cpu().double() @ self.weight.double().t()
        columns = self.linear.stack.columns
        for token, slot in enumerate(slots):
            for index, matrices in self.adapters.get(slot, {}).items():
                a, b = (matrix.to(self.dtype).double() for matrix in (matrices.a, matrices.b))
                y[token, columns[index]] += x[token] @ a.t() @ b
        return y


class LoraContract(abc.ABC):
    device = "cpu"

    @abc.abstractmethod
    def make_ops(self, dtype: torch.dtype) -> LoraOps:
        """Make the implementation under test."""

    def layer(
        self,
        ops: LoraOps,
        adapters: Adapters,
        dtype: torch.dtype = torch.float32,
        in_size: int = 24,
        sizes: Sequence[int] = SIZES,
        max_rank: int = MAX_RANK,
    ) -> Layer:
        torch.manual_seed(0)
        weight = torch.randn(sum(sizes), in_size).to(dtype)
        device = torch.device(self.device)
        stack = LoraStack(in_size, sizes, max_loras=MAX_LORAS, max_rank=max_rank, dtype=dtype, device=device)
        for slot, products in adapters.items():
            stack.put(slot, products)
        return Layer(LoraLinear(make_linear(weight.to(device)), ops, stack), weight, adapters, dtype, self.device)

    @pytest.mark.parametrize(("slots", "counts"), BATCHES, ids=str)
    def test_each_row_has_the_product_of_its_own_adapter(self, slots: list[int], counts: list[int]) -> None:
        ops = self.make_ops(torch.float32)
        layer = self.layer(ops, ALL)
        x, of_tokens = layer.rows(sum(counts), 24), np.repeat(slots, counts).tolist()
        assert ops.set_rows(np.array(slots), np.array(counts)) == ops.has_adapters == (max(slots) >= 0)
        reference = layer.expected(x, of_tokens)
        torch.testing.assert_close(layer.linear(x).cpu().double(), reference, atol=1e-4, rtol=1e-4)
        residual = layer.rows(len(x), sum(SIZES))
        summed = residual.cpu().double() + reference
        torch.testing.assert_close(layer.linear.add_to(residual, x).cpu().double(), summed, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(
        ("in_size", "sizes", "ranks"), [(7, (5,), (1, 3)), (100, (70, 33), (9, 16)), (48, (90,), (16, 12))], ids=str
    )
    def test_sizes(self, dtype: torch.dtype, in_size: int, sizes: tuple[int, ...], ranks: tuple[int, ...]) -> None:
        ops, products = self.make_ops(dtype), range(len(sizes))
        adapters = {slot: adapter(slot, rank, products, in_size, sizes) for slot, rank in enumerate(ranks)}
        layer = self.layer(ops, adapters, dtype, in_size, sizes, max_rank=16)
        slots, counts = [1, 0, NO_ADAPTER, 1, 1, 1, 1, 1, 0, 1], [1] * 8 + [3, 18]
        of_tokens = np.repeat(slots, counts).tolist()
        x = layer.rows(len(of_tokens), in_size, in_size**-0.5)
        ops.set_rows(np.array(slots), np.array(counts))
        reference = layer.expected(x, of_tokens)
        atol, rtol = (0.2, 0.05) if dtype is torch.bfloat16 else (1e-4, 1e-4)
        torch.testing.assert_close(layer.linear(x).cpu().double(), reference, atol=atol, rtol=rtol)

    def test_rows_without_an_adapter_are_those_of_the_layer_alone_bit_for_bit(self) -> None:
        ops = self.make_ops(torch.float32)
        layer = self.layer(ops, ALL)
        x = layer.rows(9, 24)
        alone = layer.linear(x)
        slots, counts = np.array([NO_ADAPTER, 0, NO_ADAPTER, 3, NO_ADAPTER]), np.array([1, 1, 1, 4, 2])
        ops.set_rows(slots, counts)
        plain = torch.from_numpy(np.repeat(slots, counts) == NO_ADAPTER)
        found = layer.linear(x)
        assert torch.equal(found[plain], alone[plain])
        assert (found[~plain] != alone[~plain]).any(1).all()

    def test_other_adapters_in_the_batch_change_no_bit_of_a_row(self) -> None:
        """As many rows per adapter, in other slots and beside other rows: only the neighbours differ."""
        ops = self.make_ops(torch.float32)
        layer = self.layer(ops, ALL | {2: adapter(9, 6)})
        x = layer.rows(4, 24)
        results = []
        for others in (0, 1, 2):
            ops.set_rows(np.array([3, others, 3, others]), np.ones(4, np.int64))
            results.append(layer.linear(x)[[0, 2]])
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    def test_a_slot_holds_nothing_of_the_adapter_before(self) -> None:
        ops, after = self.make_ops(torch.float32), {0: adapter(5, 2, (1,))}
        layer = self.layer(ops, {0: adapter(1, 6)})
        x = layer.rows(4, 24)
        for adapters in (after, {}):
            layer.linear.stack.put(0, adapters.get(0, {}))
            layer.adapters = adapters
            ops.set_rows(np.array([0, 0]), np.array([1, 3]))
            reference = layer.expected(x, [0] * 4)
            torch.testing.assert_close(layer.linear(x).cpu().double(), reference, atol=1e-4, rtol=1e-4)
