"""A store below host memory that engines share: a lookup finds what another one has written, and nothing wrong gets through."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache import store_tier
from pdserve.engine.kv_cache.store_tier import StoreTier
from pdserve.engine.request import RequestStatus, Wait
from pdserve.engine.scheduler import read_times, store_lookups
from pdserve.engine.scheduler.scheduler import Scheduler
from tests.support.engine.drafters import speculation
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.faulty_store import announced, faulty_store, lies, wrong_finds
from tests.support.engine.hash_model import STATE, Chunk, greedy_answer, prompt_of, sampled_answer
from tests.support.engine.late_grammars import LateCompiler, random_form
from tests.support.engine.shared_store import SharedBlocks

TINY: dict[str, Any] = {"num_blocks": 12, "num_host_blocks": (8,), "max_model_len": 48, "block_size": 4}
"""A pool of 48 tokens, and host memory for 32."""


@pytest.fixture(autouse=True)
def slow_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash model is faster than any store: its blocks would not be read."""
    monkeypatch.setattr(Scheduler, "_compute_s", lambda self, num_tokens: 3600.0 * num_tokens)


@pytest.fixture
def blocks() -> SharedBlocks:
    return SharedBlocks()


def books(engine: Harness) -> StoreTier:
    store = engine.scheduler.pool.store
    assert store is not None
    return store


def fill(engine: Harness, *lengths: int) -> None:
    """Serve prompts that have no prefix in common, one after the other: each takes pool and host memory from the one before."""
    for length in lengths:
        assert engine.ask(prompt_of(length)).token_ids == greedy_answer(prompt_of(length), 4)
        engine.run()


@pytest.fixture
def written(make_engine: MakeEngine, blocks: SharedBlocks) -> SharedBlocks:
    """What an engine has written of the prompts of 30 and 31 tokens."""
    fill(make_engine(**TINY, store=blocks), 30, 31, 32, 33)
    return blocks


def test_what_one_engine_has_written_another_one_reads(make_engine: MakeEngine, written: SharedBlocks) -> None:
    engine = make_engine(**TINY, store=written)
    assert len(books(engine)) == 0
    answer = engine.ask(prompt_of(30))
    assert answer.token_ids == greedy_answer(prompt_of(30), 4)
    assert (answer.num_cached_tokens, engine.model.num_tokens) == (28, 2 + 3)
    assert (books(engine).num_found, books(engine).num_read, books(engine).num_failed) == (7, 7, 0)


@pytest.mark.parametrize("windows", [(None, STATE), (None, 5), (None, Chunk(8)), (None, 9, STATE)])
def test_blocks_of_every_shape_are_found(
    make_engine: MakeEngine, blocks: SharedBlocks, windows: tuple[int | None, ...]
) -> None:
    shapes = tuple(range(len(windows)))
    few = tuple(3 if window == STATE else 8 for window in windows[1:])
    fields = TINY | {
        "num_other_blocks": few,
        "num_host_blocks": (8,) * len(shapes),
        "max_num_batched_tokens": 8,
        "sliding_window": windows,
        "shapes": shapes,
        "store": blocks,
    }
    for number in range(2):
        engine = make_engine(**fields)
        for length in (30, 31, 32, 33)[: 4 - 2 * number]:
            assert engine.ask(prompt_of(length)).token_ids == greedy_answer(prompt_of(length), 4, windows)
            engine.run()
        assert (books(engine).num_read > 7) is (number == 1)
        assert books(engine).num_failed == 0


def test_a_request_waits_for_its_lookup_only(make_engine: MakeEngine, written: SharedBlocks) -> None:
    engine = make_engine(**TINY | {"num_blocks": 40}, store=written)
    faulty = faulty_store(engine)
    engine.add(prompt_of(9), "runs", params={"max_tokens": 30})
    engine.step()
    engine.step()
    faulty.goes_on.clear()
    engine.add(prompt_of(30), "waits")
    engine.step()
    waiting = engine.scheduler.requests["waits"]
    assert (waiting.status, waiting.waits_for) == (RequestStatus.WAITING_FOR_REMOTE_KVS, {Wait.LOOKUP})
    assert engine.scheduler.pool.num_in_use == engine.scheduler.kv.num_blocks(engine.scheduler.requests["runs"])
    assert engine.core.stats().num_remote_kv_reqs == 1
    before = engine.scheduler.requests["runs"].num_output_tokens
    engine.step()
    assert engine.scheduler.requests["runs"].num_output_tokens > before
    faulty.goes_on.set()
    engine.run()
    assert engine.answers["waits"].num_cached_tokens == 28


def test_nothing_is_looked_up_that_is_here(make_engine: MakeEngine, blocks: SharedBlocks) -> None:
    engine = make_engine(**TINY, store=blocks)
    fill(engine, 30)
    assert blocks.num_lookups == 1
    fill(engine, 30)
    engine.add([1, 2], "short")
    assert blocks.num_lookups == 1
    engine.run()


def test_a_block_that_is_there_is_not_written_again(make_engine: MakeEngine, written: SharedBlocks) -> None:
    engine = make_engine(**TINY, store=written)
    before = written.num_repeated
    fill(engine, 30)
    assert books(engine).num_read == 7
    fill(engine, 34, 35, 36)
    # the block in which the answer ends was not looked up
    assert written.num_repeated - before <= 1


def test_salts_do_not_share_the_store(make_engine: MakeEngine, blocks: SharedBlocks) -> None:
    first, second = make_engine(**TINY, store=blocks), make_engine(**TINY, store=blocks)
    first.ask(prompt_of(30), salt="a")
    fill(first, 31, 32, 33)
    assert second.ask(prompt_of(30), salt="b").num_cached_tokens == 0
    assert second.ask(prompt_of(30)).num_cached_tokens == 0
    assert books(second).num_found == 0
    assert second.ask(prompt_of(30), salt="a").num_cached_tokens == 28


@pytest.mark.parametrize("lie", lies(random.Random(0)))
def test_what_a_store_gets_wrong_is_computed_again(make_engine: MakeEngine, written: SharedBlocks, lie: str) -> None:
    engine = make_engine(**TINY, store=written)
    faulty = faulty_store(engine)
    faulty.fault = lies(random.Random(1))[lie]
    fill(engine, 30, 31, 30, 31)
    assert faulty.num_faults > 0
    assert books(engine).num_failed > 0


def test_a_wrong_block_is_replaced(make_engine: MakeEngine, written: SharedBlocks) -> None:
    writer, reader = make_engine(**TINY, store=written), make_engine(**TINY, store=written)
    wrong = writer.hasher.extend(writer.root, prompt_of(30))[2]
    data, digest = written.blocks[wrong]
    written.blocks[wrong] = bytes(len(data)), digest
    assert writer.ask(prompt_of(30)).num_cached_tokens == 8
    assert wrong not in written.blocks
    fill(writer, 31, 32, 33)
    assert written.blocks[wrong] == (data, digest)
    assert reader.ask(prompt_of(30)).num_cached_tokens == 28


@pytest.mark.parametrize("kind", wrong_finds(random.Random(0)))
def test_a_wrong_lookup_costs_a_recomputation(make_engine: MakeEngine, written: SharedBlocks, kind: str) -> None:
    engine = make_engine(**TINY, store=written)
    faulty_store(engine).wrong_find = wrong_finds(random.Random(2))[kind]
    fill(engine, 30, 40, 31)
    assert books(engine).num_failed == 0 or kind in ("everything", "some")


def test_a_block_that_was_given_up_meanwhile_is_computed(make_engine: MakeEngine, written: SharedBlocks) -> None:
    engine = make_engine(**TINY, store=written)
    held = engine.hold_loads()
    engine.add(prompt_of(30), "a")
    engine.step()
    held.release()
    engine.step()
    assert engine.scheduler.loads.is_waited_for(engine.scheduler.requests["a"])
    written.clear()
    held.holds = False
    engine.run()
    assert engine.answers["a"].token_ids == greedy_answer(prompt_of(30), 4)
    assert books(engine).num_failed == 7


def test_lookups_that_hang_delay_one_request(
    make_engine: MakeEngine, written: SharedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_times, "FIRST_LIMIT_S", 0.2)
    engine = make_engine(**TINY | {"num_blocks": 30}, store=written)
    faulty = faulty_store(engine)
    faulty.goes_on.clear()
    began_at = time.monotonic()
    engine.add(prompt_of(30), "waits")
    while "waits" in engine.scheduler.requests:
        engine.step()
        assert time.monotonic() < began_at + 2 * 0.2 + 1.0
    assert engine.collect()["waits"].num_cached_tokens == 0
    assert engine.core.has_work
    # it is not asked again before it answers
    engine.add(prompt_of(31), "computes")
    engine.step()
    assert engine.scheduler.requests["computes"].status is RequestStatus.RUNNING
    faulty.goes_on.set()
    engine.run()
    assert engine.scheduler.loads.lookups.is_answered
    assert engine.ask(prompt_of(28)).num_cached_tokens == 0
    assert len(engine.scheduler.loads.lookups) == 0


def test_a_store_that_does_not_answer_is_asked_again_later(
    make_engine: MakeEngine, written: SharedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**TINY, store=written)
    faulty = faulty_store(engine)
    faulty.wrong_find = wrong_finds(random.Random(0))["silent"]
    fill(engine, 30)
    assert not engine.scheduler.loads.lookups.is_answered
    faulty.wrong_find = None
    fill(engine, 31)
    assert books(engine).num_found == 0
    engine.scheduler.loads.lookups._silent_until -= store_lookups.SILENT_S
    fill(engine, 32, 33)
    assert books(engine).num_found > 0


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_abort_during_a_lookup_leaves_nothing(make_engine: MakeEngine, written: SharedBlocks, is_sent: bool) -> None:
    engine = make_engine(**TINY, store=written)
    faulty = faulty_store(engine)
    faulty.goes_on.clear()
    engine.add(prompt_of(30), "a")
    if is_sent:
        engine.step()
    engine.core.abort_request("a")
    assert engine.collect()["a"].finish_reason is FinishReason.ABORT
    assert engine.core.has_work is is_sent
    faulty.goes_on.set()
    engine.run()
    # an end says nothing about the store
    assert engine.scheduler.loads.lookups.is_answered
    fill(engine, 30)
    assert books(engine).num_read == 7


def test_a_grammar_is_compiled_meanwhile(make_engine: MakeEngine, written: SharedBlocks) -> None:
    grammars = LateCompiler()
    engine = make_engine(**TINY, store=written, grammars=grammars, grammar_timeout_s=3600.0)
    engine.grammar_wait_s = 0.0
    form = random_form(random.Random(0))
    expected = form.answer(prompt_of(30), 4, temperature=0.0, seed=0, index=0, window=None)
    for number in range(2):
        name = f"r{number}"
        params = {"max_tokens": 4, "structured_outputs": form.params}
        engine.add(prompt_of(30), name, params=params, eos=(59,))
        assert engine.scheduler.requests[name].status is RequestStatus.WAITING_FOR_FSM
        while number == 0 and Wait.LOOKUP in engine.scheduler.requests[name].waits_for:
            engine.step()
        while grammars.jobs:
            grammars.release(0, wanted=True)
        assert engine.run()[name].token_ids == expected
        engine.scheduler.pool.forget_cached(keeps_store=True)


def test_a_fork_continues_after_a_prompt_that_was_found(make_engine: MakeEngine, written: SharedBlocks) -> None:
    engine = make_engine(**TINY, store=written)
    fill(make_engine(**TINY, store=written), 22, 31, 32, 33)
    answers = engine.ask_many(prompt_of(22), 3, params={"temperature": 1.0, "seed": 5, "max_tokens": 6})
    assert [answer.token_ids for answer in answers] == [
        sampled_answer(prompt_of(22), 6, seed=5, index=index) for index in range(3)
    ]
    assert books(engine).num_read == 5


def test_drafts_and_steps_ahead_go_on(make_engine: MakeEngine, written: SharedBlocks) -> None:
    fields: dict[str, Any] = {"async_scheduling": True, "speculative_config": speculation(2)}
    for given in fields:
        engine = make_engine(**TINY | {"num_blocks": 24}, **{given: fields[given]}, store=written)
        engine.add(prompt_of(9), "first", params={"max_tokens": 20})
        for _ in range(3):
            engine.step()
        engine.add(prompt_of(30), "second")
        engine.run()
        assert engine.answers["first"].token_ids == greedy_answer(prompt_of(9), 20)
        assert engine.answers["second"].token_ids == greedy_answer(prompt_of(30), 4)
        assert books(engine).num_read == 7


def test_what_is_shared_is_announced_by_nobody(make_engine: MakeEngine, written: SharedBlocks) -> None:
    engine = make_engine(**TINY | {"num_host_blocks": (3,)}, store=written)
    faulty = faulty_store(engine)
    for known in announced(engine, faulty):
        pool, tier = engine.scheduler.pool, engine.scheduler.pool.tier
        assert tier is not None
        assert known == pool._by_hash.keys() | tier._slots.keys()
    assert books(engine).num_read > 0
    assert books(engine).num_failed > 0


def test_forget_cached_clears_the_store(make_engine: MakeEngine, written: SharedBlocks) -> None:
    engine, other = make_engine(**TINY, store=written), make_engine(**TINY, store=written)
    fill(engine, 30)
    engine.scheduler.pool.take_changes()
    engine.scheduler.pool.forget_cached()
    assert len(books(engine)) == 0
    assert engine.ask(prompt_of(30)).num_cached_tokens == 0
    assert other.ask(prompt_of(31)).num_cached_tokens == 0


def test_no_lookup_overtakes_a_clear(make_engine: MakeEngine, written: SharedBlocks) -> None:
    engine = make_engine(**TINY, store=written)
    faulty = faulty_store(engine)
    clear = faulty.clear

    def slow_clear() -> None:
        time.sleep(0.1)
        clear()

    faulty.clear = slow_clear  # type: ignore[method-assign]
    engine.scheduler.pool.forget_cached()
    assert engine.ask(prompt_of(30)).num_cached_tokens == 0


def test_the_books_have_a_limit(make_engine: MakeEngine, blocks: SharedBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_tier, "MAX_SHARED_NAMES", 10)
    engine = make_engine(**TINY, store=blocks)
    fill(engine, 30, 31, 32, 33, 34)
    assert len(blocks.blocks) > len(books(engine)) == 10
    # what they have not is looked up
    assert engine.ask(prompt_of(30)).num_cached_tokens == 28


def test_a_long_prompt_is_looked_up_in_part(
    make_engine: MakeEngine, written: SharedBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_lookups, "MAX_NAMES", 3)
    assert make_engine(**TINY, store=written).ask(prompt_of(30)).num_cached_tokens == 12


def test_a_store_that_is_slower_than_the_model_is_not_asked(make_engine: MakeEngine, written: SharedBlocks) -> None:
    engine = make_engine(**TINY, store=written)
    engine.scheduler.loads._read_times.add(1, 1e9)
    before = written.num_lookups
    fill(engine, 30)
    assert written.num_lookups == before
    # it may have become faster
    engine.scheduler.loads._read_times.last_at -= read_times.FRESH_S
    fill(engine, 31)
    assert books(engine).num_read == 7


@pytest.mark.parametrize("num_faults", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_i15_no_wrong_answer_is_ever_visible(make_engine: MakeEngine, num_faults: int) -> None:
    """Two engines share a store that gives up blocks, and whose lookups and reads are wrong in every way."""
    blocks, draws = SharedBlocks(60), random.Random(num_faults)
    engines = [make_engine(**TINY, store=blocks) for _ in range(2)]
    faulty = [faulty_store(engine) for engine in engines]
    faults, finds = lies(draws), wrong_finds(draws)
    prompts = [[*prompt_of(length), number] for length in (26, 30, 34) for number in range(4)]
    expected = [greedy_answer(prompt, 4) for prompt in prompts]
    while sum(each.num_faults for each in faulty) < num_faults:
        place = draws.randrange(2)
        faulty[place].fault = draws.choice([None, *faults.values()])
        faulty[place].wrong_find = draws.choice([None, None, finds["everything"], finds["nothing"], finds["some"]])
        number = draws.randrange(len(prompts))
        assert engines[place].ask(prompts[number], salt=draws.choice(["", "a"])).token_ids == expected[number]
    assert sum(books(engine).num_read for engine in engines) > num_faults // 10


def test_a_shared_store_is_a_store() -> None:
    with pytest.raises(ValueError, match="shares_block_store is True, which needs has_block_store"):
        EngineConfig(shares_block_store=True)


def test_what_a_store_has_lost_in_silence_is_written_again(make_engine: MakeEngine, written: SharedBlocks) -> None:
    engine = make_engine(**TINY, store=written)
    fill(engine, 30)
    assert books(engine).num_read == 7
    lost, written.blocks = written.blocks, {}
    find = written.find

    def fail(names: Sequence[bytes]) -> list[bytes]:
        raise OSError("it is away")

    written.find = fail  # type: ignore[method-assign]
    fill(engine, 40)
    written.find = find  # type: ignore[method-assign]
    # what the pool has of them is driven out, into host memory
    fill(engine, 34, 35, 36)
    assert len(lost.keys() & written.blocks.keys()) >= 5
