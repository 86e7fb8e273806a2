"""The search for the cheapest fleet, over fleets whose latencies are a formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.cli.bench.run_load import RequestRecord
from pdserve.cli.plan.fleet_search import FleetSearch, Size, Trial
from pdserve.cli.plan.targets import Target

TARGETS = (Target.parse("ttft_p99=0.5"), Target.parse("tpot_p99=0.05"))


def trial(size: Size, prompts: float, outputs: float) -> Trial:
    """A fleet whose roles each have some work; a role without room misses its target by as much as it lacks."""
    if size.num_prefill:
        ttft_s, tpot_s = 0.4 * prompts / size.num_prefill, 0.04 * outputs / size.num_decode
    else:
        # prompts disturb outputs
        ttft_s = 0.4 * (prompts + outputs) / size.num_decode
        tpot_s = 0.04 * (prompts + outputs) * 1.5 / size.num_decode
    record = RequestRecord("r", 0.0, 0.0, [ttft_s, ttft_s + 10 * tpot_s], ended_s=10.0, output_tokens=11)
    return Trial(size, [record] * 5, (prompts + outputs) * 10.0, 10.0)


def cheapest_of_all(work: tuple[float, float], cost: Callable[[Size], float], most: int) -> float | None:
    sizes = [Size(p, n - p) for n in range(1, most + 1) for p in range(n)]
    return min((cost(size) for size in sizes if trial(size, *work).meets(TARGETS)), default=None)


@pytest.mark.parametrize("prices", [(1.0, 1.0), (3.0, 1.0), (1.0, 2.5)])
@pytest.mark.parametrize("work", [(0.1, 0.1), (1.0, 3.0), (7.3, 2.2), (2.0, 11.0), (5.0, 5.0)])
def test_the_cheapest_fleet_is_found_with_few_trials(work: tuple[float, float], prices: tuple[float, float]) -> None:
    def cost(size: Size) -> float:
        return size.num_prefill * prices[0] + size.num_decode * prices[1]

    search = FleetSearch(lambda size: trial(size, *work), TARGETS, cost, 24)
    found = search.cheapest()
    assert found is not None
    assert found.meets(TARGETS)
    assert cost(found.size) == cheapest_of_all(work, cost, 24)
    assert len(search.trials) < 70, "of 300"


def test_there_may_be_none() -> None:
    search = FleetSearch(lambda size: trial(size, 50.0, 50.0), TARGETS, lambda size: 1.0 * sum(size), 12)
    assert search.cheapest() is None
    assert search.frontier(), "what comes closest"


def test_the_frontier_has_no_fleet_that_another_one_beats() -> None:
    search = FleetSearch(lambda size: trial(size, 3.0, 5.0), TARGETS, lambda size: 1.0 * sum(size), 24)
    search.cheapest()
    frontier = search.frontier()
    costs = [sum(each.size) for each in frontier]
    assert costs == sorted(costs)
    for worse, better in zip(frontier[1:], frontier, strict=False):
        values = list(zip(worse.values_s(TARGETS), better.values_s(TARGETS), strict=True))
        assert any(mine < other for mine, other in values)
