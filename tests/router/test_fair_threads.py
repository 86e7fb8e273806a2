"""Threads whose time tenants share: turns, cancellation at each moment, and what a call that nobody awaits any more holds."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from functools import partial

import pytest

from pdserve.router.admission.fair_threads import FairThreads
from tests.support.run.waiting import HANG_S, eventually


class Clock:
    """CPU time that calls spend by saying so; of all threads, which take turns here."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def spend(self, seconds):
        self.now_s += seconds


async def test_time_goes_to_tenants_in_equal_parts():
    clock, order = Clock(), []
    threads = FairThreads(1, "t", processor_s=clock)

    def work(tenant, seconds):
        clock.spend(seconds)
        order.append((tenant, seconds))

    # the long texts of one tenant came before all short ones of the others
    calls = [("greedy", 10.0)] * 20 + [("a", 1.0)] * 30 + [("b", 1.0)] * 30
    await asyncio.gather(*(threads.run(tenant, partial(work, tenant, cost)) for tenant, cost in calls))
    threads.close()
    spent: Counter[str] = Counter()
    for tenant, seconds in order:
        spent[tenant] += seconds
        waiting = {name for name, cost in (("a", 30.0), ("b", 30.0), ("greedy", 200.0)) if spent[name] < cost}
        if waiting >= {"a", "b", "greedy"}:
            # nobody is ahead by more than its longest call
            assert max(spent.values()) - min(spent[name] for name in ("a", "b", "greedy")) <= 10.0
    assert [tenant for tenant, _ in order].index("a") == 1
    assert sum(tenant == "greedy" for tenant, _ in order[:40]) <= 4


async def test_one_tenant_is_served_in_order_of_arrival():
    threads, order = FairThreads(1, "t"), list[int]()

    def noted(number: int) -> int:
        order.append(number)
        return number

    assert await asyncio.gather(*(threads.run("", partial(noted, n)) for n in range(50))) == list(range(50))
    assert order == list(range(50))
    threads.close()


async def test_what_a_call_raises_reaches_its_caller_and_frees_the_thread():
    threads = FairThreads(1, "t")

    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await threads.run("a", fail)
    assert await threads.run("a", lambda: 7) == 7
    await threads.run("a", lambda: None)
    threads.close()


async def test_a_cancelled_call_is_never_called_while_it_waits_and_keeps_its_thread_while_it_runs():
    threads, called = FairThreads(1, "t"), list[int | str]()
    go, begun = threading.Event(), threading.Event()

    def hold():
        begun.set()
        go.wait(HANG_S)

    first = asyncio.create_task(threads.run("a", hold))
    while not begun.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    waiting = [asyncio.create_task(threads.run("a", partial(called.append, n))) for n in range(3)]
    other = asyncio.create_task(threads.run("b", lambda: called.append("b")))
    await asyncio.sleep(0)
    waiting[0].cancel()
    first.cancel()
    await asyncio.sleep(0.02)
    # the thread is still busy, though nobody waits for what it does
    assert called == []
    assert threads.num_waiting == 3
    go.set()
    await asyncio.gather(*waiting[1:], other)
    assert sorted(map(str, called)) == ["1", "2", "b"]
    assert threads._num_free == 1
    assert first.cancelled()
    assert waiting[0].cancelled()
    threads.close()


@pytest.mark.parametrize("seed", range(10))
async def test_no_thread_is_lost_whatever_is_cancelled(seed):
    import random

    draw, threads = random.Random(seed), FairThreads(2, "t")
    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(threads.run(draw.choice("abc"), lambda: sum(range(draw.randrange(2000))))))
        if draw.random() < 0.3:
            await asyncio.sleep(0)
        if draw.random() < 0.4:
            draw.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await eventually(lambda: threads._num_free == 2)
    assert threads.num_waiting == 0
    threads.close()
