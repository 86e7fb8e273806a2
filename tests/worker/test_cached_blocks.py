"""Followers of a worker's prefix cache hear every change, in whatever pace they ask."""

from __future__ import annotations

import asyncio
import random

from pdserve.common.kv_events import MAX_HASHES, KvCacheEvents, apply_change
from pdserve.router.placement.prefix_index import PrefixIndex
from pdserve.worker.kv_event_publisher import KvEventPublisher
from tests.support.run.waiting import HANG_S

WORKER = ("decode-1", 7)


def name(number: int) -> bytes:
    return number.to_bytes(8, "little")


def test_a_new_follower_hears_first_what_is_held() -> None:
    cached = KvEventPublisher()
    cached.apply([name(1), name(2)], [])
    follower = cached.follow()
    cached.apply([name(3)], [name(1)])
    changes = follower.take()
    assert changes[0] == KvCacheEvents(cleared=True)
    assert {h for change in changes for h in change.stored} == {name(2), name(3)}
    assert follower.take() == []


def test_followers_get_the_published_part_of_a_hash_alone() -> None:
    cached = KvEventPublisher()
    cached.apply([b"s" * 16 + name(1)], [])
    assert cached.hashes == {name(1)}
    cached.apply([], [b"s" * 16 + name(1)])
    assert not cached.hashes


async def test_a_follower_wakes_when_something_changes() -> None:
    cached = KvEventPublisher()
    follower = cached.follow()
    follower.take()
    waiting = asyncio.create_task(follower.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    cached.apply([name(1)], [])
    await asyncio.wait_for(waiting, HANG_S)
    assert follower.take() == [KvCacheEvents(stored=(name(1),))]


def test_large_changes_come_in_pieces() -> None:
    cached = KvEventPublisher()
    cached.apply(map(name, range(MAX_HASHES + 5)), [])
    assert [len(change.stored) for change in cached.follow().take()] == [0, MAX_HASHES, 5]


def test_a_closed_follower_costs_nothing_more() -> None:
    cached = KvEventPublisher()
    follower = cached.follow()
    follower.take()
    follower.close()
    follower.close()
    cached.apply([name(1)], [])
    assert follower.take() == []


def test_an_index_that_follows_equals_the_worker_at_any_pace() -> None:
    dice = random.Random(3)
    cached, index = KvEventPublisher(), PrefixIndex()
    follower = cached.follow()
    for _ in range(400):
        held = sorted(cached.hashes)
        removed = dice.sample(held, min(len(held), dice.randrange(4)))
        stored = [name(dice.randrange(60)) for _ in range(dice.randrange(4))]
        cached.apply([h for h in stored if h not in removed], removed)
        if dice.random() < 0.02:
            follower.start_over()
        if dice.random() < 0.3:
            for change in follower.take():
                apply_change(index, WORKER, change)
            assert index.num_blocks(WORKER) == len(cached.hashes)
            held_by_index = index.match([], [WORKER], 0.0)
            assert held_by_index == {WORKER: 0}
            assert all(index.match([h], [WORKER], 0.0)[WORKER] == 1 for h in cached.hashes)


def test_a_follower_that_takes_nothing_keeps_no_more_than_twice_what_is_held() -> None:
    cached = KvEventPublisher()
    follower, index = cached.follow(), PrefixIndex()
    for number in range(5 * MAX_HASHES):
        cached.apply([name(number)], [name(number - 3)] if number >= 3 else [])
        assert len(follower._pending) <= 2 * len(cached.hashes) + MAX_HASHES
    for change in follower.take():
        apply_change(index, WORKER, change)
    assert index.num_blocks(WORKER) == len(cached.hashes) == 3
    assert all(index.match([held], [WORKER], 0.0)[WORKER] for held in cached.hashes)
