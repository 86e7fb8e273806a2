"""Random workloads of `pdserve bench`: lengths and shared tokens."""

from __future__ import annotations

import random

import pytest

from pdserve.cli.bench.traces.trace import TraceRequest, TraceSession
from pdserve.cli.bench.traces.trace_text import Said, TraceTexts
from pdserve.cli.bench.workload import Shape, random_sessions
from pdserve.common.errors import ConfigError


def draw_tokens(draw: random.Random, num: int) -> list[int]:
    return draw.choices(range(1000), k=num)


def sessions_of(shape: Shape, num: int = 200, seed: int = 1) -> list[TraceSession]:
    return list(random_sessions(shape, num, seed))


def requests_of(sessions: list[TraceSession]) -> list[TraceRequest]:
    return [request for session in sessions for request in session.requests]


def test_lengths_spread_evenly_over_the_range() -> None:
    requests = requests_of(sessions_of(Shape(input_tokens=100, output_tokens=40, range_ratio=0.5)))
    inputs, outputs = [each.input_tokens for each in requests], [each.output_tokens for each in requests]
    assert 50 <= min(inputs) < 60
    assert 140 < max(inputs) <= 150
    assert 20 <= min(outputs) < 25
    assert 55 < max(outputs) <= 60


def test_without_a_range_lengths_are_exact_and_a_seed_repeats_them() -> None:
    shape = Shape(input_tokens=7, output_tokens=3)
    assert {(each.input_tokens, each.output_tokens) for each in requests_of(sessions_of(shape))} == {(7, 3)}
    ranged = Shape(input_tokens=100, output_tokens=40, range_ratio=0.5)
    assert sessions_of(ranged, seed=5) == sessions_of(ranged, seed=5)
    assert sessions_of(ranged, seed=5) != sessions_of(ranged, seed=6)
    [session] = sessions_of(shape, num=1)
    [request] = session.requests
    prompts = [TraceTexts(seed, draw_tokens).of(session).prompt(request) for seed in (5, 5, 6)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_prefixes_are_shared_and_as_many_as_asked() -> None:
    sessions = sessions_of(Shape(input_tokens=5, output_tokens=1, prefix_tokens=64, num_prefixes=3))
    texts = TraceTexts(1, draw_tokens)
    prompts = [texts.of(session).prompt(request) for session in sessions for request in session.requests]
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 3
    assert len({tuple(prompt[64:]) for prompt in prompts}) == 200
    assert {len(prompt) for prompt in prompts} == {69}


def test_a_turn_adds_its_tokens_to_what_was_said() -> None:
    [session] = sessions_of(Shape(input_tokens=5, output_tokens=2, prefix_tokens=10, num_turns=3), num=1)
    requests = list(session.requests)
    assert [each.input_tokens for each in requests] == [15, 22, 29]
    text = TraceTexts(1, draw_tokens).of(session)
    said = [*text.prompt(requests[0]), 1, 2]
    second = text.prompt(requests[1], Said(requests[0], said))
    assert (second[:17], len(second)) == (said, 22)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"input_tokens": 0}, "--input-tokens is 0"),
        ({"output_tokens": -1}, "--output-tokens is -1"),
        ({"range_ratio": 1.0}, "--range-ratio is 1.0"),
        ({"prefix_tokens": -1}, "--prefix-tokens is -1"),
        ({"num_turns": 0}, "--num-turns is 0"),
    ],
)
def test_a_bad_shape_is_refused_by_its_option(given: dict[str, float], named: str) -> None:
    shape = Shape(**({"input_tokens": 1, "output_tokens": 1} | given))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=named):
        shape.verify()
