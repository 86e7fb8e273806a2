"""I16: a sequence that another engine continues says what it would have said where it was."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.engine.scheduler.kv_messages import Missed, Revoke, Want
from tests.support.engine.drafters import greedy_drafter, speculation, use_drafter
from tests.support.engine.engine_harness import Answer, Harness, MakeEngine
from tests.support.engine.engine_migration import end_here, go_on
from tests.support.engine.hash_model import STATE, Chunk, Window, greedy_answer, prompt_of, sampled_answer
from tests.support.engine.late_grammars import EOS, Form, InstantCompiler

WINDOWS: tuple[Window, ...] = (None, 9, (None, 9), (None, Chunk(8)), (None, STATE), STATE)
LENGTH = 40
PARAMS = {"max_tokens": LENGTH}


def run_until(engine: Harness, request_id: str, num_tokens: int, index: int = 0) -> None:
    key = engine.key(request_id, index)
    while len(engine.answers.get(key, Answer()).token_ids) < num_tokens:
        engine.step()


def text(source: Harness, target: Harness, request_id: str, name: str, index: int = 0) -> list[int]:
    """The output of both."""
    return source.answers[source.key(request_id, index)].token_ids + target.answers[name].token_ids


@pytest.mark.diagonal
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 8, 13, 14, 15, 16, 17, 37])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_i16_the_text_is_the_same(make_engine: MakeEngine, window: Window, num_tokens: int, is_async: bool) -> None:
    source, target = (make_engine(sliding_window=window, async_scheduling=is_async) for _ in range(2))
    prompt = prompt_of(11)
    source.add(prompt, "r", params=PARAMS)
    run_until(source, "r", num_tokens)
    moved = end_here(source, "r")
    assert moved is not None
    assert len(moved.token_ids) - len(prompt) <= num_tokens + 1 + is_async
    name = go_on(source, target, moved)
    target.run()
    assert text(source, target, "r", name) == greedy_answer(prompt, LENGTH, window)
    assert target.model.num_tokens == len(prompt) + LENGTH - len(moved.token_ids)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_i16_there_and_back_again(make_engine: MakeEngine, window: Window) -> None:
    engines = [make_engine(sliding_window=window) for _ in range(2)]
    prompt, name, said = prompt_of(7), "r", list[int]()
    engines[0].add(prompt, "r", params=PARAMS)
    for turn in range(9):
        source, target = engines[turn % 2], engines[1 - turn % 2]
        run_until(source, name, turn % 3)
        moved = end_here(source, name)
        assert moved is not None
        said += source.answers[name].token_ids
        name = go_on(source, target, moved)
    said += engines[1].run()[name].token_ids
    assert said == greedy_answer(prompt, LENGTH, window)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_i16_with_drafts(make_engine: MakeEngine, window: Window, right: float) -> None:
    for num_tokens in (1, 2, 5, 8):
        source, target = (
            make_engine(sliding_window=window, speculative_config=speculation(3), async_scheduling=num_tokens % 2 == 1)
            for _ in range(2)
        )
        for engine in (source, target):
            use_drafter(engine, greedy_drafter(right, seed=num_tokens, window=window))
        source.add(prompt_of(9), "r", params=PARAMS)
        run_until(source, "r", num_tokens)
        moved = end_here(source, "r")
        assert moved is not None
        name = go_on(source, target, moved)
        target.run()
        assert text(source, target, "r", name) == greedy_answer(prompt_of(9), LENGTH, window)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("length", [3, 8, 13])
def test_i16_each_of_n_sequences_moves_on_its_own(make_engine: MakeEngine, window: Window, length: int) -> None:
    source, target = (make_engine(sliding_window=window) for _ in range(2))
    prompt, sampling = prompt_of(length), {"temperature": 1.0, "seed": 5}
    for num_tokens in (0, 1, 6):
        request_id = f"r{num_tokens}"
        source.add(prompt, request_id, n=4, params=sampling | PARAMS | {"n": 4})
        if num_tokens:
            run_until(source, request_id, num_tokens)
        names = {}
        for index in (2, 0, 3):
            moved = end_here(source, request_id, index)
            assert moved is not None
            names[index] = go_on(source, target, moved)
        source.run()
        target.run()
        for index in range(4):
            expected = sampled_answer(prompt, LENGTH, seed=5, index=index, window=window)
            said = source.answers[f"{request_id}/{index}"].token_ids
            assert said + (target.answers[names[index]].token_ids if index in names else []) == expected


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_i16_a_grammar_goes_on(make_engine: MakeEngine, num_tokens: int) -> None:
    source, target = (make_engine(grammars=InstantCompiler()) for _ in range(2))
    form = Form(tuple(range(0, 60, 2)), tuple(range(1, 60, 2)), 6, 12)
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    params = sampling | {"max_tokens": 14, "structured_outputs": form.params}
    source.add(prompt_of(6), "r", eos=(EOS,), params=params)
    run_until(source, "r", num_tokens)
    moved = end_here(source, "r")
    assert moved is not None
    name = go_on(source, target, moved)
    target.run()
    assert text(source, target, "r", name) == form.answer(prompt_of(6), 14, **sampling)


def test_a_last_token_ends_the_sequence_here(make_engine: MakeEngine) -> None:
    source = make_engine()
    source.add(prompt_of(6), "r", params={"max_tokens": 3})
    run_until(source, "r", 2)
    assert end_here(source, "r") is None
    assert source.answers["r"].token_ids == greedy_answer(prompt_of(6), 3)


def test_blocks_that_nobody_wants_are_given_up(make_engine: MakeEngine) -> None:
    source = make_engine(num_blocks=16)
    for event in (Revoke, None):
        source.add(prompt_of(20), "r", params={"max_tokens": 30})
        run_until(source, "r", 5)
        moved = end_here(source, "r")
        assert moved is not None
        assert source.scheduler.pool.num_in_use == 0
        if event is not None:
            source.core.apply(Revoke(moved.message.request_id))
        else:
            source.ask([59] * 60)
        source.core.apply(Want(moved.message.request_id, 0))
        assert source.outbox.take() == ([] if event is not None else [Missed(moved.message.request_id)])
        source.answers.clear()


def test_a_preempted_sequence_moves_after_it_has_gone_on(make_engine: MakeEngine) -> None:
    source, target = make_engine(num_blocks=16), make_engine()
    prompts = {source.add(prompt, params=PARAMS): prompt for prompt in ([seed, *prompt_of(20)] for seed in range(3))}
    while not source.scheduler.num_preemptions:
        source.step()
    for name, prompt in prompts.items():
        moved = end_here(source, name)
        assert moved is not None
        there = go_on(source, target, moved)
        target.run()
        assert text(source, target, name, there) == greedy_answer(prompt, LENGTH)


def test_sessions_and_unknown_requests_stay(make_engine: MakeEngine) -> None:
    source = make_engine()
    source.add(prompt_of(6), "s", resumable=True, params={"max_tokens": 5})
    source.scheduler.migrate("s", 0, without_draft_head=False)
    source.scheduler.migrate("nobody", 0, without_draft_head=False)
    source.core.finish_session("s")
    assert source.run()["s"].token_ids == greedy_answer(prompt_of(6), 5)
    assert source.outbox.take() == []
