"""Blocks copied within the pool."""

from __future__ import annotations

import pytest
import torch

from pdserve.kernels.block_copies import copy_blocks


def test_blocks_are_copied_whole_and_all_are_read_before_any_is_written() -> None:
    cache = torch.randn(7, 3, 2, 5, 4, 6)
    before = cache.clone()
    copy_blocks(cache, [(1, 4), (1, 0), (4, 6), (5, 1)])
    for source, target in ((1, 4), (1, 0), (4, 6), (5, 1), (2, 2), (3, 3), (5, 5)):
        assert torch.equal(cache[target], before[source])


def test_a_target_that_stands_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="copied to twice"):
        copy_blocks(torch.zeros(4, 2), [(0, 1), (2, 1)])
