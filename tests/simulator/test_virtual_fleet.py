"""A router with its workers under virtual time: times are those of steps, transfers and messages, and repeat exactly."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from pdserve.cli.bench.endpoints import Prompt
from pdserve.cli.simulate.fleet_endpoint import FleetEndpoint
from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.models.model_folder import model_folder
from pdserve.router.requests.inference import Inference
from pdserve.simulator.step_times import Chunk, LinearStepTimes
from pdserve.simulator.virtual_fleet import FleetPlan, WorkerPlan, running_fleet
from pdserve.simulator.virtual_time import VirtualTime, run_virtually
from pdserve.simulator.virtual_transfer import Link

TIMES = LinearStepTimes(base_s=0.020, token_s=0.0002)
LINK = Link(bytes_per_s=1e9, latency_s=1e-4)
MESSAGES_S = 0.005
"""For all messages of a first token together; each takes 50 us."""


def plan(num_prefill: int = 1, num_decode: int = 1, **router: Any) -> FleetPlan:
    settings: dict[str, Any] = {"num_blocks": 1000, "max_model_len": 2048, "connector": "tcp"}
    return FleetPlan(
        model_folder("demo"),
        RouterSettings(**{"local_prefill": "never", **router}),
        [
            WorkerPlan(PrefillSettings(**settings), num_prefill, TIMES, LINK),
            WorkerPlan(DecodeSettings(**settings), num_decode, TIMES, LINK),
        ],
    )


@dataclass(frozen=True)
class Answer:
    """Virtual seconds from the request on."""

    token_ids: list[int]
    first_s: float
    last_s: float


async def ask(router: Inference, virtual: VirtualTime, prompt: list[int], num_tokens: int) -> Answer:
    began = virtual.now_s
    times: list[float] = []
    token_ids: list[int] = []
    async for chunk in FleetEndpoint(router, timeout_s=600.0).stream(Prompt("", prompt, []), num_tokens):
        if chunk.has_output:
            token_ids += chunk.token_ids
            times.append(virtual.now_s - began)
    return Answer(token_ids, times[0], times[-1])


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(length)]


def test_one_request_takes_its_steps() -> None:
    async def main(virtual: VirtualTime) -> Answer:
        async with running_fleet(plan(), virtual) as router:
            return await ask(router, virtual, prompt_of(300, 1), 11)

    answer = run_virtually(main)
    prefill_s, decode_s = TIMES.step_s([Chunk(300, 0)]), TIMES.step_s([Chunk(1, 300)])
    assert prefill_s < answer.first_s < prefill_s + MESSAGES_S
    # the first decode step begins when the last block has landed
    assert 10 * decode_s <= answer.last_s - answer.first_s < 10 * decode_s + MESSAGES_S
    assert len(answer.token_ids) == 11


def test_a_cached_prefix_is_not_computed_again() -> None:
    async def main(virtual: VirtualTime) -> list[Answer]:
        async with running_fleet(plan(), virtual) as router:
            prompt = prompt_of(320, 1)
            return [await ask(router, virtual, [*prompt, *prompt_of(20, seed)], 2) for seed in (2, 3)]

    first, again = run_virtually(main)
    assert again.first_s < TIMES.step_s([Chunk(20 + 16, 304)]) + MESSAGES_S < first.first_s


def test_a_slow_link_delays_the_second_token_only() -> None:
    slow = Link(bytes_per_s=1e6, latency_s=0.0)
    fleet = plan()
    fleet = FleetPlan(
        fleet.folder, fleet.router, [WorkerPlan(each.settings, each.count, TIMES, slow) for each in fleet.workers]
    )

    async def main(virtual: VirtualTime) -> tuple[Answer, int]:
        async with running_fleet(fleet, virtual) as router:
            answer = await ask(router, virtual, prompt_of(320, 1), 2)
            [worker] = router.fleet.workers(WorkerRole.DECODE)
            return answer, worker.identity.layout.mean_block_bytes

    answer, block_bytes = run_virtually(main)
    assert answer.first_s < TIMES.step_s([Chunk(320, 0)]) + MESSAGES_S
    assert answer.last_s - answer.first_s > 20 * block_bytes / 1e6


@pytest.mark.parametrize("policy", ["kv_aware", "round_robin"])
def test_a_load_on_several_workers_repeats_exactly(policy: str) -> None:
    async def main(virtual: VirtualTime) -> list[Answer]:
        async with running_fleet(plan(2, 2, policy=policy, local_prefill="auto"), virtual) as router:
            draw, tasks = random.Random(7), []
            for number in range(40):
                await asyncio.sleep(draw.expovariate(10.0))
                prompt = prompt_of(160, number % 5) + prompt_of(draw.randint(1, 200), 100 + number)
                tasks.append(asyncio.create_task(ask(router, virtual, prompt, draw.randint(2, 30))))
            return await asyncio.gather(*tasks)

    first, again = run_virtually(main), run_virtually(main)
    assert first == again
    assert len({answer.first_s for answer in first}) > 30


def test_a_pool_needs_a_size() -> None:
    fleet = plan()
    [first, *_] = fleet.workers
    settings = msgspec.structs.replace(first.settings, num_blocks=None, kv_cache_mib=None, device="cuda")
    broken = FleetPlan(fleet.folder, fleet.router, [WorkerPlan(settings, 1, TIMES, LINK)])

    async def main(virtual: VirtualTime) -> None:
        async with running_fleet(broken, virtual):
            raise AssertionError

    with pytest.raises(ConfigError, match="num_blocks or kv_cache_mib is needed"):
        run_virtually(main)
