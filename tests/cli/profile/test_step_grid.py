"""Which steps are measured: within what the engine allows, coarsest first."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.cli.profile.step_grid import GROWTH, StepLimits, step_grid
from pdserve.common.errors import ConfigError
from pdserve.engine.config import EngineConfig
from pdserve.models.kv_cache import FullAttentionSpec, SlidingWindowSpec
from pdserve.simulator.whole_steps import StepShape


def rounds_of(**fields: Any) -> tuple[EngineConfig, list[list[StepShape]]]:
    config = EngineConfig(**{"num_blocks": 1000, "max_model_len": 4096, "max_num_batched_tokens": 512} | fields)
    return config, step_grid(StepLimits(config))


CONFIGS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 5000, "max_num_seqs": 256},
    {"max_num_seqs": 1},
    {"max_num_seqs": 600, "max_num_batched_tokens": 300},
    {"max_num_batched_tokens": 2},
    {"max_num_batched_tokens": 1000, "long_prefill_token_threshold": 100},
    {"num_blocks": 10, "max_model_len": 100},
    {"block_size": 256, "num_blocks": 40},
    {"kv_cache_specs": (FullAttentionSpec(), SlidingWindowSpec(128)), "num_blocks": 1000},
]


@pytest.mark.parametrize("fields", CONFIGS, ids=str)
def test_all_steps_are_possible(fields: dict[str, Any]) -> None:
    config, rounds = rounds_of(**fields)
    shapes = [shape for shapes in rounds for shape in shapes]
    assert len(shapes) == len(set(shapes))
    for shape in shapes:
        assert shape.num_tokens <= config.max_num_batched_tokens
        assert shape.num_chunks + shape.sequences <= config.max_num_seqs
        assert not shape.chunk or 2 <= shape.chunk <= config.largest_chunk
        assert shape.before % config.block_size == 0
        lengths = [(shape.num_chunks, shape.before + shape.chunk), (shape.sequences, shape.context)]
        assert all(length + GROWTH <= config.max_model_len for count, length in lengths if count)
        if len(config.kv_cache_specs) == 1:
            blocks = sum(count * -(-length // config.block_size) for count, length in lengths)
            assert blocks < config.num_blocks


@pytest.mark.parametrize("fields", CONFIGS, ids=str)
def test_the_first_round_has_the_ends_of_all_sizes(fields: dict[str, Any]) -> None:
    config, [first, *_] = rounds_of(**fields)
    assert len(first) <= 12
    largest = max(shape.chunk for shape in first)
    assert {StepShape(2), StepShape(2, are_last=True), StepShape(largest)} <= set(first)
    assert largest == min(config.largest_chunk, StepLimits(config).longest)
    singles = [shape for shape in first if shape.sequences]
    assert 1 in {shape.sequences for shape in singles}
    assert max(shape.context for shape in singles) == StepLimits(config).longest
    # what is subtracted is there
    assert {shape._replace(are_last=False) for shape in first if shape.are_last} <= set(first)


def test_later_rounds_have_powers_of_two_and_mixtures() -> None:
    _, rounds = rounds_of()
    shapes = {shape for shapes in rounds for shape in shapes}
    alone = {shape.chunk for shape in shapes if shape.chunk and not shape.sequences}
    assert alone == {2, 4, 8, 16, 32, 64, 128, 256, 512}
    assert {shape.sequences for shape in shapes if not shape.chunk} == {1, 2, 4, 8, 16, 32, 64}
    mixed = [shape for shape in shapes if shape.chunk and shape.sequences]
    assert {shape.sequences for shape in mixed} == {1, 2, 4, 8, 16, 32, 63}
    assert not any(shape in mixed for shape in (*rounds[0], *rounds[1]))
    # each row of a surface begins with its first sample
    order = {shape: number for number, shape in enumerate(shape for shapes in rounds for shape in shapes)}
    for shape in shapes:
        if shape.chunk and shape.chunks == 1:
            assert order[StepShape(shape.chunk)] <= order[shape]


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"max_model_len is 64, more than {GROWTH + 2} is needed"):
        rounds_of(max_model_len=64)
