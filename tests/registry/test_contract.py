"""Properties that hold however workers and routers find each other: over watches alone, or through Redis."""

from __future__ import annotations

import asyncio
import random

from pdserve.common.worker_identity import WorkerRole
from tests.support.run.waiting import eventually
from tests.support.transfers.registry_world import World


async def test_a_worker_joins_with_what_it_holds(either: World) -> None:
    worker = await either.worker()
    worker.change(stored=range(20))
    router = await either.router()
    await router.joined(worker)


async def test_changes_arrive(either: World) -> None:
    worker = await either.worker()
    router = await either.router()
    await router.joined(worker)
    worker.change(stored=range(10))
    await eventually(lambda: router.agrees(worker))
    worker.change(stored=[20], removed=[1, 2, 3])
    await eventually(lambda: router.agrees(worker))


async def test_many_changes_in_any_order_arrive(either: World) -> None:
    dice = random.Random(11)
    worker = await either.worker()
    router = await either.router()
    await router.joined(worker)
    for turn in range(300):
        held = sorted(worker.hashes)
        removed = [int.from_bytes(h, "little") for h in dice.sample(held, min(len(held), dice.randrange(4)))]
        worker.change([n for n in dice.choices(range(80), k=dice.randrange(5)) if n not in removed], removed)
        if turn % 10 == 0:
            await asyncio.sleep(0.005)
    await eventually(lambda: router.agrees(worker))


async def test_more_blocks_than_fit_into_one_batch(either: World) -> None:
    worker = await either.worker()
    worker.change(stored=range(10_000))
    router = await either.router()
    await router.joined(worker)
    worker.change(removed=range(9_990))
    await eventually(lambda: router.agrees(worker))


async def test_prefill_and_decode_meet_when_they_are_found(either: World) -> None:
    decode = await either.worker("decode-0")
    prefill = await either.worker("prefill-0", WorkerRole.PREFILL)
    router = await either.router()
    await router.joined(decode, prefill)
    await eventually(lambda: prefill.address in decode.engine.met and decode.address in prefill.engine.met)


async def test_a_worker_that_leaves_takes_its_blocks_with_it(either: World) -> None:
    staying, leaving = await either.worker("decode-0"), await either.worker("decode-1")
    staying.change(stored=range(5))
    leaving.change(stored=range(9))
    router = await either.router()
    await router.joined(staying, leaving)
    await leaving.leave()
    await eventually(lambda: not router.knows(leaving) and not router.index.num_blocks(leaving.key))
    assert router.knows(staying)
    assert router.agrees(staying)


async def test_a_worker_that_comes_back_is_another_life(either: World) -> None:
    old = await either.worker()
    old.change(stored=range(30))
    router = await either.router()
    await router.joined(old)
    await old.kill()
    new = await either.worker(port=old.port)
    new.change(stored=range(100, 103))
    await router.joined(new)
    await eventually(lambda: not router.index.num_blocks(old.key))
    assert not router.knows(old)


async def test_a_draining_worker_keeps_its_blocks_and_gets_no_work(either: World) -> None:
    worker = await either.worker()
    worker.change(stored=range(5))
    router = await either.router()
    await router.joined(worker)
    worker.engine.draining = True
    worker.servicer.announce()
    await eventually(lambda: not router.knows(worker))
    worker.change(stored=[7])
    await eventually(lambda: router.agrees(worker))
    assert router.fleet.counts()["decode"]["draining"] == 1


async def test_a_second_router_begins_warm(either: World) -> None:
    workers = [await either.worker(f"decode-{number}") for number in range(3)]
    for number, worker in enumerate(workers):
        worker.change(stored=range(number, 50 + number))
    first = await either.router()
    await first.joined(*workers)
    second = await either.router()
    await second.joined(*workers)
    workers[0].change(stored=[99])
    await eventually(lambda: first.agrees(workers[0]) and second.agrees(workers[0]))


async def test_more_workers_than_connections(either: World) -> None:
    workers = [await either.worker(f"decode-{number}") for number in range(12)]
    for number, worker in enumerate(workers):
        worker.change(stored=range(100 * number, 100 * number + 50))
    router = await either.router()
    await router.joined(*workers)
