"""`BlockPool`, holds and their ledger: every block is counted once, and a hold is given up exactly once (I2)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.common.block_hash import BlockHasher
from pdserve.engine.kv_cache.block_pool import BlockPool, KVCacheBlock, PinnedBlocks, PinTracker, PoolCorrupt
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager


def test_a_hold_keeps_blocks_in_use_until_it_is_back() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    hold = pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_in_use == 2
    pool.take_back(hold)
    assert pool.num_in_use == 0
    pool.check({})


def test_a_hold_given_up_twice_raises() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    hold = pool.hold(blocks)
    pool.take_back(hold)
    with pytest.raises(PoolCorrupt, match="given up twice"):
        pool.take_back(hold)
    pool.release(blocks)
    pool.check({})


def test_a_released_block_cannot_be_released_again() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(PoolCorrupt, match="more often"):
        pool.release(blocks)


def test_more_than_there_is_cannot_be_allocated() -> None:
    pool = BlockPool(3)
    with pytest.raises(PoolCorrupt):
        pool.allocate(4)
    assert sum(pool.available) == 3


def test_free_blocks_are_taken_before_cached_ones_and_those_from_the_least_recent() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks[:3]:
        pool.remember(block, bytes([block.block_id]))
    for block in (blocks[1], blocks[0], blocks[3], blocks[2]):
        pool.release([block])
    assert [pool.allocate(1)[0].block_id for _ in range(4)] == [3, 1, 0, 2]


def test_the_check_finds_what_is_wrong() -> None:
    def broken() -> BlockPool:
        pool = BlockPool(3)
        pool.remember(pool.allocate(1)[0], b"hash")
        return pool

    pool = broken()
    with pytest.raises(PoolCorrupt, match="should have 0 references"):
        pool.check({})
    pool.blocks[0].ref_cnt = 0
    with pytest.raises(PoolCorrupt, match="wrong list"):
        pool.check()
    pool = broken()
    pool.blocks[0].block_hash = b"other"
    with pytest.raises(PoolCorrupt, match="not where its hash leads"):
        pool.check()
    pool = broken()
    pool.num_cached = 1
    with pytest.raises(PoolCorrupt, match="num_cached"):
        pool.check()


def test_the_ledger_counts_holds_and_quarantine_block_by_block() -> None:
    pool = BlockPool(4)
    ledger = PinTracker(pool)
    blocks = pool.allocate(3)
    hold = ledger.out(pool.hold(blocks))
    twice = ledger.out(pool.hold(blocks[:1]))
    pool.release(blocks)
    ledger.quarantine({block.block_id for block in blocks})
    assert (sum(ledger.references().values()), ledger.num_quarantined) == (4, 3)
    pool.check(ledger.references())
    ledger.back(twice)
    assert (ledger.references(), ledger.num_quarantined) == ({0: 1, 1: 1, 2: 1}, 2)
    ledger.back(hold)
    assert (ledger.references(), ledger.num_quarantined, pool.num_in_use) == ({}, 0, 0)


@settings(max_examples=60)
@given(st.data())
def test_i2_free_cached_and_in_use_add_up_whatever_happens(data: st.DataObject) -> None:
    pool = BlockPool(8)
    users: list[list[KVCacheBlock]] = []
    holds: list[PinnedBlocks] = []
    told: set[bytes] = set()
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(
            st.sampled_from(["allocate", "release", "hold", "back", "remember", "find", "forget", "tell"])
        )
        if action == "allocate" and pool.available[0]:
            users.append(pool.allocate(data.draw(st.integers(1, pool.available[0]))))
        elif action == "release" and users:
            pool.release(users.pop(data.draw(st.integers(0, len(users) - 1))))
        elif action == "hold" and users:
            holds.append(pool.hold(data.draw(st.sampled_from(users))))
        elif action == "back" and holds:
            pool.take_back(holds.pop(data.draw(st.integers(0, len(holds) - 1))))
        elif action == "remember" and users:
            pool.remember(users[-1][0], bytes([number % 5]))
        elif action == "find" and (block := pool.find(bytes([number % 5]))) is not None:
            pool.touch([block])
            users.append([block])
        elif action == "forget":
            pool.forget_cached()
        elif action == "tell":
            stored, removed = pool.take_changes()
            assert told.isdisjoint(stored)
            assert told.issuperset(removed)
            told = (told | set(stored)) - set(removed)
            assert told == {bytes([n]) for n in range(5) if pool.find(bytes([n])) is not None}
        references: dict[int, int] = {}
        for block_id in [block.block_id for user in users for block in user] + [b for h in holds for b in h.block_ids]:
            references[block_id] = references.get(block_id, 0) + 1
        pool.check(references)
        assert sum(pool.available) + pool.num_in_use == pool.num_total
        assert 0 <= pool.num_cached <= sum(pool.available)


def test_a_failed_allocation_changes_nothing() -> None:
    from pdserve.common.request.engine_types import EngineCoreRequest
    from pdserve.common.request.sampling_params import SamplingParams
    from pdserve.engine.request import Request
    from tests.support.engine.engine_harness import KEY, specs_of

    pool = BlockPool(4)
    kv = KVCacheManager(pool, BlockHasher(KEY, 4), specs_of(None), step_tokens=8)
    core = EngineCoreRequest(request_id="a", prompt_token_ids=[1] * 20, sampling_params=SamplingParams())
    request = Request(core)
    assert kv.allocate_slots(request, 20) is None
    assert kv.allocate_slots(request, 16, keep_free=(1,)) is None
    assert sum(pool.available) == 4
    assert kv.num_blocks(request) == 0
    assert kv.allocate_slots(request, 13, keep_free=(0,)) == [[0, 1, 2, 3]]
    assert kv.allocate_slots(request, 17) is None
    assert kv.allocate_slots(request, 16) == []
    kv.free(request)
    kv.free(request)
    pool.check({})
