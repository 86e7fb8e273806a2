"""The coarse mode of a simulation: what it counts is what the exact mode has, as far as both can know it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdserve.cli.bench.summary import Distribution, Summary
from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.cli.simulate.run_simulate import simulate
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.models.model_folder import model_folder
from pdserve.router.placement.placement import Candidate, PlacementRules, choose
from pdserve.simulator.coarse.coarse_fleet import CoarseFleet, CoarseRequest
from pdserve.simulator.step_times import LinearStepTimes
from pdserve.simulator.virtual_fleet import FleetPlan, WorkerPlan
from pdserve.simulator.virtual_transfer import Link

TIMES = LinearStepTimes(base_s=0.010, token_s=0.0001, context_s=1e-8)
LINK = Link(bytes_per_s=1e9, latency_s=1e-4)
BLOCK = 16
MEANS = {"ttft": 0.06, "tpot": 0.04, "e2el": 0.03}
"""By how much the coarse mode's means may differ from the exact mode's."""
TAILS = {"ttft": 0.3, "tpot": 0.15, "e2el": 0.1}
"""Of the 95th percentiles."""


def plan(num_prefill: int = 1, num_decode: int = 1, num_blocks: int = 2000, **settings: Any) -> FleetPlan:
    worker: dict[str, Any] = {"num_blocks": num_blocks, "max_model_len": 4096, "connector": "tcp"}
    worker |= {name: settings.pop(name) for name in ("max_num_seqs", "max_num_batched_tokens") if name in settings}
    return FleetPlan(
        model_folder("demo"),
        load_settings(RouterSettings, flags={"block_moves": "never", **settings}),
        [
            WorkerPlan(load_settings(PrefillSettings, flags=worker), num_prefill, TIMES, LINK),
            WorkerPlan(load_settings(DecodeSettings, flags=worker), num_decode, TIMES, LINK),
        ],
    )


def single(number: int, start_s: float, request: TraceRequest, block_tokens: int = BLOCK) -> TraceSession:
    return TraceSession(f"s{number}", "all", block_tokens, (request,), start_s)


def poisson(rate: float, number: int, *, shared: int = 0, seed: int = 3) -> list[TraceSession]:
    """Requests at random times. shared: prompts begin with one of four texts of so many blocks."""
    draw, now_s, sessions = random.Random(seed), 0.0, []
    for each in range(number):
        now_s += draw.expovariate(rate)
        length = shared * BLOCK + draw.randint(20, 900)
        text = draw.randrange(4)
        hashes = [text * 1000 + place for place in range(shared)]
        hashes += [10_000 + each * 100 + place for place in range(length // BLOCK - shared)]
        request = TraceRequest(f"r{each}", length, draw.randint(5, 120), tuple(hashes))
        sessions.append(single(each, now_s, request))
    return sessions


def summary(fleet: FleetPlan, sessions: list[TraceSession], *, is_coarse: bool) -> Summary:
    return simulate(fleet, sessions, 0, lambda record: None, is_coarse=is_coarse).summary({})


def conversations(number: int) -> list[TraceSession]:
    """Sessions whose prompts grow, with sub-agents, one of them in the background."""
    draw, sessions = random.Random(9), []
    for each in range(number):
        steps: list[TraceRequest | TraceSession] = []
        blocks = [each * 1000 + place for place in range(10)]
        for turn in range(4):
            blocks += [each * 1000 + len(blocks) + place for place in range(draw.randint(2, 8))]
            length = len(blocks) * BLOCK + 5
            steps.append(TraceRequest(f"r{each}.{turn}", length, draw.randint(5, 40), tuple(blocks), draw.random()))
            if turn == 1:
                for agent, is_background in enumerate((False, True)):
                    asks = TraceRequest(
                        f"a{each}.{agent}", 100, 30, tuple(10**6 + each * 100 + agent * 10 + n for n in range(6))
                    )
                    steps.append(TraceSession(f"a{each}.{agent}", "all", BLOCK, (asks,), 0.1, is_background))
        sessions.append(TraceSession(f"s{each}", "all", BLOCK, tuple(steps), each * 0.4))
    return sessions


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_one_request_takes_as_long_as_exactly(num_prefill: int) -> None:
    sessions = [single(0, 1.0, TraceRequest("r", 3000, 20, ()))]
    fleet = plan(num_prefill, max_num_batched_tokens=1024)
    coarse, exact = (summary(fleet, sessions, is_coarse=is_coarse) for is_coarse in (True, False))
    for name in ("ttft", "e2el"):
        of_coarse, of_exact = coarse.distributions[name].mean, exact.distributions[name].mean
        assert of_coarse is not None
        assert of_coarse == pytest.approx(of_exact, abs=3.0), (name, "milliseconds: messages")


LOADS: dict[str, tuple[Callable[[], FleetPlan], Callable[[], list[TraceSession]]]] = {
    "1+1": (plan, lambda: poisson(8.0, 120)),
    "no prefill worker": (lambda: plan(0, 2), lambda: poisson(10.0, 120)),
    "2+2, prefixes": (lambda: plan(2, 2), lambda: poisson(20.0, 150, shared=20)),
    "2+2, round robin": (lambda: plan(2, 2, policy="round_robin", local_prefill="never"), lambda: poisson(15.0, 120)),
    "small batches": (lambda: plan(1, 1, max_num_seqs=8), lambda: poisson(6.0, 100)),
    "small pools": (lambda: plan(1, 1, num_blocks=400), lambda: poisson(6.0, 100)),
    "conversations": (lambda: plan(1, 2), lambda: conversations(20)),
}


@pytest.mark.parametrize("load", LOADS)
def test_figures_agree_with_the_exact_mode(load: str) -> None:
    make_plan, make_sessions = LOADS[load]
    sessions = make_sessions()
    coarse, exact = (summary(make_plan(), sessions, is_coarse=is_coarse) for is_coarse in (True, False))
    assert (coarse.completed, coarse.failures) == (exact.completed, exact.failures)
    assert (coarse.input_tokens, coarse.output_tokens) == (exact.input_tokens, exact.output_tokens)
    assert (coarse.cached_tokens or 0) == pytest.approx(exact.cached_tokens or 0, rel=0.05, abs=100)
    for name, tolerance in MEANS.items():
        of_coarse, of_exact = coarse.distributions[name], exact.distributions[name]
        assert of_coarse.mean == pytest.approx(of_exact.mean, rel=tolerance), name
        assert of_coarse.percentiles[95] == pytest.approx(of_exact.percentiles[95], rel=TAILS[name]), name


def test_what_does_not_fit_is_refused_in_the_same_way() -> None:
    requests = [TraceRequest("long", 5000, 5), TraceRequest("output", 4000, 500), TraceRequest("fits", 4000, 90)]
    sessions = [single(number, float(number), request) for number, request in enumerate(requests)]
    coarse, exact = (summary(plan(), sessions, is_coarse=is_coarse) for is_coarse in (True, False))
    assert coarse.failures == exact.failures
    assert coarse.completed == exact.completed == 1


def test_who_waits_too_long_is_refused() -> None:
    fleet = plan(0, 1, max_num_seqs=1, queue_timeout_s=1.0, max_running_requests=1)
    sessions = [single(number, 0.0, TraceRequest(f"r{number}", 100, 60)) for number in range(4)]
    coarse = summary(fleet, sessions, is_coarse=True)
    assert coarse.failures == {"overloaded": coarse.failures["overloaded"]}
    assert coarse.completed >= 1
    assert coarse.completed + coarse.failures["overloaded"] == 4


def test_gaps_between_tokens_are_counted() -> None:
    sessions = poisson(8.0, 60)
    coarse = summary(plan(), sessions, is_coarse=True)
    assert coarse.distributions["itl"].count == pytest.approx(coarse.output_tokens - 2 * coarse.completed, rel=0.02)
    exact = summary(plan(), sessions, is_coarse=False)
    assert coarse.distributions["itl"].mean == pytest.approx(exact.distributions["itl"].mean, rel=0.1)


def test_a_sequence_that_loses_its_blocks_is_computed_again() -> None:
    """More sequences decode than the pool has room for at their ends."""
    sessions = [single(number, 0.01 * number, TraceRequest(f"r{number}", 150, 300)) for number in range(12)]
    coarse, exact = (summary(plan(0, 1, 260), sessions, is_coarse=is_coarse) for is_coarse in (True, False))
    assert coarse.completed == exact.completed == 12
    roomy = summary(plan(0, 1, 2000), sessions, is_coarse=True)
    assert coarse.duration_s > 1.1 * roomy.duration_s
    assert coarse.duration_s == pytest.approx(exact.duration_s, rel=0.15)


@pytest.mark.parametrize("policy", ["kv_aware", "least_loaded"])
def test_a_shortlist_has_the_worker_that_all_of_them_would_give(policy: str) -> None:
    fleet = CoarseFleet(plan(0, 12, policy=policy))
    draw, compared = random.Random(4), 0
    decode = fleet._roles[WorkerRole.DECODE]

    def compare(request: CoarseRequest) -> None:
        nonlocal compared
        now_s = fleet.events.time.monotonic()
        short = fleet._shortlist(WorkerRole.DECODE, request, now_s)
        overlaps = fleet._index.match(request.hashes, [each.remote.key for each in decode.members], now_s)
        everyone = [
            Candidate(worker=each.remote, num_tokens=request.num_tokens, overlap_blocks=overlaps[each.remote.key])
            for each in decode.members
        ]
        rules = PlacementRules(policy=fleet._settings.policy)
        best, of_short = choose(everyone, WorkerRole.DECODE, rules), choose(short, WorkerRole.DECODE, rules)
        assert best is not None
        assert of_short is not None
        assert (of_short.cost_blocks, of_short.worker.num_placed) == (best.cost_blocks, best.worker.num_placed)
        assert len(short) < len(everyone)
        compared += 1

    for number in range(120):
        text, length = draw.randrange(3), draw.randint(100, 600)
        hashes = [(text * 100 + place).to_bytes(8, "little") for place in range(6)]
        request = CoarseRequest(length, draw.randint(2, 80), hashes, BLOCK, lambda ended: None)
        when_s = number * 0.02
        fleet.events.at(when_s, lambda request=request: compare(request))  # type: ignore[misc]
        fleet.submit(request, when_s)
    fleet.run()
    assert compared == 120


def test_counted_values_have_the_statistics_of_the_list() -> None:
    draw = random.Random(2)
    values = [draw.choice((0.01, 0.02, 0.05, 0.4)) for _ in range(997)]
    counted = Distribution.counted({value: values.count(value) for value in set(values)})
    listed = Distribution.of(values)
    assert (counted.count, counted.least, counted.most) == (listed.count, listed.least, listed.most)
    assert counted.mean == pytest.approx(listed.mean)
    assert counted.std == pytest.approx(listed.std)
    assert counted.percentiles == pytest.approx(
        dict(zip(listed.percentiles, np.percentile(np.array(values) * 1e3, (50, 90, 95, 99)), strict=True))
    )
    assert Distribution.counted({}) == Distribution.of(())
