"""Steps of chosen shapes in the product's own engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.cli.profile import run_profile, step_bench
from pdserve.cli.profile.run_profile import measure_steps
from pdserve.cli.profile.step_bench import REPEATS, StepBench
from pdserve.common.errors import InternalError
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.runner.loading.loaded_model import load_model
from pdserve.engine.runner.model_runner import ModelRunner
from pdserve.engine.scheduler_output import SchedulerOutput
from pdserve.models.model_folder import model_folder
from pdserve.simulator.profile import Profile, ProfileStepTimes
from pdserve.simulator.step_times import Chunk
from pdserve.simulator.whole_steps import StepShape, with_steps

SETTINGS: dict[str, Any] = {"num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512}
SHAPES = [
    StepShape(16),
    StepShape(64),
    StepShape(16, 128),
    StepShape(2, chunks=8),
    StepShape(2, chunks=8, are_last=True),
    StepShape(64, are_last=True),
    StepShape(sequences=1, context=64),
    StepShape(sequences=8, context=200),
    StepShape(16, 0, 7, 64),
    StepShape(32, 256, 3, 100),
]


class Seen:
    """What an engine was told to compute."""

    def __init__(self) -> None:
        self.known: dict[str, list[int]] = {}
        """Sequence -> its tokens, and those with KV."""
        self.steps: list[list[Chunk]] = []

    def add(self, scheduled: SchedulerOutput) -> None:
        for new in scheduled.scheduled_new_reqs:
            self.known[new.req_id] = [len(new.token_ids), new.num_computed_tokens]
        chunks = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            known = self.known[request_id]
            is_last = known[1] + count == known[0]
            chunks.append(Chunk(count, known[1], int(is_last)))
            known[1] += count
            known[0] += is_last
        self.steps.append(chunks)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Steps of all engines of this test."""
    found, execute = Seen(), ModelRunner.execute_model

    def execute_model(self: ModelRunner, scheduled: SchedulerOutput) -> None:
        found.add(scheduled)
        execute(self, scheduled)

    monkeypatch.setattr(ModelRunner, "execute_model", execute_model)
    return found


@pytest.fixture(params=[False, True], ids=["", "one step ahead"])
def bench(request: pytest.FixtureRequest) -> Iterator[StepBench]:
    settings = DecodeSettings(**SETTINGS, async_scheduling=request.param)
    bench = StepBench(load_model(model_folder("demo"), settings), settings)
    yield bench
    bench.close()


def is_like(step: list[Chunk], shape: StepShape) -> bool:
    """True if the step is of the shape; sequences decode around its context."""
    singles = [chunk for chunk in step if chunk.num_tokens == 1]
    others = [chunk for chunk in step if chunk.num_tokens > 1]
    return (
        others == [chunk for chunk in shape.parts() if chunk.num_tokens > 1]
        and len(singles) == shape.sequences
        and all(abs(single.num_before - shape.context) <= 4 * REPEATS and single.num_outputs for single in singles)
    )


def test_steps_are_those_that_were_asked_for(bench: StepBench, seen: Seen) -> None:
    for shape in SHAPES:
        seen.steps.clear()
        times = bench.measure(shape)
        assert len(times) == REPEATS
        assert min(times) > 0
        assert sum(is_like(step, shape) for step in seen.steps) >= REPEATS, shape
        # nothing of it is left
        bench.check()


def test_what_comes_before_a_step_is_not_computed(bench: StepBench, seen: Seen) -> None:
    bench.measure(StepShape(16, 256, 7, 200))
    assert sum(chunk.num_tokens for step in seen.steps for chunk in step) < 16 * 2 * REPEATS + 7 * 8 * REPEATS


def test_prompts_are_not_found_in_the_cache(bench: StepBench) -> None:
    for _ in range(2):
        bench.measure(StepShape(64, 128))
        assert bench.num_hit_tokens == 0


def test_long_steps_are_repeated_less(bench: StepBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_bench, "LONG_S", 1e-9)
    assert len(bench.measure(StepShape(16))) == step_bench.FEWEST_REPEATS


def test_a_step_that_the_engine_does_not_compute_is_an_error(bench: StepBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_bench, "MAX_TURNS", 20)
    with pytest.raises(InternalError, match="no step of 9 sequences and 9 tokens"):
        bench.measure(StepShape(sequences=9, context=16))


def test_a_profile_of_the_bundled_model_gives_its_times_back() -> None:
    settings = DecodeSettings(**SETTINGS)
    reported: list[float] = []
    steps = measure_steps(load_model(model_folder("demo"), settings), settings, 1e-6, reported.append)
    assert len(reported) == len(steps) <= 12
    profile = with_steps(Profile(model="demo", device="cpu", tokens=(), outputs=(), attention=()), steps)
    profile.verify()
    times = ProfileStepTimes(profile)
    alone = {shape: time for shape, time in steps.items() if shape.chunks == 1 and not shape.are_last}
    assert len(alone) >= 8
    for shape, time in alone.items():
        assert times.step_s(shape.parts()) == pytest.approx(time.median_s, rel=1e-9), shape


def test_rounds_go_on_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(run_profile, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    settings = DecodeSettings(**SETTINGS)
    steps = measure_steps(load_model(model_folder("demo"), settings), settings, 30.0, lambda _: None)
    assert len(steps) == 30
    assert any(shape.chunk not in (0, 2, 64) for shape in steps)
