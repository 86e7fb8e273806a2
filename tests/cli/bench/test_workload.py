"""Workloads of `pdserve bench`: lengths, shared tokens, and traces in Mooncake's format."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pdserve.cli.bench.traces.mooncake import BLOCK_TOKENS
from pdserve.cli.bench.workload import BenchSession, Shape, random_sessions, trace_sessions
from pdserve.common.errors import ConfigError


def draw_tokens(draw: random.Random, num: int) -> list[int]:
    return draw.choices(range(1000), k=num)


def sessions_of(shape: Shape, num: int = 200, seed: int = 1) -> list[BenchSession]:
    return list(random_sessions(shape, num, seed, draw_tokens))


def test_lengths_spread_evenly_over_the_range() -> None:
    sessions = sessions_of(Shape(input_tokens=100, output_tokens=40, range_ratio=0.5))
    inputs = [len(session.turns[0].token_ids) for session in sessions]
    outputs = [session.turns[0].output_tokens for session in sessions]
    assert 50 <= min(inputs) < 60
    assert 140 < max(inputs) <= 150
    assert 20 <= min(outputs) < 25
    assert 55 < max(outputs) <= 60


def test_without_a_range_lengths_are_exact_and_a_seed_repeats_them() -> None:
    shape = Shape(input_tokens=7, output_tokens=3)
    assert {(len(s.turns[0].token_ids), s.turns[0].output_tokens) for s in sessions_of(shape)} == {(7, 3)}
    assert sessions_of(shape, seed=5) == sessions_of(shape, seed=5)
    assert sessions_of(shape, seed=5) != sessions_of(shape, seed=6)


def test_prefixes_are_shared_and_as_many_as_asked() -> None:
    sessions = sessions_of(Shape(input_tokens=5, output_tokens=1, prefix_tokens=64, num_prefixes=3))
    assert len({tuple(session.turns[0].token_ids[:64]) for session in sessions}) == 3
    assert {len(session.turns[0].token_ids) for session in sessions} == {69}


def test_only_the_first_turn_has_the_prefix() -> None:
    [session] = sessions_of(Shape(input_tokens=5, output_tokens=1, prefix_tokens=10, num_turns=3), num=1)
    assert [len(turn.token_ids) for turn in session.turns] == [15, 5, 5]


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


def write_trace(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_a_trace_keeps_arrivals_lengths_and_shared_blocks(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "trace.jsonl",
        {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 6, "hash_ids": [1, 2, 4]},
        {"timestamp": 9000, "input_length": 512, "output_length": 7, "hash_ids": [5]},
    )
    first, second, third = trace_sessions(path, 0, draw_tokens, speed=2.0)
    assert [first.arrival_s, second.arrival_s, third.arrival_s] == [0.0, 1.0, 4.0]
    prompts = [session.turns[0].token_ids for session in (first, second, third)]
    assert [len(prompt) for prompt in prompts] == [1030, 1500, 512]
    assert prompts[0][: 2 * BLOCK_TOKENS] == prompts[1][: 2 * BLOCK_TOKENS]
    assert prompts[0][2 * BLOCK_TOKENS :] != prompts[1][2 * BLOCK_TOKENS :][:6]
    assert [session.turns[0].output_tokens for session in (first, second, third)] == [5, 6, 7]
    assert len(list(trace_sessions(path, 0, draw_tokens, num=2))) == 2


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ({"timestamp": 0, "input_length": 0, "output_length": 1}, "input_length is 0"),
        ({"timestamp": 0, "input_length": 5}, "output_length"),
        ({"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}, "2 blocks of 512 tokens"),
        ([1, 2], "Expected `object`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, entry: object, cause: str) -> None:
    good = {"timestamp": 0, "input_length": 5, "output_length": 1}
    path = write_trace(tmp_path / "trace.jsonl", good, entry)
    with pytest.raises(ConfigError, match=f"trace.jsonl, line 2: .*{cause}"):
        list(trace_sessions(path, 0, draw_tokens))
