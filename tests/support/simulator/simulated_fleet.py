"""A small fleet under virtual time, and requests to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from pdserve.cli.bench.endpoints import Prompt
from pdserve.cli.simulate.fleet_endpoint import FleetEndpoint
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.models.model_folder import model_folder
from pdserve.router.requests.inference import Inference
from pdserve.simulator.step_times import LinearStepTimes
from pdserve.simulator.virtual_fleet import FleetPlan, WorkerPlan, running_fleet
from pdserve.simulator.virtual_time import VirtualTime, run_virtually
from pdserve.simulator.virtual_transfer import Link

T = TypeVar("T")
TIMES = LinearStepTimes(base_s=0.020, token_s=0.0002)
BLOCK_SIZE = 16


def fleet_plan(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    workers: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    **settings: Any,
) -> FleetPlan:
    """Workers of the demo model with room for 64 blocks. workers: fields of `WorkerPlan`. settings: of the workers."""
    given: dict[str, Any] = {"num_blocks": 64, "max_model_len": 512, "connector": "tcp", "block_size": BLOCK_SIZE}
    plan: dict[str, Any] = {"times": TIMES, "link": Link(1e9, 0.0), **(workers or {})}
    return FleetPlan(
        model_folder("demo"),
        RouterSettings(**{"local_prefill": "never", **(router or {})}),
        [
            WorkerPlan(settings=PrefillSettings(**given | settings), count=num_prefill, **plan),
            WorkerPlan(settings=DecodeSettings(**given | settings), count=num_decode, **plan),
        ],
    )


@dataclass(frozen=True)
class Answer:
    """Virtual seconds from the request on."""

    token_ids: tuple[int, ...]
    first_s: float
    last_s: float
    num_cached: int
    """Prompt tokens that needed no computing."""


class Asker:
    """Sends requests to a running fleet."""

    def __init__(self, router: Inference, virtual: VirtualTime) -> None:
        self.router = router
        self.virtual = virtual

    async def ask(self, prompt: Sequence[int], num_tokens: int = 1) -> Answer:
        """An answer with one token has no decode call."""
        began = self.virtual.now_s
        times, token_ids, num_cached = list[float](), list[int](), 0
        async for chunk in FleetEndpoint(self.router, timeout_s=600.0).stream(Prompt("", list(prompt), []), num_tokens):
            if chunk.has_output:
                token_ids += chunk.token_ids
                times.append(self.virtual.now_s - began)
            num_cached = chunk.cached_tokens or num_cached
        return Answer(tuple(token_ids), times[0], times[-1], num_cached)

    def block_bytes(self) -> int:
        """Of all ranks together."""
        return self.router.fleet.workers(WorkerRole.PREFILL)[0].identity.layout.mean_block_bytes


def run_fleet(plan: FleetPlan, work: Callable[[Asker], Awaitable[T]]) -> T:
    """Run `work` on a new fleet."""

    async def main(virtual: VirtualTime) -> T:
        async with running_fleet(plan, virtual) as router:
            return await work(Asker(router, virtual))

    return run_virtually(main)


def prompt_of(length: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [draw.randrange(3, 500) for _ in range(length)]
