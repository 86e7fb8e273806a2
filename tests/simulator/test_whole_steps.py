"""Profiles out of times of whole steps give these times back."""

from __future__ import annotations

import pytest

from pdserve.simulator.profile import Profile, ProfileStepTimes, Spread
from pdserve.simulator.step_times import Chunk
from pdserve.simulator.whole_steps import StepShape, with_steps

MS = 1e-3
EMPTY = Profile(model="some", device="none", tokens=(), outputs=(), attention=())


def spread(ms: float) -> Spread:
    return Spread(ms * MS, 0.9 * ms * MS, 1.5 * ms * MS)


def made_up_ms(shape: StepShape) -> float:
    """A step of a machine that adds everything up, with a loss of 0.5 ms where both kinds meet."""
    chunks = shape.num_chunks * (0.3 + 1e-4 * shape.chunk * (shape.before + shape.chunk / 2))
    singles = shape.sequences * (0.2 + 1e-3 * shape.context)
    mixed = 0.5 if chunks and singles else 0.0
    return 5 + 0.05 * shape.num_tokens + 0.1 * shape.num_outputs + chunks + singles + mixed


SHAPES = [
    *(StepShape(chunk, before) for chunk in (2, 16, 64) for before in (0, 64, 1024)),
    *(StepShape(2, chunks=count, are_last=are_last) for count in (1, 8) for are_last in (False, True)),
    *(StepShape(sequences=count, context=context) for count in (1, 8) for context in (64, 1024)),
    *(StepShape(chunk, 0, 8, context) for chunk in (2, 16) for context in (64, 1024)),
]
PROFILE = with_steps(EMPTY, {shape: spread(made_up_ms(shape)) for shape in SHAPES})
MEASURED_ALONE = [shape for shape in SHAPES if shape.chunks == 1 and not shape.are_last]


@pytest.mark.parametrize("shape", MEASURED_ALONE, ids=str)
def test_measured_steps_come_back_at_each_level(shape: StepShape) -> None:
    time = spread(made_up_ms(shape))
    for level in ("low", "median", "high"):
        found = ProfileStepTimes(PROFILE, level).step_s(shape.parts())
        assert found == pytest.approx(time.at(level), rel=1e-9)


def test_outputs_are_what_steps_take_more_with_them() -> None:
    found = {each.count: each.time.median_s / MS for each in PROFILE.outputs}
    assert found == pytest.approx({1: 0.1, 8: 0.8})


def test_what_a_chunk_attends_to_within_is_no_time_of_its_tokens() -> None:
    """So that many short chunks do not take the attention of a long one."""
    found = {each.count: each.time.median_s / MS for each in PROFILE.tokens}
    assert found == pytest.approx({count: 5 + 0.05 * count + 0.3 for count in (2, 16, 64)})


def test_each_chunk_but_the_first_takes_its_own_time() -> None:
    assert PROFILE.further_chunk_s == pytest.approx(0.3 * MS)
    eight = StepShape(16, 64, chunks=8)
    found = ProfileStepTimes(PROFILE).step_s(eight.parts())
    assert found == pytest.approx(made_up_ms(eight) * MS, rel=0.01)


def test_steps_between_and_beyond_those_that_were_measured() -> None:
    times = ProfileStepTimes(PROFILE)
    for shape in (
        StepShape(40, 500),
        StepShape(64, 4000),
        StepShape(sequences=5, context=300),
        StepShape(sequences=20, context=3000),
    ):
        assert times.step_s(shape.parts()) == pytest.approx(made_up_ms(shape) * MS, rel=0.05), shape


def test_single_steps_may_take_less_than_their_tokens() -> None:
    """As where a GPU replays a graph for them."""
    steps = {
        StepShape(2): spread(20.0),
        StepShape(64): spread(25.0),
        StepShape(2, are_last=True): spread(21.0),
        StepShape(sequences=1, context=64): spread(5.0),
        StepShape(sequences=8, context=64): spread(6.0),
        StepShape(2, 0, 8, 64): spread(22.0),
    }
    times = ProfileStepTimes(with_steps(EMPTY, steps))
    for shape, time in steps.items():
        assert times.step_s(shape.parts()) == pytest.approx(time.median_s)


def test_noise_gives_no_outputs_below_nothing() -> None:
    steps = {
        StepShape(2): spread(6.0),
        StepShape(2, are_last=True): spread(5.0),
        StepShape(sequences=1, context=64): spread(5.0),
    }
    profile = with_steps(EMPTY, steps)
    assert [each.time for each in profile.outputs] == [Spread(0.0, 0.0, 0.0)]
    assert ProfileStepTimes(profile).step_s([Chunk(1, 64, 1)]) == pytest.approx(5.0 * MS)


def test_a_shape_is_a_list_of_chunks() -> None:
    assert StepShape(3, 5, 2, 7).parts() == [Chunk(3, 5, 0), Chunk(1, 7, 1), Chunk(1, 7, 1)]
    assert StepShape(3, chunks=2, are_last=True).parts() == [Chunk(3, 0, 1)] * 2
    shape = StepShape(3, 5, 2, 7, chunks=4, are_last=True)
    assert (shape.num_tokens, shape.num_outputs, shape.num_chunks) == (14, 6, 4)
    assert (StepShape(sequences=2).num_tokens, StepShape(sequences=2).num_chunks) == (2, 0)
