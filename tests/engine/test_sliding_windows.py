"""Blocks that no token can see any more, in models whose layers all have a window: they are freed, and no text changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, PoolCorrupt
from pdserve.engine.kv_cache.single_type_kv_cache_manager import SlidingWindowManager
from pdserve.engine.kv_cache.sliding_window import SlidingWindow
from tests.support.engine.drafters import greedy_drafter, speculation, use_drafter
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import greedy_answer, prompt_of, sampled_answer
from tests.support.engine.window_texts import check_preempted_sequences, check_session_that_goes_back, most_in_use
from tests.support.inputs.random_prompts import prompt_of as text_of
from tests.support.models.oracle import Oracle

WINDOW = 13
SIZE = 4


@pytest.mark.parametrize(
    ("window", "chunk"),
    [(1, 8), (13, 64), (16, 5), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 8), (13, 8), (13, 1)))],
)
def test_a_long_sequence_holds_its_window_and_a_step(make_engine: MakeEngine, window: int, chunk: int) -> None:
    """Without the window it holds all its blocks, 50."""
    engine = make_engine(sliding_window=window, max_num_batched_tokens=chunk, max_model_len=256)
    whole = make_engine(window=window, max_num_batched_tokens=chunk, max_model_len=256)
    prompt = prompt_of(120)
    for each in (engine, whole):
        each.add(prompt, "a", params={"max_tokens": 80})
    assert most_in_use(whole) == 50
    most = -(-(window - 1 + chunk) // SIZE) + 1
    assert most_in_use(engine) <= most
    assert engine.answers["a"].token_ids == whole.answers["a"].token_ids == greedy_answer(prompt, 80, window)


def test_a_pool_serves_more_long_sequences_at_once(make_engine: MakeEngine) -> None:
    fields = {"num_blocks": 40, "max_num_batched_tokens": 8, "max_model_len": 160}
    engine, whole = make_engine(sliding_window=WINDOW, **fields), make_engine(window=WINDOW, **fields)
    prompts = {str(number): prompt_of(30 + number) for number in range(5)}
    for each in (engine, whole):
        for name, prompt in prompts.items():
            each.add(prompt, name, params={"max_tokens": 90})
        each.run()
        for name, prompt in prompts.items():
            assert each.answers[name].token_ids == greedy_answer(prompt, 90, WINDOW)
    assert (engine.scheduler.num_preemptions, whole.scheduler.num_preemptions > 0) == (0, True)


def test_a_hit_needs_the_last_window_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16, max_num_batched_tokens=8, sliding_window=WINDOW)
    prompt = prompt_of(50)
    engine.ask(prompt)
    hashes = engine.hasher.extend(engine.root, prompt)
    engine.ask([60] * 24)  # takes blocks of the beginning, which were freed first
    assert engine.scheduler.pool.find(hashes[0]) is None
    before = engine.model.num_tokens
    answer = engine.ask(prompt)
    assert (answer.num_cached_tokens, engine.model.num_tokens - before) == (48, 2 + 3)
    assert answer.token_ids == greedy_answer(prompt, 4, WINDOW)
    assert engine.ask(prompt[:20]).num_cached_tokens == 0, "its last window is gone"


def test_i3_hits_are_those_of_a_search_by_hand() -> None:
    draw = random.Random(5)
    for _ in range(300):
        pool = BlockPool(40)
        window = SlidingWindow(draw.choice([1, 2, 4, 5, 9, 17, 100]), SIZE, is_chunk=draw.random() < 0.5)

        def first_seen(num_tokens: int, window: SlidingWindow = window) -> int:
            """Of the token after as many."""
            chunk = window.num_tokens
            return num_tokens // chunk * chunk if window.is_chunk else max(0, num_tokens - chunk + 1)

        hashes = [bytes([number]) for number in range(draw.randint(0, 30))]
        for block_hash in hashes:
            if draw.random() < 0.8:
                [block] = pool.allocate(1)
                pool.remember(block, block_hash)
        ends = [0]
        for end in range(1, len(hashes) + 1):
            first = min(first_seen(end * SIZE) // SIZE, end - 1)
            if all(pool.find(block_hash) for block_hash in hashes[first:end]):
                ends.append(end)
        hit = SlidingWindowManager(pool, SIZE, 0, 0, window, 8).longest_hit(hashes)
        assert len(hit) == max(ends)
        known = [block is NULL_BLOCK or block.block_hash == hashes[place] for place, block in enumerate(hit)]
        assert all(known)
        needed = first_seen(len(hit) * SIZE) // SIZE
        assert NULL_BLOCK not in hit[needed:]


def test_a_hold_on_a_block_that_is_not_there_is_a_bug() -> None:
    with pytest.raises(PoolCorrupt, match="not there"):
        BlockPool(2).hold([NULL_BLOCK])


@pytest.mark.parametrize("length", [3, 12, 13, 16, 47, 48, 49])
def test_only_what_a_later_token_sees_is_transferred(make_engine: MakeEngine, length: int) -> None:
    fields = {"sliding_window": WINDOW, "max_num_batched_tokens": 8}
    pair = Pair(make_engine(**fields), make_engine(**fields))
    prompt = prompt_of(length)
    pair.add(prompt, "r", params={"max_tokens": 40})
    pair.run()
    assert pair.answer("r").token_ids == greedy_answer(prompt, 40, WINDOW)
    first = max(0, length - WINDOW + 1) // SIZE
    assert sorted(pair.transfers["r"].landed) == list(range(first, -(-length // SIZE)))
    assert pair.d.model.num_tokens == 39


def test_a_source_frees_what_nobody_wants(make_engine: MakeEngine) -> None:
    fields = {"sliding_window": WINDOW, "max_num_batched_tokens": 8}
    pair = Pair(make_engine(**fields), make_engine(**fields))
    pair.add(prompt_of(100), "r")
    for _ in range(10):
        pair.round()
    table = pair.p.scheduler.kv.coordinator.managers[0].tables["r"]
    assert table.count(NULL_BLOCK) > 8
    pair.run()
    alone = make_engine(**fields, run_ahead_share=1.0)
    alone.add(prompt_of(100), "r", transfer_source=True)
    for _ in range(10):
        alone.step()
    assert alone.scheduler.kv.coordinator.managers[0].tables["r"].count(NULL_BLOCK) > 8
    alone.core.abort_request("r")


def test_i5_sequences_of_one_prompt_share_what_they_see(make_engine: MakeEngine) -> None:
    engine = make_engine(sliding_window=WINDOW, max_num_batched_tokens=8)
    prompt = prompt_of(58)
    engine.add(prompt, "r", n=3, params={"max_tokens": 40, "temperature": 1.0, "seed": 3})
    most = most_in_use(engine)
    for index in range(3):
        assert engine.answers[f"r/{index}"].token_ids == sampled_answer(prompt, 40, seed=3, index=index, window=WINDOW)
    assert most <= 3 * 5 + 2


@pytest.mark.parametrize("kept", [0, 1, 9, 20])
def test_a_session_that_goes_back_behind_its_window_is_computed_again(make_engine: MakeEngine, kept: int) -> None:
    engine = make_engine(sliding_window=WINDOW)
    check_session_that_goes_back(engine, WINDOW, kept)


def test_drafts_that_are_refused_take_nothing_back_that_is_gone(make_engine: MakeEngine) -> None:
    engine = make_engine(sliding_window=WINDOW, speculative_config=speculation(5))
    use_drafter(engine, greedy_drafter(0.6))
    engine.add(prompt_of(30), "r", params={"max_tokens": 90})
    assert most_in_use(engine) <= -(-(WINDOW + 64) // SIZE) + 1
    assert engine.answers["r"].token_ids == greedy_answer(prompt_of(30), 90, WINDOW)


@pytest.mark.parametrize("tier", [(), (60,)])
def test_a_preempted_sequence_continues(make_engine: MakeEngine, tier: tuple[int, ...]) -> None:
    engine = make_engine(
        sliding_window=25, num_blocks=14, max_num_batched_tokens=8, num_host_blocks=tier, max_model_len=56
    )
    check_preempted_sequences(engine, 25)
    if tier:
        assert engine.scheduler.pool.tier is not None
        assert engine.scheduler.pool.tier.num_loaded > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [20, 70])
def test_i1_a_model_with_windows_equals_transformers(
    make_real_engine: Callable[..., Harness], tiny_checkpoints: Callable[..., Path], length: int
) -> None:
    folder = tiny_checkpoints("mistral", sliding_window=19)
    oracle = Oracle(folder)
    engine = make_real_engine(folder, num_blocks=16, max_num_batched_tokens=24, block_size=8, max_model_len=128)
    prompts = {str(number): text_of(length + number) for number in range(3)}
    for name, prompt in prompts.items():
        engine.add(prompt, name, params={"max_tokens": 25})
    engine.run()
    for name, prompt in prompts.items():
        oracle.check(prompt, engine.answers[name].token_ids)
    assert engine.scheduler.kv.num_freed_behind_window > 3
