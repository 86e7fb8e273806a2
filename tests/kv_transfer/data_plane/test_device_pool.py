"""`DevicePool`: the blocks that are named, and no others, both ways."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
import xxhash

from pdserve.common.security.block_digest import KEY_BYTES, XXH3, Gmac
from pdserve.kv_transfer.memory.device_pool import DevicePool
from pdserve.kv_transfer.memory.pool_memory import HostPool, NoRoom, number_runs
from tests.support.engine.pretend_device import CUDA, DEVICE, PretendTensor, usable
from tests.support.engine.pretend_pool import digest_on_device
from tests.support.run.waiting import HANG_S

NUM_BLOCKS, NUM_SLOTS = 40, 17


@pytest.fixture(params=["cpu", str(DEVICE), CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with usable(request.param):
        yield request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def content(request: pytest.FixtureRequest) -> torch.Tensor:
    return torch.randn(NUM_BLOCKS, 2, 2, 1, 4, 8, generator=torch.Generator().manual_seed(3)).to(request.param)


def _bytes(block: torch.Tensor) -> bytes:
    return block.flatten().view(torch.uint8).numpy().tobytes()


def test_lent_blocks_have_the_bytes_of_the_device(device: str, content: torch.Tensor) -> None:
    pool = DevicePool(content.to(device), NUM_SLOTS, 4, HANG_S)
    assert (pool.num_blocks, pool.block_bytes) == (NUM_BLOCKS, content[0].nbytes)
    numbers = random.Random(5).sample(range(NUM_BLOCKS), NUM_SLOTS)
    for chosen in (numbers, [7, 8, 9, 3], [39], []):
        with pool.lend(chosen) as views:
            assert b"".join(views) == b"".join(_bytes(content[number]) for number in chosen)


def test_digests_are_those_of_the_host(device: str, content: torch.Tensor) -> None:
    pool, host = DevicePool(content.to(device), NUM_SLOTS, 4, HANG_S), DevicePool(content, 1, 1, HANG_S)
    numbers = random.Random(6).sample(range(NUM_BLOCKS), 30)
    expected = [xxhash.xxh3_64_intdigest(_bytes(content[number])) for number in numbers]
    assert pool.digests(numbers, range(30), XXH3) == host.digests(numbers, range(30), XXH3) == expected
    gmac = Gmac(bytes(range(KEY_BYTES)))
    assert pool.digests([4, 5], [9, 1], gmac) == [
        gmac.of(memoryview(_bytes(content[n])), i) for n, i in ((4, 9), (5, 1))
    ]


def test_digests_on_the_device_are_those_of_the_host(
    device: str, content: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.kv_transfer.memory.device_pool.DIGESTED_BYTES", 7 * content[0].nbytes)
    numbers = random.Random(6).sample(range(NUM_BLOCKS), 30)
    parts: list[Sequence[int]] = []

    def digest_blocks(blocks: torch.Tensor, part: Sequence[int]) -> torch.Tensor:
        assert str(blocks.device).startswith(device)
        parts.append(part)
        return digest_on_device(blocks, part)

    pool = DevicePool(content.to(device), 1, 1, HANG_S, digest_blocks)
    assert pool.digests(numbers, range(30), XXH3) == [xxhash.xxh3_64_intdigest(_bytes(content[n])) for n in numbers]
    assert [len(part) for part in parts] == [7, 7, 7, 7, 2]
    assert pool.digests([], [], XXH3) == []
    gmac = Gmac(bytes(KEY_BYTES))
    assert pool.digests([4], [9], gmac) == [gmac.of(memoryview(_bytes(content[4])), 9)]
    with pytest.raises(IndexError, match="not all in the pool of 40"):
        pool.digests([NUM_BLOCKS], [0], XXH3)


@pytest.mark.parametrize("pinned", [True, False])
def test_blocks_that_are_moved_in_are_written_and_no_others(device: str, content: torch.Tensor, pinned: bool) -> None:
    kv_cache = content.to(device)
    pool = DevicePool(kv_cache, 1, 1, HANG_S)
    ring = pool.new_ring(12, pinned=pinned)
    assert ring.device == (torch.device("cpu") if pinned else kv_cache.device)
    arrived = torch.arange(12).to(content.dtype).repeat(content[0].numel(), 1).t().contiguous()
    ring.copy_(arrived.to(ring.device))
    slots, blocks = [3, 4, 5, 11, 0, 1], [20, 21, 8, 7, 30, 31]
    pool.move_in(ring, slots, blocks)
    found = kv_cache.cpu()
    for number in range(NUM_BLOCKS):
        if number in blocks:
            assert (found[number] == slots[blocks.index(number)]).all()
        else:
            assert torch.equal(found[number], content[number])
    assert isinstance(kv_cache, PretendTensor) == (device == str(DEVICE))


def test_numbers_outside_the_pool_and_too_many_are_refused(device: str, content: torch.Tensor) -> None:
    pool = DevicePool(content.to(device), 4, 1, HANG_S)
    for numbers in ([NUM_BLOCKS], [-1]):
        with pytest.raises(IndexError, match="not all in the pool of 40"), pool.lend(numbers):
            pass
        with pytest.raises(IndexError, match="not all in the pool of 40"):
            pool.digests(numbers, range(1), XXH3)
    with pytest.raises(ValueError, match="at most 4"), pool.lend([1, 2, 3, 4, 5]):
        pass


def test_slots_are_waited_for_and_not_for_ever(content: torch.Tensor) -> None:
    pool = DevicePool(content, 4, 1, 0.05)
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with pool.lend([1, 2, 3]):
            begun.set()
            assert go_on.wait(HANG_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(HANG_S)
    with pool.lend([5]) as [view]:
        assert bytes(view) == _bytes(content[5])
    with pytest.raises(NoRoom, match=r"2 of 4 .* within 0.05 s"), pool.lend([5, 6]):
        pass
    go_on.set()
    thread.join()
    with pool.lend([5, 6, 7, 8]) as views:
        assert sum(map(len, views)) == 4 * pool.block_bytes


def test_a_borrower_has_its_share_and_others_the_rest(content: torch.Tensor) -> None:
    pool = DevicePool(content, 16, 1, 0.05)
    with pool.lend([1, 2, 3], "one"), pool.lend([4], "one"), pool.lend(list(range(9)), "another"):
        with (
            pytest.raises(NoRoom, match=r"1 of 16 .*, of which this peer holds 4, .* within 0.05 s"),
            pool.lend([5], "one"),
        ):
            pass
        with pool.lend([5, 6, 7]) as [view]:
            assert bytes(view) == b"".join(_bytes(content[number]) for number in (5, 6, 7))
        assert pool.digests([8], [0], XXH3) == [xxhash.xxh3_64_intdigest(_bytes(content[8]))]
    with pool.lend([1, 2, 3, 4], "one"), pool.lend([1, 2], "two"), pool.lend([1, 2], "two"), pool.lend([5], "three"):
        assert pool.num_free_slots == 7
        with pytest.raises(NoRoom, match="of which this peer holds 1"), pool.lend([6], "three"):
            pass
        with pool.lend([5], "four"):
            pass


def test_a_lent_view_of_the_host_is_the_pool_itself() -> None:
    memory = bytearray(8 * 16)
    pool = HostPool(memoryview(memory), 16, 8)
    with pool.lend([2, 3, 7]) as views:
        assert [len(view) for view in views] == [32, 16]
        views[1][0] = 9
    assert memory[7 * 16] == 9


def test_neighbours_are_one_run() -> None:
    assert list(number_runs([4, 5, 6, 2, 3, 9, 8])) == [(4, 3), (2, 2), (9, 1), (8, 1)]
    assert list(number_runs([])) == []
