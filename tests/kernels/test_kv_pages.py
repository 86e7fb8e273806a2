"""Row numbers of the paged cache."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.attention.kv_pages import KvPages

NUM_BLOCKS, L, HKV, BS, D = 7, 3, 2, 5, 4


def _cache() -> torch.Tensor:
    """Every number tells where it is."""
    return torch.arange(NUM_BLOCKS * L * 2 * HKV * BS * D, dtype=torch.float32).view(NUM_BLOCKS, HKV, L, 2, BS, D)


def test_write_rows_are_a_tokens_keys_then_values() -> None:
    cache = _cache()
    pages = KvPages(cache)
    slots = torch.tensor([0, 6 * BS + 4, 3 * BS + 2])
    rows = pages.write_rows(slots)
    for layer in range(L):
        found = pages.token_rows[layer][rows].view(3, 2, HKV, D)
        assert torch.equal(found, cache[slots // BS, :, layer, :, slots % BS].transpose(1, 2))


def test_gather_is_the_blocks_in_order() -> None:
    cache = _cache()
    pages = KvPages(cache)
    tables = torch.tensor([[6, 0, 2], [1, 1, 5]])
    source = pages.plan_gather(tables, 2, 2 * BS + 1)
    for layer in range(L):
        for kind, found in enumerate(pages.gather(layer, source)):
            expected = cache[tables, :, layer, kind].permute(0, 2, 1, 3, 4).reshape(2, HKV, 3 * BS, D)
            assert torch.equal(found, expected[:, :, 2 : 2 * BS + 1])


def test_the_workspace_is_shared_and_grows() -> None:
    pages = KvPages(_cache())
    small = pages.plan_gather(torch.tensor([[3, 1]]), 0, 1).out
    assert small.shape == (HKV * 2 * 2, BS * D)
    assert pages.plan_gather(torch.tensor([[3]]), 0, 1).out.data_ptr() == small.data_ptr()
    assert pages.plan_gather(torch.zeros(3, 50, dtype=torch.int64), 0, 1).out.shape == (HKV * 2 * 150, BS * D)


def test_clear_tails_touches_nothing_else() -> None:
    cache = _cache() + 1
    before = cache.clone()
    KvPages(cache).clear_tails(torch.tensor([2, 4, 0]), torch.tensor([3, BS, 1]))
    expected = before.clone()
    expected[2, :, :, :, 3:] = 0
    expected[0, :, :, :, 1:] = 0
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("cache", [_cache()[:, :, :, :1], _cache().transpose(0, 1), _cache()[0]])
def test_other_shapes_are_refused(cache: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        KvPages(cache)
