"""Engines over a model with an encoder: prefill and decode, preemption, earlier output, and the host-memory tier."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.common.errors import InvalidRequest
from tests.support.engine.bart_engines import MAX_LEN
from tests.support.engine.engine_harness import Harness
from tests.support.engine.engine_pair import Pair
from tests.support.engine.whisper_engines import BLOCK_SIZE, features_of
from tests.support.models.encoder_decoder_checkpoints import GreedyAnswers
from tests.support.models.whisper_checkpoints import POSITIONS, PROMPT_IDS, Transcripts


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(100 * seed + length)
    return [draw.randrange(3, 300) for _ in range(length)]


@pytest.mark.parametrize(
    ("seed", "num_blocks"), [(None, 64), *(pytest.param(seed, 26, marks=pytest.mark.slow) for seed in range(3))]
)
def test_i1_prefill_and_decode(
    seed: int | None, num_blocks: int, make_bart: Callable[..., Harness], bart: tuple[Path, GreedyAnswers]
) -> None:
    """With a seed everything comes late, twice or not at all, and few blocks evict and preempt."""
    pair = Pair(make_bart(), make_bart(num_blocks=num_blocks, enable_prefix_caching=seed is None), seed)
    prompts = {f"r{length}": prompt_of(length) for length in (1, 7, 8, 9, 40, 41, 90)}
    for request_id, prompt in prompts.items():
        pair.add(prompt, request_id, params={"max_tokens": 30})
    pair.run()
    for request_id, prompt in prompts.items():
        assert pair.answer(request_id).token_ids == bart[1].answer(prompt, 30)


def test_sequences_fork_after_the_decoder_s_prompt(make_bart: Callable[..., Harness]) -> None:
    params = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "n": 3}
    alone, pair = make_bart(), Pair(make_bart(), make_bart())
    expected = [answer.token_ids for answer in alone.ask_many(prompt_of(21), 3, params=params)]
    assert len({tuple(tokens) for tokens in expected}) == 3
    pair.add(prompt_of(21), "r", n=3, params=params)
    pair.run()
    assert [pair.answer("r", index).token_ids for index in range(3)] == expected


@pytest.mark.slow
def test_earlier_output_is_computed_with_the_prompt(
    make_bart: Callable[..., Harness], bart: tuple[Path, GreedyAnswers]
) -> None:
    """Chunks of the decoder's tokens are longer and shorter than what the encoder read."""
    engine = make_bart()
    for length in (1, 2, 30):
        prompt = prompt_of(length, seed=1)
        whole = bart[1].answer(prompt, 40)
        for num_known in (1, 33):
            answer = engine.ask(prompt, output=whole[:num_known], params={"max_tokens": 40}, salt=f"{num_known}")
            assert answer.token_ids == whole[num_known:]


def test_a_prompt_waits_for_a_step_that_holds_it(make_bart: Callable[..., Harness]) -> None:
    engine = make_bart(max_num_batched_tokens=MAX_LEN + 8)
    first, second, third = (engine.add(prompt_of(60, seed), params={"max_tokens": 6}) for seed in (1, 2, 3))
    engine.step()
    assert engine.running() == [first]
    engine.step()
    assert engine.running() == [first, second]
    assert set(engine.run()) == {first, second, third}


@pytest.mark.slow
def test_blocks_of_a_prompt_come_from_the_tier_whole(
    make_bart: Callable[..., Harness], bart: tuple[Path, GreedyAnswers]
) -> None:
    engine = make_bart(num_blocks=26, num_host_blocks=(64,))
    prompts = [prompt_of(60, seed) for seed in range(5)]
    for prompt in [*prompts, *prompts]:
        assert engine.ask(prompt, params={"max_tokens": 9}).token_ids == bart[1].answer(prompt, 9)
    assert engine.core.stats().external_prefix_cache_hits > 0


def test_positions_of_a_sound_wait_to_be_computed_as_tokens_do(
    make_whisper_engine: Callable[..., Harness], whisper: tuple[Path, Transcripts]
) -> None:
    """Routers count them likewise."""
    engine = make_whisper_engine()
    engine.add(PROMPT_IDS, mm_features=features_of(whisper[0], 1))
    stats = engine.core.stats()
    assert stats.num_waiting_tokens == -(-POSITIONS // BLOCK_SIZE) * BLOCK_SIZE + len(PROMPT_IDS)
    engine.run()


def test_refused_by_the_engine(make_bart: Callable[..., Harness]) -> None:
    engine = make_bart()
    with pytest.raises(InvalidRequest, match="resumable is set, and a session's later input"):
        engine.add(prompt_of(5), resumable=True)
    with pytest.raises(
        InvalidRequest, match="prompt_token_ids has 97 tokens, the encoder of this model reads at most 96"
    ):
        engine.add(prompt_of(97))
    with pytest.raises(InvalidRequest, match="max_tokens is 96, the decoder of this model writes at most 95 tokens"):
        engine.add(prompt_of(5), params={"max_tokens": 96})
    with pytest.raises(ValueError, match="a step computes at most 90 tokens of a prompt, the encoder reads 96"):
        make_bart(max_num_batched_tokens=90)
