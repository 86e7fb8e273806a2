"""Cached prompt tokens by the source of their blocks: with each request's first output, and added up in the statistics."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import TransferFailed
from pdserve.common.request.cached_tokens import NOTHING_CACHED, PROMPT_TOKEN_SOURCES, CachedTokens
from pdserve.engine.scheduler.kv_messages import HoldReturned, ReceiveFailed
from pdserve.engine.scheduler.scheduler import Scheduler
from tests.engine.test_fetching import Fetch
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.faulty_store import faulty_store
from tests.support.engine.hash_model import greedy_answer, prompt_of

TINY: dict[str, Any] = {"num_blocks": 12, "num_host_blocks": (8,), "max_model_len": 48}


@pytest.fixture(autouse=True)
def slow_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash model is faster than a disk: its blocks would not be read."""
    monkeypatch.setattr(Scheduler, "_compute_s", lambda self, num_tokens: 3600.0 * num_tokens)


def ask(engine: Harness, prompt: list[int]) -> CachedTokens:
    """What was cached of a prompt, after its answer was found right."""
    answer = engine.ask(prompt)
    assert answer.token_ids == greedy_answer(prompt, 4)
    assert answer.cached_tokens is not None
    assert answer.cached_tokens.total == answer.num_cached_tokens
    engine.run()
    return answer.cached_tokens


def fill(engine: Harness, *lengths: int) -> int:
    """Serve prompts without a common prefix; returns their tokens."""
    for length in lengths:
        assert ask(engine, prompt_of(length)) == NOTHING_CACHED
    return sum(lengths)


def sources(engine: Harness) -> dict[str, int]:
    """The statistics, without the sources that had nothing."""
    found = engine.core.stats().prompt_tokens_by_source
    assert tuple(found) == PROMPT_TOKEN_SOURCES
    return {source: number for source, number in found.items() if number}


def test_the_pool(make_engine: MakeEngine) -> None:
    engine = make_engine()
    fill(engine, 30)
    assert ask(engine, prompt_of(30)) == CachedTokens(pool=28)
    assert sources(engine) == {"pool": 28, "computed": 30 + 2}


def test_host_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY | {"num_host_blocks": (32,)})
    num_tokens = fill(engine, 30, 31, 32, 33)
    assert ask(engine, prompt_of(30)) == CachedTokens(host=28)
    assert sources(engine) == {"host": 28, "computed": num_tokens + 2}


def test_the_store(make_engine: MakeEngine) -> None:
    engine = make_engine(**TINY, store=1 << 20)
    num_tokens = fill(engine, 30, 31, 32, 33)
    assert ask(engine, prompt_of(30)) == CachedTokens(store=28)
    assert sources(engine) == {"store": 28, "computed": num_tokens + 2}


def test_the_pool_then_host_memory_then_the_store(make_engine: MakeEngine) -> None:
    """Pool and host memory lose a sequence's last blocks first."""
    engine = make_engine(**TINY, store=1 << 20)
    num_tokens = fill(engine, 31, 32, 33)
    seen = set()
    for other in range(34, 44):
        prompt = [other, *prompt_of(30)]
        ask(engine, prompt)
        fill_tokens = [other] * 24
        ask(engine, fill_tokens)
        again = ask(engine, prompt)
        num_tokens += 2 * len(prompt) + len(fill_tokens)
        seen |= {source for source, number in again.by_source().items() if number}
        found = engine.core.stats().prompt_tokens_by_source
        assert sum(found.values()) == num_tokens
        assert (found["transfer"], found["peer"]) == (0, 0)
    assert len(seen) > 1


def test_a_part_in_the_pool_and_a_part_at_another_worker(make_engine: MakeEngine) -> None:
    source, receiver = make_engine(), make_engine()
    prompt = prompt_of(50)
    ask(receiver, prompt[:13])
    ask(source, prompt[:33])
    fetch = Fetch(receiver, source, prompt)
    fetch.offer()
    room = fetch.room()
    fetch.end(room, fetch.move(room), 32)
    assert receiver.run()["r"].cached_tokens == CachedTokens(pool=12, peer=20)
    assert sources(receiver) == {"pool": 12, "peer": 20, "computed": 13 + 18}


@pytest.mark.parametrize("num_landed", [0, 3])
def test_a_fetch_that_failed_brought_nothing(make_engine: MakeEngine, num_landed: int) -> None:
    """What had landed is in the pool when the sequence is admitted again. What it had found there before counts once."""
    source, receiver = make_engine(), make_engine()
    prompt = prompt_of(40)
    ask(receiver, prompt[:9])
    ask(source, prompt)
    fetch = Fetch(receiver, source, prompt)
    fetch.offer()
    room = fetch.room()
    settled = fetch.move(room, num_landed)
    receiver.core.apply(ReceiveFailed("r", TransferFailed("the source is gone")))
    receiver.core.apply(HoldReturned("r", room.hold))
    source.core.apply(HoldReturned("f", settled.hold))
    in_pool = 8 + 4 * num_landed
    assert receiver.run()["r"].cached_tokens == CachedTokens(pool=in_pool)
    assert sources(receiver) == {"pool": in_pool, "computed": 9 + 40 - in_pool}
    stats = receiver.core.stats()
    assert (stats.prefix_cache_queries, stats.peer_prefix_cache_queries) == (9 + 40, 36 - 8)


@pytest.mark.parametrize("place", [0, 4])
def test_a_load_that_failed_brought_nothing(make_engine: MakeEngine, place: int) -> None:
    """place: of the first block of the prompt that the store has lost."""
    engine = make_engine(**TINY, store=1 << 20)
    faulty = faulty_store(engine)
    num_tokens = fill(engine, 30, 31, 32, 33)
    wrong = engine.hasher.extend(engine.root, prompt_of(30))[place]
    faulty.fault = lambda name, data, digest: None if name == wrong else digest
    assert ask(engine, prompt_of(30)) == CachedTokens(store=4 * place)
    expected = {"store": 4 * place, "computed": num_tokens + 30 - 4 * place}
    assert sources(engine) == {source: number for source, number in expected.items() if number}
    assert engine.core.stats().prefix_cache_queries == num_tokens + 30


def test_only_the_first_output_has_them(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.add(prompt_of(30))
    outputs = []
    while engine.core.has_work:
        outputs += engine.core.step().outputs
    assert {output.request_id for output in outputs} == {request_id}
    assert [output.cached_tokens for output in outputs] == [NOTHING_CACHED, None, None, None]


def test_each_sequence_of_a_request_has_them(make_engine: MakeEngine) -> None:
    engine = make_engine()
    fill(engine, 30)
    answers = engine.ask_many(prompt_of(30), 3)
    assert [answer.cached_tokens for answer in answers] == [CachedTokens(pool=28)] * 3


def test_the_first_tokens_are_those_of_the_first_sources() -> None:
    tokens = CachedTokens(pool=8, host=4, store=2, peer=6)
    assert tokens.first(20) is tokens
    assert tokens.first(13) == CachedTokens(pool=8, host=4, store=1)
    assert tokens.first(0) == NOTHING_CACHED
    assert CachedTokens.sum([tokens, CachedTokens(peer=1)]) == CachedTokens(8, 4, 2, 7)
    assert CachedTokens.sum([]) == NOTHING_CACHED
