"""Tiers under virtual time: blocks come back in the time of their links, and what comes back is what the product's rules say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.engine.client.loaded_engine import LoadedEngine, local_hasher
from pdserve.models.model_folder import model_folder
from pdserve.simulator.step_times import Chunk
from pdserve.simulator.virtual_transfer import Link
from tests.support.simulator.simulated_fleet import TIMES, Answer, Asker, fleet_plan, prompt_of, run_fleet

NUM_BLOCKS = 20
"""Full blocks of a prompt."""
NUM_REST = 4
"""Tokens after them."""
LENGTH = 16 * NUM_BLOCKS + NUM_REST
REST_S = TIMES.step_s([Chunk(NUM_REST, 16 * NUM_BLOCKS)])
MESSAGES_S = 0.001
"""For all messages of a first token, of 50 us each."""
FAST = Link(1e12, 0.0)
DISK: dict[str, Any] = {"kv_disk_path": "/nonexistent/disk", "kv_disk_gib": 1.0}
STORE = {"kv_store": "mooncake://127.0.0.1:50051?segment_mib=64"}


def again(num_between: int, num_tokens: int = 1, pause_s: float = 0.0, **plan: Any) -> tuple[Answer, Answer, int]:
    """Answers to a prompt, and to the same prompt after others that took the pool's blocks; bytes of a block."""

    async def work(asker: Asker) -> tuple[Answer, Answer, int]:
        first = await asker.ask(prompt_of(LENGTH, 0))
        for number in range(num_between):
            await asker.ask(prompt_of(LENGTH, 1 + number))
        await asyncio.sleep(pause_s)
        return first, await asker.ask(prompt_of(LENGTH, 0), num_tokens), asker.block_bytes()

    return run_fleet(fleet_plan(**plan), work)


def test_evicted_blocks_come_back_from_host_memory_in_the_time_of_their_copy() -> None:
    host = Link(1e8, 0.002)
    first, second, block_bytes = again(4, kv_host_mib=64, workers={"host": host})
    # the pool is full of other blocks: as many are copied out before, in the same step
    copies_s = 2 * host.seconds(NUM_BLOCKS * block_bytes)
    assert second.first_s == pytest.approx(
        REST_S + copies_s + (first.first_s - TIMES.step_s([Chunk(LENGTH, 0)])), abs=1e-8
    )
    assert (first.num_cached, second.num_cached) == (0, 16 * NUM_BLOCKS)


def test_without_host_memory_they_are_computed_again() -> None:
    first, second, _ = again(4)
    assert second.num_cached == 0
    assert second.first_s == pytest.approx(first.first_s, abs=1e-8)


def test_the_receiver_gets_what_was_loaded_from_host_memory() -> None:
    """The prefill worker publishes a block when it has landed in its pool."""
    host, link = Link(1e8, 0.0), Link(5e7, 0.0)
    _, second, block_bytes = again(4, num_tokens=2, kv_host_mib=64, workers={"host": host, "link": link})
    copies_s, transfer_s = 2 * host.seconds(NUM_BLOCKS * block_bytes), link.seconds((NUM_BLOCKS + 1) * block_bytes)
    decode_s = TIMES.step_s([Chunk(1, LENGTH)])
    # all but the last block move while the rest of the prompt is computed
    last_s = copies_s + max(REST_S + link.seconds(block_bytes), transfer_s) + decode_s
    assert last_s < second.last_s < last_s + 2 * MESSAGES_S


def test_other_sequences_do_not_wait_for_a_load() -> None:
    host = Link(1e7, 0.0)

    async def work(asker: Asker) -> tuple[Answer, Answer, int]:
        for number in range(5):
            await asker.ask(prompt_of(LENGTH, number))
        slow = asyncio.create_task(asker.ask(prompt_of(LENGTH, 0)))
        # the step that stores has ended, and the load goes on
        await asyncio.sleep(1.2 * host.seconds(NUM_BLOCKS * asker.block_bytes()))
        other = await asker.ask(prompt_of(8, 100))
        assert not slow.done()
        return other, await slow, asker.block_bytes()

    other, slow, block_bytes = run_fleet(fleet_plan(kv_host_mib=64, workers={"host": host}), work)
    # it waits for the end of the engine's look at copies, every 5 ms, and for the copy of the block that it displaces
    assert other.first_s < TIMES.step_s([Chunk(8, 0)]) + host.seconds(block_bytes) + 0.005 + MESSAGES_S
    assert slow.num_cached == 16 * NUM_BLOCKS


def test_decisions_are_those_of_an_engine_with_bytes() -> None:
    """A computing engine and a simulated one find the same tokens of the same prompts in pool and host memory."""
    prompts = [prompt_of(LENGTH, seed) for seed in (0, 1, 2, 0, 3, 4, 1, 5, 0, 2, 6, 7, 3, 1)]
    settings: dict[str, Any] = {"num_blocks": 64, "max_model_len": 512, "block_size": 16, "kv_host_mib": 4}
    engine = LoadedEngine.load(model_folder("demo"), PrefillSettings(**settings))
    core, computed, hasher = engine.make_core(), list[int](), local_hasher(16)
    root = hasher.root(engine.info.model_fingerprint)
    for number, prompt in enumerate(prompts):
        core.add_request(
            EngineCoreRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                hash_root=root,
                block_hashes=hasher.extend(root, prompt),
                sampling_params=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
                prefill_here=True,
            )
        )
        outputs = [output for _ in iter(lambda: core.has_work, False) for output in core.step().outputs]
        computed.append(outputs[-1].num_cached_tokens)
    core.scheduler.check()
    engine.close()

    async def work(asker: Asker) -> list[int]:
        return [(await asker.ask(prompt)).num_cached for prompt in prompts]

    simulated = run_fleet(fleet_plan(**settings), work)
    assert simulated == computed
    assert len(set(simulated)) > 1


def test_blocks_come_back_from_the_disk_in_its_time() -> None:
    """Host memory of 4 MiB has given them up."""
    found = {
        rate: again(12, 1, 5.0, kv_host_mib=4, **DISK, workers={"host": FAST, "disk": Link(rate, 0.0)})
        for rate in (1e9, 5e8)
    }
    (_, fast, block_bytes), (_, slow, _) = found.values()
    assert fast.num_cached == slow.num_cached == 16 * NUM_BLOCKS
    # with the headers of the blocks, and one block that is being written when the first read begins
    block_s = block_bytes / 1e9
    assert NUM_BLOCKS * block_s < slow.first_s - fast.first_s < (NUM_BLOCKS + 1.1) * block_s
    assert not Path(DISK["kv_disk_path"]).exists()


def test_a_disk_gives_up_what_it_has_no_room_for() -> None:
    given = DISK | {"kv_disk_gib": 0.004}
    for number, disk in ((16 * NUM_BLOCKS, DISK), (0, given)):
        _, second, _ = again(30, 1, 5.0, kv_host_mib=4, **disk, workers={"host": FAST, "disk": FAST})
        assert second.num_cached == number


def test_a_disk_that_reads_slower_than_the_prompt_is_computed_is_not_read_again() -> None:
    slow = Link(1e6, 0.0)

    async def work(asker: Asker) -> list[int]:
        for number in range(13):
            await asker.ask(prompt_of(LENGTH, number))
            await asyncio.sleep(5.0)
        cached = []
        for number in range(3):
            cached.append((await asker.ask(prompt_of(LENGTH, number))).num_cached)
            await asyncio.sleep(5.0)
        return cached

    first, *others = run_fleet(fleet_plan(kv_host_mib=4, **DISK, workers={"host": FAST, "disk": slow}), work)
    assert first == 16 * NUM_BLOCKS
    assert others == [0, 0]


def other_worker(plan: dict[str, Any]) -> Answer:
    """The answer of a prefill worker to a prompt that the other one has had, and given up."""

    async def work(asker: Asker) -> Answer:
        for number in range(10):  # in turn to both
            await asker.ask(prompt_of(LENGTH, number))
        await asyncio.sleep(5.0)
        return await asker.ask(prompt_of(LENGTH, 1))

    router = {"policy": "round_robin", "block_moves": "never"}
    return run_fleet(fleet_plan(2, kv_host_mib=4, router=router, **plan), work)


def test_workers_find_blocks_in_the_store_that_they_share() -> None:
    assert other_worker({}).num_cached == 0
    found = other_worker(STORE)
    assert found.num_cached == 16 * NUM_BLOCKS
    link = Link(1e8, 0.0)
    slower = other_worker(STORE | {"workers": {"link": link}})
    _, _, block_bytes = again(0)
    difference_s = NUM_BLOCKS * block_bytes * (1 / 1e8 - 1 / 1e9)
    assert slower.first_s - found.first_s == pytest.approx(difference_s, abs=1e-8)


def test_a_store_without_memory_keeps_nothing() -> None:
    assert other_worker({"kv_store": "mooncake://127.0.0.1:50051?segment_mib=0"}).num_cached == 0


def test_a_store_has_the_memory_that_its_workers_add() -> None:
    """Three workers of 16 MiB each keep about 1,000 blocks; the least recently used go first."""

    async def work(asker: Asker) -> list[int]:
        for number in range(80):
            await asker.ask(prompt_of(LENGTH, number))
        await asyncio.sleep(1.0)
        return [(await asker.ask(prompt_of(LENGTH, number))).num_cached for number in (0, 40)]

    url = "mooncake://127.0.0.1:50051?segment_mib=16"
    router = {"policy": "round_robin", "block_moves": "never"}
    assert run_fleet(fleet_plan(2, kv_host_mib=4, router=router, kv_store=url), work) == [0, 16 * NUM_BLOCKS]


@pytest.mark.parametrize("tiers", [{}, DISK, STORE])
def test_a_load_with_tiers_repeats_exactly(tiers: dict[str, Any]) -> None:
    async def work(asker: Asker) -> list[Answer]:
        tasks = []
        for number in range(40):
            await asyncio.sleep(0.05 * (number % 3))
            tasks.append(asyncio.create_task(asker.ask(prompt_of(200 + number, number % 9), 2 + number % 5)))
        return await asyncio.gather(*tasks)

    plan = fleet_plan(2, 2, kv_host_mib=4, router={"local_prefill": "auto"}, **tiers)
    first, second = run_fleet(plan, work), run_fleet(plan, work)
    assert first == second
    assert any(answer.num_cached for answer in first)
