"""The host-memory tier: blocks that the pool reused come back from host memory, and the texts are those without it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.block_pool import with_group_id
from pdserve.engine.kv_cache.host_tier import HostTier, TierCorrupt
from pdserve.engine.request import RequestStatus
from tests.support.engine.copied_blocks import CopiedBlocks
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import HEAD, STATE, Chunk, Window, greedy_answer, prompt_of, sampled_answer

TINY: dict[str, Any] = {"num_blocks": 12, "num_host_blocks": (40,), "max_model_len": 48, "block_size": 4}
"""A pool of 48 tokens."""


def fill(engine: Harness, *lengths: int) -> None:
    """Serve prompts that have no prefix in common, one after the other: each takes the pool from the one before."""
    for length in lengths:
        assert engine.ask(prompt_of(length)).token_ids == greedy_answer(prompt_of(length), 4)


def num_loaded(engine: Harness) -> int:
    assert engine.scheduler.pool.tier is not None
    return engine.scheduler.pool.tier.num_loaded


def test_a_prompt_comes_back_from_host_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY)
    fill(engine, 30, 31, 32)
    assert num_loaded(engine) == 0
    before = engine.model.num_tokens
    answer = engine.ask(prompt_of(30))
    assert answer.token_ids == greedy_answer(prompt_of(30), 4)
    # 7 full blocks of 4 tokens; then the 2 tokens after them, and 3 of the answer
    assert (num_loaded(engine), answer.num_cached_tokens) == (7, 28)
    assert engine.model.num_tokens - before == 2 + 3


@pytest.mark.parametrize(
    ("windows", "num_loaded"),
    [((None, STATE), (7, 1)), ((None, 5), (7, 1)), ((None, Chunk(8)), (7, 1)), ((None, 9, STATE), (7, 2, 1))],
)
def test_blocks_of_every_shape_come_back(
    make_engine: MakeEngine, windows: tuple[int | None, ...], num_loaded: tuple[int, ...]
) -> None:
    """7 full blocks of 4 tokens of the first group, and of each other one those that the next token sees."""
    engine = make_engine(**of_shapes(windows))
    copied = CopiedBlocks(engine.core)
    for length in (30, 31, 32):
        assert engine.ask(prompt_of(length)).token_ids == greedy_answer(prompt_of(length), 4, windows)
    assert set(copied.loaded) == {0}
    before = engine.model.num_tokens
    answer = engine.ask(prompt_of(30))
    assert answer.token_ids == greedy_answer(prompt_of(30), 4, windows)
    assert (copied.loaded, answer.num_cached_tokens) == (num_loaded, 28)
    assert engine.model.num_tokens - before == 2 + 3
    tier = engine.scheduler.pool.tier
    assert tier is not None
    assert sum(copied.stored) == tier.num_stored
    assert all(0 < used <= total for used, total in zip(tier.num_used, tier.num_slots, strict=True))


def of_shapes(windows: tuple[int | None, ...]) -> dict[str, Any]:
    """An engine whose groups have a shape each, and small pools for all but the first."""
    shapes = tuple(range(len(windows)))
    few: dict[int | None, int] = {STATE: 3, HEAD: 12}
    others = tuple(few.get(window, 8) for window in windows[1:])
    slots = (40,) * len(shapes)
    return TINY | {
        "sliding_window": windows, "shapes": shapes, "num_other_blocks": others, "num_host_blocks": slots,
        "max_num_batched_tokens": 8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("windows", "lost", "num_cached"),
    [
        ((None, STATE), [], 28),
        ((None, STATE), [(1, 6)], 24),
        ((None, STATE), [(1, 6), (1, 5)], 16),
        ((None, STATE), [(0, 6)], 24),
        ((None, STATE), [(0, 3)], 8),
        ((None, STATE), [(0, 0)], 0),
        ((None, 5), [(1, 6)], 24),
        ((None, 5), [(1, 5)], 28),
        ((None, 5), [(0, 5)], 20),
        ((None, 9, STATE), [(1, 6), (2, 5)], 16),
        ((None, 9, STATE), [(2, 6), (1, 5), (1, 4)], 16),
        ((None, HEAD), [(1, 4)], 16),
    ],
)
def test_a_hit_ends_where_each_group_has_its_blocks(
    make_engine: MakeEngine, windows: tuple[int | None, ...], lost: list[tuple[int, int]], num_cached: int
) -> None:
    """Steps end after 8, 16, 24 and 28 tokens, so there are states there. lost: (group, place)."""
    model: Window = windows[:-1] if windows[-1] == HEAD else windows
    engine = make_engine(**of_shapes(windows))
    for length in (30, 31, 32, 33):
        engine.ask(prompt_of(length))
    hashes = engine.hasher.extend(engine.root, prompt_of(30))
    for group, place in lost:
        lose(engine, with_group_id(hashes[place], group))
    answer = engine.ask(prompt_of(30))
    assert answer.token_ids == greedy_answer(prompt_of(30), 4, model)
    assert answer.num_cached_tokens == num_cached
    if num_cached:
        assert num_loaded(engine) > 0


def lose(engine: Harness, name: bytes) -> None:
    """Make the tier forget a block, which the pool does not have."""
    pool, tier = engine.scheduler.pool, engine.scheduler.pool.tier
    assert tier is not None
    assert pool.find(name) is None
    shape, row = tier._slots.pop(name)
    tier._names[shape].remove(name)
    tier._free[shape].append((shape, row))


def test_a_tier_with_one_slot_for_states_keeps_the_last(make_engine: MakeEngine) -> None:
    """What it keeps of the other shape is of no use without a state."""
    windows = (None, STATE)
    engine = make_engine(**of_shapes(windows) | {"num_host_blocks": (40, 1)})
    copied = CopiedBlocks(engine.core)
    for length in (30, 31, 30, 31, 30, 31, 32, 30):
        assert engine.ask(prompt_of(length)).token_ids == greedy_answer(prompt_of(length), 4, windows)
    tier = engine.scheduler.pool.tier
    assert tier is not None
    assert tier.num_used[1] == 1
    assert copied.stored[1] > 1


@pytest.mark.parametrize("shape", [0, 1])
def test_slots_of_one_shape_are_given_up_for_blocks_of_that_shape(shape: int) -> None:
    tier = HostTier(2, 1)
    other = 1 - shape
    tier.keep(b"other", other, 9)
    for number in range(4):
        tier.keep(bytes([number]), shape, number)
    assert [tier.num_used[shape], tier.num_used[other]] == [tier.num_slots[shape], 1]
    assert b"other" in tier
    kept = [number for number in range(4) if bytes([number]) in tier]
    assert kept == list(range(4 - tier.num_slots[shape], 4))
    stores = tier.take_stores()
    assert sorted(row for row, _ in stores[shape]) == kept
    assert stores[other] == [(9, 0)]
    [slot] = tier.pin([b"other"])
    assert slot == (other, 0)
    with pytest.raises(TierCorrupt, match="are pinned, loads read"):
        tier.check(Counter())
    tier.unpin([slot])
    tier.check(Counter())
    tier._free[shape].append((shape, 0))
    with pytest.raises(TierCorrupt, match=f"slots of shape {shape} are in use"):
        tier.check(Counter())


def test_every_text_is_that_of_an_engine_without_a_tier(make_engine: MakeEngine) -> None:
    with_tier, without = make_engine(**TINY), make_engine(**TINY | {"num_host_blocks": ()})
    for engine in (with_tier, without):
        for _ in range(3):
            for length in (9, 17, 25, 33):
                engine.add(prompt_of(length), params={"max_tokens": 9})
        engine.run()
    assert {name: answer.token_ids for name, answer in with_tier.answers.items()} == {
        name: answer.token_ids for name, answer in without.answers.items()
    }
    assert with_tier.model.num_tokens < without.model.num_tokens
    assert num_loaded(with_tier) > 0


def test_steps_of_others_do_not_wait_for_a_load(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY | {"num_blocks": 20})
    fill(engine, 30, 31, 32, 33)
    held = engine.hold_loads()
    engine.add(prompt_of(30), "loads")
    engine.step()
    assert engine.scheduler.requests["loads"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.add(prompt_of(10), "runs")
    for _ in range(6):
        engine.step()
    assert engine.collect()["runs"].token_ids == greedy_answer(prompt_of(10), 4)
    assert "loads" not in engine.answers
    held.release()
    assert engine.run()["loads"].token_ids == greedy_answer(prompt_of(30), 4)


def test_i13_an_abort_keeps_blocks_and_slots_until_the_load_has_ended(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY | {"num_host_blocks": (9,)})
    fill(engine, 30, 31)
    held = engine.hold_loads()
    engine.add(prompt_of(30), "a")
    engine.step()
    [[by_shape]] = [load.kv_loads.values() for load in held.held.values()]
    num_blocks = len(by_shape[0])
    engine.core.abort_request("a")
    assert engine.scheduler.pool.num_in_use == engine.scheduler.holds.num_quarantined == num_blocks > 0
    assert engine.core.has_work
    # what others need is taken elsewhere, in pool and tier: `HeldLoads` compares the bytes
    for length in (5, 6, 7, 8):
        engine.add(prompt_of(length))
    for _ in range(20):
        engine.step()
    held.release()
    engine.run()
    assert engine.answers["a"].finish_reason is FinishReason.ABORT
    assert engine.scheduler.holds.num_quarantined == 0
    held.holds = False
    fill(engine, 30)


def test_a_preempted_sequence_resumes_from_the_tier(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY, max_num_seqs=4)
    for length in (10, 11, 12, 13):
        engine.add(prompt_of(length), f"p{length}", params={"max_tokens": 30})
    answers = engine.run()
    for length in (10, 11, 12, 13):
        assert answers[f"p{length}"].token_ids == greedy_answer(prompt_of(length), 30)
    assert engine.scheduler.num_preemptions > 0
    assert num_loaded(engine) > 0


def test_a_fork_continues_after_a_loaded_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY)
    fill(engine, 22, 31, 32)
    answers = engine.ask_many(prompt_of(22), 3, params={"temperature": 1.0, "seed": 5, "max_tokens": 6})
    assert [answer.token_ids for answer in answers] == [
        sampled_answer(prompt_of(22), 6, seed=5, index=index) for index in range(3)
    ]
    assert num_loaded(engine) == 5


def test_a_session_whose_blocks_were_taken_continues_from_the_tier(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY)
    first = prompt_of(20)
    engine.add(first, "s", resumable=True)
    engine.run()
    fill(engine, 31, 32)
    assert engine.scheduler.requests["s"].num_computed_tokens == 0
    loaded = num_loaded(engine)
    engine.resume("s", [1, 2, 3])
    engine.run()
    tokens = [*first, *greedy_answer(first, 4), 1, 2, 3]
    assert [turn.token_ids for turn in engine.turns["s"]] == [tokens[20:24], greedy_answer(tokens, 4)]
    assert num_loaded(engine) > loaded
    engine.core.finish_session("s")


def test_a_turn_that_ends_while_its_blocks_are_loaded_loses_them(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY | {"num_blocks": 12}, max_num_seqs=3)
    held = engine.hold_loads()
    engine.add(prompt_of(12), "s", resumable=True, priority=1, params={"max_tokens": 30})
    for length in (13, 14):
        engine.add(prompt_of(length), f"p{length}", params={"max_tokens": 26})
    session = engine.scheduler.requests["s"]
    for _ in range(200):
        engine.step()
        if engine.scheduler.loads.is_waited_for(session):
            break
        held.release([load_id for load_id in held.held if not engine.scheduler.loads.is_waited_for(session)])
    assert engine.scheduler.loads.is_waited_for(session), "it was not preempted, or its blocks stayed in the pool"
    engine.core.scheduler.end_sequence("s", 0)
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert session.num_computed_tokens == 0
    tokens = list(session.token_ids)
    engine.resume("s", [5, 6])
    for _ in range(200):
        engine.step()
        held.release()
    assert engine.collect()
    assert engine.turns["s"][1].token_ids == greedy_answer([*tokens, 5, 6], 4)
    engine.core.finish_session("s")


def test_a_tier_smaller_than_a_sequence_keeps_its_beginning(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY | {"num_host_blocks": (3,)})
    fill(engine, 40, 43)
    before = engine.model.num_tokens
    fill(engine, 40)
    assert num_loaded(engine) == 3
    assert engine.model.num_tokens - before == 40 - 12 + 3


def test_a_tier_of_one_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY | {"num_host_blocks": (1,)})
    fill(engine, 40, 41, 40, 41, 30, 31)
    assert num_loaded(engine) > 0


def test_salts_do_not_share_the_tier(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY)
    engine.ask(prompt_of(30), salt="a")
    fill(engine, 31, 32)
    assert engine.ask(prompt_of(30), salt="b").num_cached_tokens == 0
    assert num_loaded(engine) == 0
    fill(engine, 31, 32)
    assert engine.ask(prompt_of(30), salt="a").num_cached_tokens == 28


def test_prompt_logprobs_read_nothing_from_the_tier(make_engine: MakeEngine) -> None:
    # the hash model has a hidden state for the last token of a chunk
    engine = make_engine(**TINY, long_prefill_token_threshold=1)
    fill(engine, 30, 31, 32)
    loaded = num_loaded(engine)
    assert engine.ask(prompt_of(30), params={"prompt_logprobs": 1}).num_cached_tokens == 0
    assert num_loaded(engine) == loaded


def test_forget_cached_forgets_the_tier(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY)
    fill(engine, 30, 31, 32)
    engine.scheduler.pool.take_changes()
    engine.scheduler.pool.forget_cached()
    assert engine.ask(prompt_of(30)).num_cached_tokens == 0
    assert num_loaded(engine) == 0


def test_a_tier_needs_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match=r"num_host_blocks is \(8,\), which needs enable_prefix_caching"):
        EngineConfig(num_host_blocks=(8,), enable_prefix_caching=False)


def test_sequences_with_one_prefix_load_it_once(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY)
    fill(engine, 30, 31, 32)
    for number in range(3):
        engine.add([*prompt_of(30)[:20], number], f"r{number}x")
    answers = engine.run()
    for number in range(3):
        assert answers[f"r{number}x"].token_ids == greedy_answer([*prompt_of(30)[:20], number], 4)
    assert num_loaded(engine) == 5


def test_hashes_are_known_while_pool_or_tier_has_them(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY | {"num_host_blocks": (6,)})
    known: set[bytes] = set()
    for length in (30, 31, 32, 30, 17, 31):
        engine.add(prompt_of(length))
        while engine.core.has_work:
            outputs = engine.core.step()
            assert known.isdisjoint(outputs.blocks_stored)
            assert known.issuperset(outputs.blocks_removed)
            known = (known | set(outputs.blocks_stored)) - set(outputs.blocks_removed)
            pool, tier = engine.scheduler.pool, engine.scheduler.pool.tier
            assert tier is not None
            assert known == pool._by_hash.keys() | tier._slots.keys()
