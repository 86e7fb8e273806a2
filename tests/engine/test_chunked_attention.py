"""Layers that attend within chunks of positions: a KV cache group keeps the blocks of the current chunk, and no text changes."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.engine.sequence_blocks import max_sequence_blocks, max_sequence_tokens
from tests.support.engine.drafters import greedy_drafter, speculation, use_drafter
from tests.support.engine.engine_harness import Harness, MakeEngine, specs_of
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import Chunk, greedy_answer, prompt_of, sampled_answer
from tests.support.engine.window_texts import check_preempted_sequences, check_session_that_goes_back, most_in_use
from tests.support.models.kv_layouts import make_layout, with_windows

SIZE = 4
CHUNK = Chunk(22)
"""Chunks begin in the middle of blocks."""
GROUPS = (None, CHUNK, CHUNK)


@pytest.mark.parametrize("step", [5, 8, 22, 64])
@pytest.mark.parametrize("chunk", [Chunk(22), Chunk(16), Chunk(3)])
def test_a_long_sequence_holds_a_chunk_and_a_step(make_engine: MakeEngine, chunk: Chunk, step: int) -> None:
    groups = (None, chunk, chunk)
    engine = make_engine(sliding_window=groups, num_blocks=120, max_num_batched_tokens=step, max_model_len=200)
    engine.add(prompt_of(120), "a", params={"max_tokens": 80})
    of_chunk = -(-(chunk - 1 + step) // SIZE) + 1
    assert 50 < most_in_use(engine) <= 50 + 2 * of_chunk
    assert engine.answers["a"].token_ids == greedy_answer(prompt_of(120), 80, groups)


def test_a_sequence_of_the_largest_length_fits_alone(make_engine: MakeEngine) -> None:
    length = max_sequence_tokens(specs_of(GROUPS), (50,), SIZE, 8)
    assert max_sequence_blocks(specs_of(GROUPS), length, SIZE, 8) == (50,)
    engine = make_engine(
        sliding_window=GROUPS, num_blocks=50, max_num_batched_tokens=8, max_model_len=length, block_size=SIZE
    )
    for name in "ab":
        engine.add(prompt_of(length - 40), name, params={"max_tokens": 40, "temperature": 1.0, "seed": 3}, n=2)
    engine.run()
    for key, index in (("a/0", 0), ("a/1", 1), ("b/0", 0), ("b/1", 1)):
        answer = sampled_answer(prompt_of(length - 40), 40, seed=3, index=index, window=GROUPS)
        assert engine.answers[key].token_ids == answer
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(("length", "first_needed"), [(60, 11), (45, 11), (46, 11), (68, 11), (71, 16)])
def test_a_hit_needs_the_current_chunk_alone(make_engine: MakeEngine, length: int, first_needed: int) -> None:
    """Chunks begin at 22, 44 and 66, in blocks 5, 11 and 16. A hit of 44 tokens, where one begins, asks for the last block."""
    fields = {"sliding_window": GROUPS, "num_blocks": 80, "max_num_batched_tokens": 8, "max_model_len": 100}
    engine, prompt = make_engine(**fields), prompt_of(length)
    num_hit = (length - 1) // SIZE
    needed = min(first_needed, num_hit - 1)
    engine.ask(prompt)
    hashes = engine.hasher.extend(engine.root, prompt)
    for place in range(needed):
        for group in (1, 2):
            forget(engine, hashes[place], group)
    before = engine.model.num_tokens
    answer = engine.ask(prompt)
    assert (answer.num_cached_tokens, engine.model.num_tokens - before) == (num_hit * SIZE, length - num_hit * SIZE + 3)
    assert answer.token_ids == greedy_answer(prompt, 4, GROUPS)
    forget(engine, hashes[needed], 1)
    answer = engine.ask(prompt)
    assert answer.num_cached_tokens < num_hit * SIZE
    assert answer.token_ids == greedy_answer(prompt, 4, GROUPS)


def forget(engine: Harness, block_hash: bytes, group: int) -> None:
    """Make the pool forget one cached block."""
    pool, manager = engine.scheduler.pool, engine.scheduler.kv.coordinator.managers[group]
    block = manager.find(block_hash)
    if block is not None:
        pool.num_cached -= 1
        pool._give_up(block)


@pytest.mark.parametrize("length", [3, 21, 22, 23, 43, 44, 45, 47, 48, 49])
@pytest.mark.parametrize("num_cached", [0, 20])
def test_only_the_current_chunk_is_transferred(make_engine: MakeEngine, length: int, num_cached: int) -> None:
    fields = {"sliding_window": GROUPS, "max_num_batched_tokens": 8, "num_blocks": 100}
    pair = Pair(make_engine(**fields), make_engine(**fields))
    prompt = prompt_of(length)
    if num_cached:
        pair.d.ask(prompt[:num_cached], params={"max_tokens": 1})
    before = pair.d.model.num_tokens
    pair.add(prompt, "r", params={"max_tokens": 40})
    pair.run()
    assert pair.answer("r").token_ids == greedy_answer(prompt, 40, GROUPS)
    num_hit, num_places = min(num_cached, length) // SIZE, -(-length // SIZE)
    seen = num_places - max(num_hit, length // CHUNK * CHUNK // SIZE)
    assert len(pair.transfers["r"].landed) == num_places - num_hit + 2 * seen
    assert pair.d.model.num_tokens - before == 39


def test_sources_that_share_a_prefix_all_reach_their_ends(make_engine: MakeEngine) -> None:
    """A chunk's blocks are freed together: none of the sequences stops for a block that another one keeps."""
    length = max_sequence_tokens(specs_of(GROUPS), (60,), SIZE, 8)
    fields = {"sliding_window": GROUPS, "max_num_batched_tokens": 8}
    pair = Pair(make_engine(**fields, num_blocks=60), make_engine(**fields, num_blocks=500))
    assert pair.p.config.max_model_len == length
    stem = prompt_of(length - 50)
    prompts = {f"q{number}": [*stem, *prompt_of(20 + number)] for number in range(6)}
    pair.p.ask(stem, params={"max_tokens": 1})
    for name, prompt in prompts.items():
        pair.add(prompt, name, params={"max_tokens": 3})
    pair.run()
    for name, prompt in prompts.items():
        assert pair.answer(name).token_ids == greedy_answer(prompt, 3, GROUPS)


@pytest.mark.parametrize("kept", [0, 9, 20])
def test_a_session_that_goes_back_to_an_earlier_chunk_is_computed_again(make_engine: MakeEngine, kept: int) -> None:
    engine = make_engine(sliding_window=GROUPS, num_blocks=80)
    check_session_that_goes_back(engine, GROUPS, kept)


def test_drafts_over_the_beginning_of_a_chunk_take_nothing_back_that_is_gone(make_engine: MakeEngine) -> None:
    engine = make_engine(sliding_window=GROUPS, speculative_config=speculation(5), num_blocks=120, max_model_len=128)
    use_drafter(engine, greedy_drafter(0.6))
    engine.add(prompt_of(30), "r", params={"max_tokens": 90})
    most_in_use(engine)
    assert engine.answers["r"].token_ids == greedy_answer(prompt_of(30), 90, GROUPS)


@pytest.mark.parametrize("tier", [(), (60,)])
def test_a_preempted_sequence_continues(make_engine: MakeEngine, tier: tuple[int, ...]) -> None:
    engine = make_engine(
        sliding_window=CHUNK, num_blocks=14, max_num_batched_tokens=8, num_host_blocks=tier, max_model_len=56
    )
    check_preempted_sequences(engine, CHUNK)


def test_a_layout_counts_the_blocks_of_the_current_chunk() -> None:
    windowed = with_windows(make_layout(block_size=4), 0, 24)
    layout = msgspec.structs.replace(windowed, group_windows=(0, 0), group_chunks=(0, 24))
    assert layout.num_prompt_blocks(23) == 6 + 6
    assert layout.num_prompt_blocks(24) == 6
    assert layout.num_prompt_blocks(50) == 13 + 1
    assert layout.num_prompt_blocks(50, num_cached=12) == 2
    assert layout.num_places((40,)) == 40
    assert layout.differences(windowed) == ["group_windows: (0, 0) != (0, 24)", "group_chunks: (0, 24) != ()"]
