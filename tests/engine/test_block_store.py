"""The store below host memory: blocks come back from a disk, also after a restart, and the texts are those without it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.store_tier import StoreTier
from pdserve.engine.ranks.rank_messages import DiskOptions
from pdserve.engine.request import RequestStatus
from pdserve.engine.scheduler import read_times
from pdserve.engine.scheduler.scheduler import Scheduler
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.faulty_store import announced, faulty_store, lies
from tests.support.engine.hash_model import STATE, Chunk, greedy_answer, prompt_of, sampled_answer

TINY: dict[str, Any] = {"num_blocks": 12, "num_host_blocks": (8,), "max_model_len": 48, "block_size": 4}
"""A pool of 48 tokens, and host memory for 32."""
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def slow_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash model is faster than a disk: its blocks would not be read."""
    monkeypatch.setattr(Scheduler, "_compute_s", lambda self, num_tokens: 3600.0 * num_tokens)


@pytest.fixture
def store(tmp_path: Path) -> DiskOptions:
    return DiskOptions(str(tmp_path), 1 << 20, KEY)


def books(engine: Harness) -> StoreTier:
    store = engine.scheduler.pool.store
    assert store is not None
    return store


def fill(engine: Harness, *lengths: int) -> None:
    """Serve prompts that have no prefix in common, one after the other: each takes pool and host memory from the one before."""
    for length in lengths:
        assert engine.ask(prompt_of(length)).token_ids == greedy_answer(prompt_of(length), 4)
        engine.run()


def serve(engine: Harness, length: int) -> None:
    """The same for one prompt, without waiting for writes."""
    engine.add(prompt_of(length), f"p{length}")
    while engine.scheduler.requests:
        engine.step()
    assert engine.collect()[f"p{length}"].token_ids == greedy_answer(prompt_of(length), 4)


def test_a_prompt_comes_back_from_the_disk(make_engine: MakeEngine, store: DiskOptions) -> None:
    engine = make_engine(**TINY, store=store)
    fill(engine, 30, 31, 32, 33)
    before = engine.model.num_tokens
    answer = engine.ask(prompt_of(30))
    assert answer.token_ids == greedy_answer(prompt_of(30), 4)
    assert (books(engine).num_read, answer.num_cached_tokens) == (7, 28)
    assert engine.model.num_tokens - before == 2 + 3
    assert books(engine).num_hit_tokens == 28


@pytest.mark.parametrize("windows", [(None, STATE), (None, 5), (None, Chunk(8)), (None, 9, STATE)])
def test_blocks_of_every_shape_come_back(
    make_engine: MakeEngine, store: DiskOptions, windows: tuple[int | None, ...]
) -> None:
    shapes = tuple(range(len(windows)))
    few = tuple(3 if window == STATE else 8 for window in windows[1:])
    engine = make_engine(
        **TINY | {"num_other_blocks": few, "num_host_blocks": (8,) * len(shapes), "max_num_batched_tokens": 8},
        sliding_window=windows, shapes=shapes, store=store,
    )  # fmt: skip
    for length in (30, 31, 32, 33, 30):
        assert engine.ask(prompt_of(length)).token_ids == greedy_answer(prompt_of(length), 4, windows)
        engine.run()
    assert engine.answers  # of the last prompt, most was known
    assert books(engine).num_read > 7
    assert books(engine).num_failed == 0


def test_blocks_are_there_after_a_restart(make_engine: MakeEngine, store: DiskOptions) -> None:
    first = make_engine(**TINY, store=store)
    fill(first, 30, 31, 32, 33)
    first.core.executor.close()
    second = make_engine(**TINY, store=store)
    stored, removed = second.scheduler.pool.take_changes()
    assert set(second.hasher.extend(second.root, prompt_of(30))) <= set(stored)
    assert removed == []
    assert second.ask(prompt_of(30)).num_cached_tokens == 28
    assert second.answers.popitem()[1].token_ids == greedy_answer(prompt_of(30), 4)


def test_another_key_finds_nothing_whole(make_engine: MakeEngine, store: DiskOptions) -> None:
    """Who can write into the folder has no key, so nothing of theirs becomes visible."""
    first = make_engine(**TINY, store=store)
    fill(first, 30, 31, 32, 33)
    first.core.executor.close()
    second = make_engine(**TINY, store=DiskOptions(store.folder, store.max_bytes, bytes(32)))
    fill(second, 30)
    assert (books(second).num_read, books(second).num_failed) == (0, 7)


def test_every_text_is_that_of_an_engine_without_a_store(make_engine: MakeEngine, store: DiskOptions) -> None:
    with_store, without = make_engine(**TINY, store=store), make_engine(**TINY | {"num_host_blocks": ()})
    for engine in (with_store, without):
        for _ in range(3):
            for length in (9, 17, 25, 33, 34, 35):
                engine.add(prompt_of(length), params={"max_tokens": 9})
            engine.run()
    assert {name: answer.token_ids for name, answer in with_store.answers.items()} == {
        name: answer.token_ids for name, answer in without.answers.items()
    }
    assert books(with_store).num_read > 0
    assert with_store.model.num_tokens < without.model.num_tokens


@pytest.mark.parametrize("lie", lies(random.Random(0)))
def test_what_a_store_gets_wrong_is_computed_again(make_engine: MakeEngine, store: DiskOptions, lie: str) -> None:
    engine = make_engine(**TINY, store=store)
    faulty = faulty_store(engine)
    fill(engine, 30, 31, 32, 33)
    faulty.fault = lies(random.Random(1))[lie]
    for length in (30, 31, 32, 30, 31):
        fill(engine, length)
    assert faulty.num_faults > 0
    assert books(engine).num_failed > 0
    failed = engine.hasher.extend(engine.root, prompt_of(30))[0]
    faulty.fault = None
    fill(engine, 33, 34, 30)
    assert failed in engine.scheduler.pool._by_hash


@pytest.mark.parametrize("num_faults", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_i15_no_wrong_answer_is_ever_visible(make_engine: MakeEngine, store: DiskOptions, num_faults: int) -> None:
    """Missing, damaged, truncated, swapped and forged blocks, and errors, among right ones."""
    engine, draws = make_engine(**TINY, store=store), random.Random(num_faults)
    faulty = faulty_store(engine)
    faults = lies(draws)
    prompts = [[*prompt_of(length), number] for length in (26, 30, 34) for number in range(4)]
    expected = [greedy_answer(prompt, 4) for prompt in prompts]
    while faulty.num_faults < num_faults:
        faulty.fault = draws.choice([None, *faults.values()])
        number = draws.randrange(len(prompts))
        assert engine.ask(prompts[number], salt=draws.choice(["", "a"])).token_ids == expected[number]
    assert books(engine).num_read > num_faults // 10


def test_only_blocks_from_the_wrong_one_on_are_computed(make_engine: MakeEngine, store: DiskOptions) -> None:
    engine = make_engine(**TINY, store=store)
    faulty = faulty_store(engine)
    fill(engine, 30, 31, 32, 33)
    wrong = engine.hasher.extend(engine.root, prompt_of(30))[4]
    faulty.fault = lambda name, data, digest: None if name == wrong else digest
    answer = engine.ask(prompt_of(30))
    assert answer.token_ids == greedy_answer(prompt_of(30), 4)
    assert answer.num_cached_tokens == 16


def test_a_store_that_hangs_delays_nobody_for_long(
    make_engine: MakeEngine, store: DiskOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_times, "FIRST_LIMIT_S", 0.2)
    engine = make_engine(**TINY | {"num_blocks": 24}, store=store)
    faulty = faulty_store(engine)
    fill(engine, 30, 31, 32, 33, 34)
    faulty.goes_on.clear()
    engine.add(prompt_of(30), "waits", params={"max_tokens": 4})
    engine.step()
    assert engine.scheduler.requests["waits"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    began_at = time.monotonic()
    while "waits" in engine.scheduler.requests:
        engine.step()
        assert time.monotonic() < began_at + 2 * 0.2 + 1.0
    assert engine.collect()["waits"].token_ids == greedy_answer(prompt_of(30), 4)
    assert engine.scheduler.holds.num_quarantined == 7
    # it is not asked again before it answers
    engine.add(prompt_of(31), "computes", params={"max_tokens": 4})
    engine.step()
    assert engine.scheduler.requests["computes"].status is RequestStatus.RUNNING
    faulty.goes_on.set()
    engine.run()
    assert engine.scheduler.holds.num_quarantined == 0
    assert engine.answers["computes"].token_ids == greedy_answer(prompt_of(31), 4)


def test_a_store_that_is_slower_than_the_model_is_not_read(make_engine: MakeEngine, store: DiskOptions) -> None:
    engine = make_engine(**TINY, store=store)
    fill(engine, 30, 31, 32, 33)
    engine.scheduler.loads._read_times.add(1, 1e9)
    fill(engine, 30)
    assert books(engine).num_read == 0
    # it may have become faster
    engine.scheduler.loads._read_times.last_at -= read_times.FRESH_S
    fill(engine, 31)
    assert books(engine).num_read == 7


@pytest.mark.parametrize("lie", ["", "flipped"])
def test_a_preempted_sequence_resumes(make_engine: MakeEngine, store: DiskOptions, lie: str) -> None:
    engine = make_engine(**TINY | {"num_host_blocks": (4,)}, max_num_seqs=4, store=store)
    faulty = faulty_store(engine)
    faulty.fault = lies(random.Random(1)).get(lie)
    for length in (10, 11, 12, 13):
        engine.add(prompt_of(length), f"p{length}", params={"max_tokens": 30}, local_prefill_tokens=13)
    answers = engine.run()
    for length in (10, 11, 12, 13):
        assert answers[f"p{length}"].token_ids == greedy_answer(prompt_of(length), 30)
    assert engine.scheduler.num_preemptions > 0


def test_i13_an_abort_keeps_blocks_until_the_read_has_ended(make_engine: MakeEngine, store: DiskOptions) -> None:
    engine = make_engine(**TINY, store=store)
    faulty = faulty_store(engine)
    fill(engine, 30, 31, 32, 33)
    faulty.goes_on.clear()
    engine.add(prompt_of(30), "a")
    engine.step()
    engine.core.abort_request("a")
    assert engine.scheduler.pool.num_in_use == engine.scheduler.holds.num_quarantined == 7
    assert engine.core.has_work
    for length in (5, 6, 7, 8):
        engine.add(prompt_of(length))
    for _ in range(20):
        engine.step()
    faulty.goes_on.set()
    engine.run()
    assert engine.answers["a"].finish_reason is FinishReason.ABORT
    assert engine.scheduler.holds.num_quarantined == 0
    fill(engine, 30)


def test_a_fork_continues_after_a_prompt_that_was_read(make_engine: MakeEngine, store: DiskOptions) -> None:
    engine = make_engine(**TINY, store=store)
    fill(engine, 22, 31, 32, 33)
    answers = engine.ask_many(prompt_of(22), 3, params={"temperature": 1.0, "seed": 5, "max_tokens": 6})
    assert [answer.token_ids for answer in answers] == [
        sampled_answer(prompt_of(22), 6, seed=5, index=index) for index in range(3)
    ]
    assert books(engine).num_read == 5


def test_salts_do_not_share_the_store(make_engine: MakeEngine, store: DiskOptions) -> None:
    engine = make_engine(**TINY, store=store)
    engine.ask(prompt_of(30), salt="a")
    fill(engine, 31, 32, 33)
    assert engine.ask(prompt_of(30), salt="b").num_cached_tokens == 0
    assert books(engine).num_read == 0
    fill(engine, 31, 32, 33)
    assert engine.ask(prompt_of(30), salt="a").num_cached_tokens == 28


def test_forget_cached_clears_the_store(make_engine: MakeEngine, store: DiskOptions) -> None:
    engine = make_engine(**TINY, store=store)
    fill(engine, 30, 31, 32, 33)
    engine.scheduler.pool.take_changes()
    engine.scheduler.pool.forget_cached()
    assert len(books(engine)) == 0
    assert engine.ask(prompt_of(30)).num_cached_tokens == 0
    engine.run()
    engine.core.executor.close()
    again = make_engine(**TINY, store=store)
    assert again.ask(prompt_of(31)).num_cached_tokens == 0


def test_a_block_that_is_being_written_is_forgotten_too(make_engine: MakeEngine, store: DiskOptions) -> None:
    engine = make_engine(**TINY, store=store)
    faulty = faulty_store(engine)
    faulty.goes_on.clear()
    for length in (30, 31):
        serve(engine, length)
    assert len(books(engine).pins) == 2  # a quarter of host memory
    engine.scheduler.pool.forget_cached()
    faulty.goes_on.set()
    engine.run()
    assert len(books(engine)) == 0
    assert books(engine).pins == []


def test_writes_that_fail_cost_nothing(make_engine: MakeEngine, store: DiskOptions) -> None:
    engine = make_engine(**TINY, store=store)
    faulty = faulty_store(engine)
    faulty.loses_writes = True
    fill(engine, 30, 31, 32, 33, 30)
    assert (len(books(engine)), books(engine).num_written) == (0, 0)
    assert books(engine).num_lost > 0


def test_slow_writes_hold_a_quarter_of_host_memory(make_engine: MakeEngine, store: DiskOptions) -> None:
    engine = make_engine(**TINY, store=store)
    faulty = faulty_store(engine)
    faulty.goes_on.clear()
    for length in (30, 31, 32, 33):
        serve(engine, length)
        assert len(books(engine).pins) <= 2
    faulty.goes_on.set()
    engine.run()
    assert books(engine).pins == []


def test_hashes_are_known_while_pool_or_tier_has_them(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(**TINY | {"num_host_blocks": (3,)}, store=DiskOptions(str(tmp_path), 1700, KEY))
    faulty = faulty_store(engine)
    for known in announced(engine, faulty):
        pool, tier = engine.scheduler.pool, engine.scheduler.pool.tier
        assert tier is not None
        assert known == pool._by_hash.keys() | tier._slots.keys() | books(engine)._names.keys()
    assert books(engine).num_read > 0
    assert books(engine).num_lost > 0
    assert books(engine).num_failed > 0


def test_a_store_needs_host_memory() -> None:
    with pytest.raises(ValueError, match="has_block_store is True, which needs num_host_blocks"):
        EngineConfig(has_block_store=True)
