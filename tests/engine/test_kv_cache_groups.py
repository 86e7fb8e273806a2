"""Several KV cache groups: layers with a window free blocks that layers without one keep, and no text changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.common.block_hash import BLOCK_HASH_BYTES
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.transfer_order import TransferOrder
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool, with_group_id
from pdserve.engine.kv_cache.kv_cache_coordinator import KVCacheCoordinator
from pdserve.engine.runner.model_runner import ModelRunner
from pdserve.engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from pdserve.engine.sequence_blocks import max_sequence_blocks, max_sequence_tokens
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from pdserve.models.config.kv_cache_group_layers import kv_cache_group_layers
from tests.support.engine.drafters import greedy_drafter, speculation, use_drafter
from tests.support.engine.engine_harness import Harness, MakeEngine, specs_of
from tests.support.engine.engine_pair import Pair
from tests.support.engine.hash_model import (
    STATE,
    VOCAB_SIZE,
    Chunk,
    HashAttention,
    HashModel,
    Window,
    first_seen,
    greedy_answer,
    make_hash_cache,
    prompt_of,
    sampled_answer,
    stored_block,
)
from tests.support.engine.window_texts import check_session_that_goes_back
from tests.support.inputs.random_prompts import prompt_of as text_of
from tests.support.models.family_checkpoints import cases, make_family
from tests.support.models.oracle import Oracle

PROMPT = [5, 9, 2, 7, 1, 4]
WINDOWS = (None, 5)
SIZE = 4
WINDOW = 13
GROUPS = (None, WINDOW, WINDOW)


def test_each_group_has_its_tables_in_one_pool() -> None:
    cache = make_hash_cache(8, 4)
    config = EngineConfig(block_size=4, num_blocks=8, max_model_len=16, kv_cache_specs=specs_of(WINDOWS))
    attention = [HashAttention(cache) for _ in WINDOWS]
    runner = ModelRunner(config, HashModel(WINDOWS), attention, TorchLayerOps(), [cache] * 2, VOCAB_SIZE)
    new = NewRequestData(
        req_id="a", token_ids=PROMPT, num_prompt_tokens=6, num_computed_tokens=0, block_ids=[[3, 1], [0, 5]],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=4),
    )  # fmt: skip
    steps = [
        SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={"a": 6}),
        SchedulerOutput(num_scheduled_tokens={"a": 1}, block_copies=[[(5, 7)]]),
        SchedulerOutput(num_scheduled_tokens={"a": 1}),
        SchedulerOutput(scheduled_cached_reqs=CachedRequestData({"a": [[6], [2]]}), num_scheduled_tokens={"a": 1}),
    ]
    said = []
    for step in steps:
        runner.execute_model(step)
        [[token_id]] = runner.sample_tokens(None).result().sampled_token_ids
        said.append(token_id)
    assert said == greedy_answer(PROMPT, 4, WINDOWS)
    tokens = [*PROMPT, *said][:9]
    for group, table in enumerate(([3, 1, 6], [0, 5, 2])):
        assert cache[table].flatten()[:9].tolist() == stored_block(tokens, 0, group)
    assert cache[7][:2].tolist() == cache[5][:2].tolist()
    assert (cache[4] == make_hash_cache(1, 1)).all()


def run_to_the_end(engine: Harness) -> int:
    """The largest number of blocks in use after a step."""
    most = 0
    while engine.core.has_work:
        engine.step()
        most = max(most, engine.scheduler.pool.num_in_use)
    engine.collect()
    return most


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [5, 64])
def test_only_the_group_without_a_window_keeps_a_long_sequence(make_engine: MakeEngine, chunk: int) -> None:
    engine = make_engine(sliding_window=GROUPS, num_blocks=100, max_num_batched_tokens=chunk, max_model_len=200)
    engine.add(prompt_of(120), "a", params={"max_tokens": 80})
    of_window = -(-(WINDOW - 1 + chunk) // SIZE) + 1
    assert 50 < run_to_the_end(engine) <= 50 + 2 * of_window
    assert engine.answers["a"].token_ids == greedy_answer(prompt_of(120), 80, GROUPS)


def test_a_sequence_of_the_largest_length_fits_alone(make_engine: MakeEngine) -> None:
    fields = {"sliding_window": GROUPS, "max_num_batched_tokens": 8, "block_size": SIZE}
    length = max_sequence_tokens(specs_of(GROUPS), (40,), SIZE, 8)
    assert (length, max_sequence_blocks(specs_of(GROUPS), length, SIZE, 8)) == (112, (40,))
    engine = make_engine(num_blocks=40, max_model_len=length, **fields)
    for name in "ab":
        engine.add(prompt_of(80), name, params={"max_tokens": 32, "temperature": 1.0, "seed": 3}, n=2)
    engine.run()
    for key, index in (("a/0", 0), ("a/1", 1), ("b/0", 0), ("b/1", 1)):
        assert engine.answers[key].token_ids == sampled_answer(prompt_of(80), 32, seed=3, index=index, window=GROUPS)
    assert engine.scheduler.num_preemptions > 0
    with pytest.raises(
        ValueError, match="max_model_len 113 exceeds the pool of 40 blocks of 4 tokens, with 3 KV cache"
    ):
        make_engine(num_blocks=40, max_model_len=length + 1, **fields)


def test_a_hit_is_what_all_groups_have(make_engine: MakeEngine) -> None:
    """A window needs that alone which the next token sees."""
    engine = make_engine(sliding_window=GROUPS, num_blocks=60, max_num_batched_tokens=8, max_model_len=100)
    prompt = prompt_of(60)
    engine.ask(prompt)
    pool, hashes = engine.scheduler.pool, engine.hasher.extend(engine.root, prompt)
    for block_hash in hashes[:10]:
        _forget(engine, with_group_id(block_hash, 1))
    before = engine.model.num_tokens
    answer = engine.ask(prompt)
    assert (answer.num_cached_tokens, engine.model.num_tokens - before) == (56, 4 + 3)
    assert answer.token_ids == greedy_answer(prompt, 4, GROUPS)
    assert engine.ask(prompt[:40]).num_cached_tokens == 0, "a group has lost its last window"
    _forget(engine, with_group_id(hashes[12], 2))
    assert pool.find(hashes[12]) is not None
    assert engine.ask(prompt).num_cached_tokens == 48
    _forget(engine, hashes[3])
    assert engine.ask(prompt).num_cached_tokens == 12


def _forget(engine: Harness, name: bytes) -> None:
    """Make the pool forget one cached block."""
    pool = engine.scheduler.pool
    block = pool.find(name)
    if block is not None:
        pool.num_cached -= 1
        pool._give_up(block)


@pytest.mark.parametrize(
    "windows",
    [(None, 6), (9, 4), (None, 20, 5), (None, None), (None, Chunk(6)), (Chunk(20), Chunk(8)), (None, Chunk(20), 5)],
)
def test_i3_hits_are_those_of_a_search_by_hand(windows: tuple[int | None, ...]) -> None:
    draw = random.Random(5)
    for _ in range(150):
        pool = BlockPool(200)
        hashes = [bytes([number]) * BLOCK_HASH_BYTES for number in range(draw.randint(0, 30))]
        for group in range(len(windows)):
            for block_hash in hashes:
                if draw.random() < 0.85:
                    [block] = pool.allocate(1)
                    pool.remember(block, with_group_id(block_hash, group))

        def needs(group: int, end: int) -> range:
            window = windows[group]
            return range(first_needed(window, end), end)

        ends = [
            end
            for end in range(len(hashes) + 1)
            if all(
                pool.find(with_group_id(hashes[index], group)) is not None
                for group in range(len(windows))
                for index in needs(group, end)
            )
        ]
        found = KVCacheCoordinator(pool, SIZE, specs_of(windows), 8).find_longest_cache_hit(hashes)
        assert [len(blocks) for blocks in found] == [max(ends)] * len(windows)
        for group, blocks in enumerate(found):
            for index, block in enumerate(blocks):
                if index in needs(group, max(ends)):
                    assert block.block_hash == with_group_id(hashes[index], group)
                else:
                    assert block is NULL_BLOCK


def test_only_blocks_of_the_first_group_are_reported() -> None:
    pool, hashes = BlockPool(4), [bytes([number]) * BLOCK_HASH_BYTES for number in range(2)]
    blocks = pool.allocate(4)
    for number, block in enumerate(blocks):
        pool.remember(block, with_group_id(hashes[number // 2], number % 2))
    assert pool.take_changes() == (hashes, [])
    pool.release(blocks)
    assert pool.forget_cached() == 4
    assert pool.take_changes() == ([], hashes)


@pytest.mark.parametrize("kept", [0, 9, 20])
def test_a_session_that_goes_back_behind_its_window_is_computed_again(make_engine: MakeEngine, kept: int) -> None:
    engine = make_engine(sliding_window=GROUPS, num_blocks=80)
    check_session_that_goes_back(engine, GROUPS, kept)


def test_drafts_give_back_the_blocks_of_every_group(make_engine: MakeEngine) -> None:
    engine = make_engine(sliding_window=GROUPS, speculative_config=speculation(5), num_blocks=80, max_model_len=128)
    use_drafter(engine, greedy_drafter(0.6))
    engine.add(prompt_of(30), "r", params={"max_tokens": 90})
    run_to_the_end(engine)
    assert engine.answers["r"].token_ids == greedy_answer(prompt_of(30), 90, GROUPS)


@pytest.mark.parametrize(
    ("windows", "layers"),
    [
        ([512] * 5 + [None], [(5,), (0,), (1,), (2,), (3,), (4,)]),
        ([8, None, 8, None], [(1, 3), (0, 2)]),
        ([8, 8, 8], [(0, 1, 2)]),
        ([None, None], [(0, 1)]),
        ([8, 4, None, 8, 4, None], [(2, 5), (0, 3), (1, 4)]),
        ([8] + [None] * 9, [tuple(range(10))]),
    ],
)
def test_layers_of_equal_windows_are_groups_of_equal_size(
    windows: list[int | None], layers: list[tuple[int, ...]]
) -> None:
    assert list(kv_cache_group_layers(windows)) == layers


def test_groups_are_made_where_they_save_memory() -> None:
    """Gemma 3 with 27 billion parameters: 10 layers of 62 see everything."""
    windows = [None if layer % 6 == 5 else 1024 for layer in range(62)]
    groups = kv_cache_group_layers(windows)
    assert [len(layers) for layers in groups] == [10, 8, 9, 9, 8, 9, 9]
    assert sorted(layer for layers in groups for layer in layers) == list(range(62))
    assert all(len({windows[layer] for layer in layers}) == 1 for layers in groups)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_i1_a_model_with_groups_equals_transformers(
    family: str, tmp_path: Path, make_real_engine: Callable[..., Harness]
) -> None:
    make_family(tmp_path, family, cases(family)[0])
    oracle = Oracle(tmp_path)
    fields = {"num_blocks": 150, "max_num_batched_tokens": 24, "block_size": 8, "max_model_len": 128}
    engine = make_real_engine(tmp_path, hybrid_kv_cache=True, **fields)
    assert len(engine.config.kv_cache_specs) > 1
    prompts = {str(length): text_of(length) for length in (20, 53, 70)}
    for again in range(2):
        for name, prompt in prompts.items():
            engine.add(prompt, f"{name} {again}", params={"max_tokens": 25})
        engine.run()
    for key, answer in engine.answers.items():
        oracle.check(prompts[key.split()[0]], answer.token_ids)
    assert engine.answers["70 1"].num_cached_tokens == 64
    assert engine.scheduler.kv.num_freed_behind_window > 10


@pytest.mark.few(6)
@pytest.mark.diagonal
@pytest.mark.parametrize("length", [3, 12, 13, 16, 47, 48, 49])
@pytest.mark.parametrize("num_cached", [0, 20])
def test_only_what_a_later_token_sees_is_transferred(make_engine: MakeEngine, length: int, num_cached: int) -> None:
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
    seen = num_places - max(num_hit, max(0, length - WINDOW + 1) // SIZE)
    assert len(pair.transfers["r"].landed) == num_places - num_hit + 2 * seen
    assert pair.d.model.num_tokens - before == 39


def test_a_receiver_has_the_beginning_that_it_received_before(make_engine: MakeEngine) -> None:
    """The pool has windows of the end of an earlier prompt alone, and no token after the new prompt sees those at its beginning."""
    fields = {"sliding_window": GROUPS, "max_num_batched_tokens": 16, "num_blocks": 100}
    pair = Pair(make_engine(**fields), make_engine(**fields))
    stem = prompt_of(60)
    for name, prompt in {"a": stem, "b": stem, "c": [*stem, *prompt_of(50)], "d": [*stem[:40], *prompt_of(30)]}.items():
        pair.add(prompt, name)
        pair.run()
        assert pair.answer(name).token_ids == greedy_answer(prompt, 4, GROUPS)
    # beside what is received of the group without a window, the 4 blocks of two windows, of which the first prompt left some
    assert [len(pair.transfers[name].landed) for name in "abcd"] == [15 + 2 * 3, 0, 28 - 15 + 2 * 4, 18 - 10 + 2 * 4]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "windows", [(0,), (0, 13, 13), (9, 4), (0, 0), (0, 64, 3), (0, Chunk(13)), (Chunk(8), Chunk(3)), (0, Chunk(20), 5)]
)
def test_numbers_of_a_transfer_are_places_of_what_a_receiver_may_want(windows: tuple[int, ...]) -> None:
    of_windows = tuple(0 if isinstance(each, Chunk) else each for each in windows)
    of_chunks = tuple(int(each) if isinstance(each, Chunk) else 0 for each in windows)
    for num_tokens in (*range(1, 40), 100, 1000):
        order = TransferOrder.of(of_windows, num_tokens, SIZE, of_chunks if any(of_chunks) else ())
        listed = [
            (group, place)
            for place in range(-(-num_tokens // SIZE))
            for group, window in enumerate(windows or (0,))
            if place >= first_seen(num_tokens + 1, window or None) // SIZE
        ]
        assert len(order) == len(listed)
        assert order.blocks(0, len(order)) == listed
        for first, end in ((1, len(order)), (len(order) // 3, len(order) // 2), (len(order) - 1, len(order))):
            assert order.blocks(first, end) == listed[first:end]
        for place in range(order.num_places + 1):
            assert order.number(place) == sum(of_block < place for _, of_block in listed)
        for number in range(len(order) + 1):
            complete = order.num_complete(number)
            assert all(one in listed[:number] for one in listed if one[1] < complete)
            assert complete == order.num_places or any(
                one not in listed[:number] for one in listed if one[1] <= complete
            )


def test_sources_need_room_for_their_windows_alone(make_engine: MakeEngine) -> None:
    """As many as share a prefix: none stops for a block that another one keeps."""
    fields = {"sliding_window": GROUPS, "max_num_batched_tokens": 8}
    length = max_sequence_tokens(specs_of(GROUPS), (60,), SIZE, 8)
    pair = Pair(make_engine(**fields, num_blocks=60), make_engine(**fields, num_blocks=400))
    assert pair.p.config.max_model_len == length > 60 // len(GROUPS) * SIZE
    stem = prompt_of(40)
    prompts = {f"q{number}": [*stem, *prompt_of(length - 60 + number)] for number in range(6)}
    pair.p.ask(stem, params={"max_tokens": 1})
    for name, prompt in prompts.items():
        pair.add(prompt, name, params={"max_tokens": 3})
    pair.run()
    for name, prompt in prompts.items():
        assert pair.answer(name).token_ids == greedy_answer(prompt, 3, GROUPS)


@pytest.mark.parametrize(("num_blocks", "budget", "chunk"), [(18, 5, 2), (22, 5, 2), (18, 3, 0)])
@pytest.mark.parametrize("lengths", [(22, 39, 9), (39, 22, 9)])
def test_wanted_sources_with_states_do_not_wait_for_each_other(
    make_engine: MakeEngine, lengths: tuple[int, ...], num_blocks: int, budget: int, chunk: int
) -> None:
    """Each has the blocks of its keys from the beginning, and needs a second one for states, before it frees the first."""
    window: Window = (None, STATE)
    p = make_engine(
        sliding_window=window,
        num_blocks=num_blocks,
        max_model_len=40,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=chunk,
    )
    pair = Pair(p, make_engine(sliding_window=window))
    for length in lengths:
        pair.add(prompt_of(length), f"r{length}", params={"max_tokens": 1 if length == 39 else 2})
    pair.run(300)
    for length in lengths:
        answer = pair.answer(f"r{length}").token_ids
        assert answer == greedy_answer(prompt_of(length), len(answer), window)


def test_blocks_that_a_token_sees_come_back_from_host_memory(make_engine: MakeEngine) -> None:
    fields = {"sliding_window": GROUPS, "max_num_batched_tokens": 8, "num_blocks": 30, "max_model_len": 70}
    engine = make_engine(**fields, num_host_blocks=(200,))
    for length in (60, 61, 62, 60):
        before = engine.model.num_tokens
        answer = engine.ask(prompt_of(length))
        assert answer.token_ids == greedy_answer(prompt_of(length), 4, GROUPS)
    # 14 blocks of the group without a window, and of each other one the 3 that the next token sees
    tier = engine.scheduler.pool.tier
    assert tier is not None
    assert (tier.num_loaded, answer.num_cached_tokens) == (14 + 2 * 3, 56)
    assert engine.model.num_tokens - before == 4 + 3


def longest_beginning(windows: tuple[int | None, ...], hashes: list[bytes], known: Callable[[bytes], bool]) -> int:
    """Blocks of the longest beginning of which `known` has the name of all that the next token sees."""
    return max(
        end
        for end in range(len(hashes) + 1)
        if all(
            known(with_group_id(hashes[index], group))
            for group, window in enumerate(windows)
            for index in range(first_needed(window, end), end)
        )
    )


def first_needed(window: int | None, end: int) -> int:
    return 0 if end == 0 else min(first_seen(end * SIZE + 1, window) // SIZE, end - 1)


@pytest.mark.parametrize(
    "windows",
    [
        (None, 6),
        (9, 4),
        (None, 20, 5),
        (None, None),
        (None, Chunk(6)),
        (Chunk(20), Chunk(8)),
        (None, Chunk(20), 5),
        (None, STATE),
        (None, 9, STATE),
    ],
)
def test_i3_hits_of_pool_and_tier_together_are_those_of_a_search_by_hand(windows: tuple[int | None, ...]) -> None:
    draw = random.Random(7)
    num_longer = 0
    for _ in range(200):
        pool, hashes = BlockPool(200), [bytes([number]) * BLOCK_HASH_BYTES for number in range(draw.randint(0, 20))]
        names = [with_group_id(block_hash, group) for group in range(len(windows)) for block_hash in hashes]
        in_pool = {name for name in names if draw.random() < 0.6}
        in_tier = {name for name in names if draw.random() < 0.7}
        for name, block in zip(in_pool, pool.allocate(len(in_pool)), strict=True):
            pool.remember(block, name)
        coordinator = KVCacheCoordinator(pool, SIZE, specs_of(windows), 8)
        computed = coordinator.find_longest_cache_hit(hashes)
        found = coordinator.extended(hashes, computed, in_tier.__contains__)
        end = longest_beginning(windows, hashes, (in_pool | in_tier).__contains__)
        assert [len(blocks) for blocks in found] == [end] * len(windows)
        if end == len(computed[0]):
            continue
        num_longer += 1
        for group, (window, blocks) in enumerate(zip(windows, found, strict=True)):
            first = first_needed(window, end)
            expected = [pool.find(with_group_id(block_hash, group)) for block_hash in hashes[first:end]]
            assert list(blocks) == [*[NULL_BLOCK] * first, *expected]
    assert num_longer > 30
