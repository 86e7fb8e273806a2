"""`HostStagingPool`: the blocks that are named, and no others, both ways."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from pdserve.kv_transfer.coalesce import number_runs
from pdserve.kv_transfer.host_staging_pool import HostStagingPool
from tests.support.pretend_device import CUDA, DEVICE, PretendTensor, usable

NUM_BLOCKS = 40


@pytest.fixture(params=["cpu", str(DEVICE), CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with usable(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_are_named_are_copied_and_no_others(device: str, dtype: torch.dtype) -> None:
    content = torch.randn(NUM_BLOCKS, 2, 2, 1, 4, 8).to(dtype)
    kv_cache = content.to(device)
    staged = HostStagingPool(kv_cache)
    memory = staged.memory
    assert (memory.num_blocks, memory.block_bytes) == (NUM_BLOCKS, content[0].nbytes)
    draw = random.Random(5)
    numbers = draw.sample(range(NUM_BLOCKS), 17)
    event = None
    if device == "cuda":
        event = torch.cuda.Event()
        event.record()
    staged.to_host(numbers, event)
    for number in range(NUM_BLOCKS):
        expected = content[number] if number in numbers else torch.zeros_like(content[number])
        assert bytes(memory.block(number)) == expected.flatten().view(torch.uint8).numpy().tobytes()

    for number in range(NUM_BLOCKS):
        memory.block(number)[:] = bytes([number]) * memory.block_bytes
    others = draw.sample(range(NUM_BLOCKS), 9)
    staged.to_device(others)
    found = kv_cache.cpu().flatten(1).view(torch.uint8)
    before = content.flatten(1).view(torch.uint8)
    for number in range(NUM_BLOCKS):
        expected = torch.full_like(before[number], number) if number in others else before[number]
        assert torch.equal(found[number], expected)
    assert isinstance(kv_cache, PretendTensor) == (device == str(DEVICE))


def test_neighbours_are_one_run() -> None:
    assert list(number_runs([4, 5, 6, 2, 3, 9, 8])) == [(4, 3), (2, 2), (9, 1), (8, 1)]
    assert list(number_runs([])) == []
