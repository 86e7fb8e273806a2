"""`LoraLinear` against a product per row: ragged batches of decode rows and chunks, with several adapters and none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve.kernels.linear import make_linear
from pdserve.kernels.lora import NO_ADAPTER, LoraLinear, LoraMatrices, LoraRows, LoraStep

IN, SIZES, MAX_LORAS, MAX_RANK = 24, (16, 8, 8), 4, 6
CPU = torch.device("cpu")
Adapters = dict[int, dict[int, LoraMatrices]]


def layer_of(adapters: Adapters, dtype: torch.dtype = torch.float32) -> tuple[LoraLinear, LoraStep, torch.Tensor]:
    torch.manual_seed(0)
    weight, step = torch.randn(sum(SIZES), IN).to(dtype), LoraStep()
    layer = LoraLinear(
        make_linear(weight), step, IN, SIZES, max_loras=MAX_LORAS, max_rank=MAX_RANK, dtype=dtype, device=CPU
    )
    for slot, products in adapters.items():
        layer.put(slot, products)
    return layer, step, weight


def adapter(seed: int, rank: int, products: tuple[int, ...] = (0, 1, 2)) -> dict[int, LoraMatrices]:
    generator = torch.Generator().manual_seed(seed)
    return {
        index: LoraMatrices(
            torch.randn(rank, IN, generator=generator), torch.randn(rank, SIZES[index], generator=generator)
        )
        for index in products
    }


def expected(x: torch.Tensor, weight: torch.Tensor, slots: list[int], adapters: Adapters) -> torch.Tensor:
    """slots: of each token."""
    y = x.double() @ weight.double().t()
    starts = np.cumsum([0, *SIZES])
    for token, slot in enumerate(slots):
        for index, matrices in adapters.get(slot, {}).items():
            added = x[token].double() @ matrices.a.double().t() @ matrices.b.double()
            y[token, starts[index] : starts[index + 1]] += added
    return y


ALL: Adapters = {0: adapter(1, 6), 1: adapter(2, 1, (1,)), 3: adapter(3, 4, (0, 2))}


@pytest.mark.parametrize(
    ("slots", "counts"),
    [
        ([0], [1]),
        ([3, 0, 1, 0, 3, 3], [1] * 6),
        ([NO_ADAPTER, 3, NO_ADAPTER, 1], [1] * 4),
        ([NO_ADAPTER, NO_ADAPTER], [1, 5]),
        ([1, NO_ADAPTER, 0, NO_ADAPTER, 3], [1, 1, 4, 3, 2]),
        ([0, 0], [7, 2]),
        ([2, 0], [1, 3]),
    ],
)
def test_each_row_has_the_product_of_its_own_adapter(slots: list[int], counts: list[int]) -> None:
    layer, step, weight = layer_of(ALL)
    x = torch.randn(sum(counts), IN)
    step.rows = LoraRows.of_step(np.array(slots), np.array(counts), CPU)
    of_tokens = np.repeat(slots, counts).tolist()
    reference = expected(x, weight, of_tokens, ALL)
    torch.testing.assert_close(layer(x).double(), reference, atol=1e-4, rtol=1e-4)
    residual = torch.randn(len(x), sum(SIZES))
    torch.testing.assert_close(layer.add_to(residual.clone(), x).double(), residual + reference, atol=1e-4, rtol=1e-4)


def test_rows_without_an_adapter_are_those_of_the_layer_alone_bit_for_bit() -> None:
    layer, step, _ = layer_of(ALL)
    x = torch.randn(9, IN)
    alone = layer(x)
    slots, counts = np.array([NO_ADAPTER, 0, NO_ADAPTER, 3, NO_ADAPTER]), np.array([1, 1, 1, 4, 2])
    step.rows = LoraRows.of_step(slots, counts, CPU)
    plain = np.repeat(slots, counts) == NO_ADAPTER
    assert torch.equal(layer(x)[plain], alone[plain])
    assert not torch.equal(layer(x)[~plain], alone[~plain])


def test_other_adapters_in_the_batch_change_no_bit_of_a_row() -> None:
    """As many rows per adapter, in other slots and beside other rows: only the neighbours differ."""
    layer, step, _ = layer_of(ALL | {2: adapter(9, 6)})
    x = torch.randn(4, IN)
    results = []
    for others in (0, 1, 2):
        step.rows = LoraRows.of_step(np.array([3, others, 3, others]), np.ones(4, np.int64), CPU)
        results.append(layer(x)[[0, 2]])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_slot_holds_nothing_of_the_adapter_before() -> None:
    layer, step, weight = layer_of({0: adapter(1, 6)})
    layer.put(0, adapter(5, 2, (1,)))
    step.rows = LoraRows.of_step(np.array([0, 0]), np.array([1, 3]), CPU)
    x = torch.randn(4, IN)
    reference = expected(x, weight, [0] * 4, {0: adapter(5, 2, (1,))})
    torch.testing.assert_close(layer(x).double(), reference, atol=1e-4, rtol=1e-4)
    layer.put(0, {})
    torch.testing.assert_close(layer(x).double(), expected(x, weight, [0] * 4, {}), atol=1e-4, rtol=1e-4)


def test_bfloat16_rounds_like_a_product() -> None:
    adapters = {0: {0: LoraMatrices(*(m.bfloat16() for m in (ALL[0][0].a, ALL[0][0].b)))}}
    layer, step, weight = layer_of(adapters, torch.bfloat16)
    step.rows = LoraRows.of_step(np.array([0, NO_ADAPTER, 0]), np.array([1, 1, 3]), CPU)
    x = torch.randn(5, IN).bfloat16()
    reference = expected(x, weight, [0, NO_ADAPTER, 0, 0, 0], adapters)
    torch.testing.assert_close(layer(x).double(), reference, atol=0.5, rtol=0.05)
