"""Workers with several ranks under virtual time: each has its part of every block, and a card and a bus of its own."""

from __future__ import annotations

import pytest

from pdserve.common.worker_identity import WorkerRole
from pdserve.simulator.step_times import Chunk
from pdserve.simulator.virtual_fleet import FleetPlan
from pdserve.simulator.virtual_transfer import Link
from tests.support.simulator.simulated_fleet import TIMES, Answer, Asker, fleet_plan, prompt_of, run_fleet

LENGTH = 320
LINK = Link(1e6, 0.0)
WHOLE_BYTES = 49_152
"""A block of the demo model, with both of its KV heads."""


def fleet(of_prefill: int, of_decode: int) -> FleetPlan:
    """Workers with so many ranks."""
    plans = [fleet_plan(tensor_parallel_size=size, workers={"link": LINK}) for size in (of_prefill, of_decode)]
    return FleetPlan(plans[0].folder, plans[0].router, [plans[0].workers[0], plans[1].workers[1]])


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_each_rank_reads_its_part_over_its_own_card(ranks: tuple[int, int]) -> None:
    async def work(asker: Asker) -> tuple[Answer, int]:
        return await asker.ask(prompt_of(LENGTH, 1), 2), asker.block_bytes()

    answer, block_bytes = run_fleet(fleet(*ranks), work)
    assert block_bytes == WHOLE_BYTES
    moved_s = LINK.seconds(LENGTH // 16 * block_bytes // ranks[1]) + TIMES.step_s([Chunk(1, LENGTH)])
    assert moved_s < answer.last_s - answer.first_s < moved_s + 0.001
    # the times of steps are those of the whole worker
    assert answer.first_s == pytest.approx(TIMES.step_s([Chunk(LENGTH, 0)]) + 0.0005, abs=0.0005)


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_copy_to_their_own_host_memory(size: int) -> None:
    host = Link(1e7, 0.0)

    async def work(asker: Asker) -> float:
        for number in range(5):
            await asker.ask(prompt_of(LENGTH + 1, number))
        return (await asker.ask(prompt_of(LENGTH + 1, 0))).first_s

    plan = fleet_plan(kv_host_mib=64, tensor_parallel_size=size, workers={"host": host})
    copies_s = 2 * host.seconds(20 * WHOLE_BYTES // size)
    assert run_fleet(plan, work) == pytest.approx(TIMES.step_s([Chunk(1, LENGTH)]) + copies_s + 0.0005, abs=0.0005)


def test_memory_is_that_of_each_rank() -> None:
    async def work(asker: Asker) -> int:
        return asker.router.fleet.workers(WorkerRole.DECODE)[0].identity.num_blocks

    one, two = (
        run_fleet(fleet_plan(num_blocks=None, kv_cache_mib=8, tensor_parallel_size=size), work) for size in (1, 2)
    )
    assert (one, two) == ((8 << 20) // WHOLE_BYTES, (16 << 20) // WHOLE_BYTES)
