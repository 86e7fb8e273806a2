"""Prefix caching: the same answers with and without, and never another root's blocks."""

from __future__ import annotations

import pytest

from pdserve.engine.kv_cache.block_pool import BlockPool
from pdserve.engine.scheduler.kv_messages import HoldReturned, ReceiveInto
from tests.support.engine.engine_harness import MakeEngine
from tests.support.engine.hash_model import greedy_answer

PROMPT = list(range(22))


def test_a_repeated_prompt_is_found_but_for_its_last_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.ask(PROMPT)
    computed = engine.model.num_tokens
    second = engine.ask(PROMPT)
    assert first.token_ids == second.token_ids == greedy_answer(PROMPT, 4)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 20)
    assert engine.model.num_tokens - computed == 2 + 3


def test_a_prompt_of_full_blocks_computes_its_last_block_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = list(range(16))
    engine.ask(prompt)
    again = engine.ask(prompt)
    assert again.num_cached_tokens == 12
    assert again.token_ids == greedy_answer(prompt, 4)


def test_a_partly_equal_prompt_shares_what_is_equal(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.ask(PROMPT)
    other = [*PROMPT[:10], 50, 51, 52, 53, 54]
    answer = engine.ask(other)
    assert answer.num_cached_tokens == 8
    assert answer.token_ids == greedy_answer(other, 4)


def test_output_blocks_are_found_by_a_prompt_that_continues_them(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer = engine.ask(PROMPT, params={"max_tokens": 11})
    longer = [*PROMPT, *answer.token_ids, 1, 2, 3]
    continued = engine.ask(longer)
    assert continued.num_cached_tokens == 32
    assert continued.token_ids == greedy_answer(longer, 4)


def test_another_salt_never_meets_the_same_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.ask(PROMPT, salt="one")
    assert engine.ask(PROMPT, salt="two").num_cached_tokens == 0
    assert engine.ask(PROMPT, salt="one").num_cached_tokens == 20


def test_an_evicted_prefix_is_computed_again(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=12)
    engine.ask(PROMPT)
    engine.ask([40 + i % 20 for i in range(43)])
    answer = engine.ask(PROMPT)
    assert answer.num_cached_tokens == 0
    assert answer.token_ids == greedy_answer(PROMPT, 4)


def test_a_prefix_outlives_its_continuation(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=12)
    engine.ask(PROMPT)
    engine.ask([40 + i % 20 for i in range(28)])
    answer = engine.ask(PROMPT)
    assert 0 < answer.num_cached_tokens < 20
    assert answer.token_ids == greedy_answer(PROMPT, 4)


def test_sequences_of_one_step_share_nothing_that_is_not_computed_yet(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ids = [engine.add(PROMPT) for _ in range(3)]
    answers = engine.run()
    assert [answers[request_id].num_cached_tokens for request_id in ids] == [0, 0, 0]
    assert all(answers[request_id].token_ids == greedy_answer(PROMPT, 4) for request_id in ids)


def test_a_prefix_in_use_is_shared_and_stays_while_another_ends(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16)
    long = engine.add(PROMPT, params={"max_tokens": 30})
    engine.step()
    for salt in range(6):
        short = engine.add([*PROMPT[:12], 60 - salt])
        for _ in range(4):
            engine.step()
        assert engine.answers[short].num_cached_tokens == 12
    assert engine.run()[long].token_ids == greedy_answer(PROMPT, 30)


def test_forgetting_the_cache_keeps_what_is_in_use(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.ask(PROMPT)
    running = engine.add([9, 9, 9, 9, 9, 9], params={"max_tokens": 12})
    engine.step()
    engine.scheduler.pool.forget_cached()
    engine.scheduler.check()
    assert engine.ask(PROMPT).num_cached_tokens == 0
    assert engine.answers[running].token_ids == greedy_answer([9] * 6, 12)


def test_hits_are_counted_once_a_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.ask(PROMPT)
    engine.ask(PROMPT)
    stats = engine.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (44, 20)
    assert stats.num_computed_prompt_tokens == 24


def test_of_two_blocks_with_one_content_one_is_found() -> None:
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    pool.remember(one, b"same")
    pool.remember(two, b"same")
    assert pool.find(b"same") is one
    pool.release([one, two])
    pool.check({})
    assert (sum(pool.available), pool.num_cached) == (4, 1)
    assert pool.find(b"same") is one


def test_without_caching_every_prompt_is_computed_as_a_whole(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_prefix_caching=False, num_blocks=14, max_model_len=48)
    prompt = list(range(20))
    expected = greedy_answer(prompt, 4)
    assert [engine.ask(prompt).token_ids for _ in range(2)] == [expected] * 2
    assert engine.scheduler.pool.num_cached == 0
    assert engine.core.stats().prefix_cache_hits == 0
    # preempted sequences find nothing either, and are computed again
    names = [engine.add([start, *prompt], params={"max_tokens": 20}) for start in range(3)]
    answers = engine.run()
    assert engine.scheduler.num_preemptions > 0
    for start, name in enumerate(names):
        assert answers[name].token_ids == greedy_answer([start, *prompt], 20)


@pytest.mark.parametrize("remote", [False, True])
def test_without_the_cache_no_lookup_is_counted(make_engine: MakeEngine, remote: bool) -> None:
    engine = make_engine(enable_prefix_caching=False)
    for name in ("a", "b"):
        engine.add([1] * 20, name, remote_prefill=remote)
        engine.step()
        engine.core.abort_request(name)
    for message in engine.outbox.take():
        if isinstance(message, ReceiveInto):
            engine.core.apply(HoldReturned(message.request_id, message.hold))
    engine.step()
    stats = engine.core.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)


def test_a_request_that_may_not_read_the_cache_looks_nothing_up(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add([1] * 20, "a", params={"prompt_logprobs": 1})
    engine.run()
    assert engine.core.stats().prefix_cache_queries == 0
