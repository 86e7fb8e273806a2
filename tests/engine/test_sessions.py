"""Streaming sessions in the engine: turn after turn on one sequence whose KV stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.errors import Cancelled, InvalidRequest
from pdserve.common.request.engine_types import FinishReason, StreamingUpdate
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.request import RequestStatus
from tests.support.engine.engine_harness import Answer, Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer
from tests.support.models.checkpoints import ARCHITECTURES, VOCAB_SIZE
from tests.support.transfers.step_calls import calls_in

PROMPT = list(range(10, 21))
INPUTS = [[40, 41, 42], [50], list(range(22))]


def turn(engine: Harness, prompt: list[int], *, name: str = "s", **params: Any) -> Answer:
    """One turn to its end; the session is opened with the first."""
    count = len(engine.turns.get(name, []))
    if name in engine.scheduler.requests:
        engine.resume(name, prompt, **params)
    else:
        engine.add(prompt, name, resumable=True, params=params)
    while len(engine.turns.get(name, [])) == count:
        engine.step()
    return engine.turns[name][-1]


def test_every_turn_continues_all_that_went_before(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=7)
    tokens: list[int] = []
    for length, prompt in enumerate([PROMPT, *INPUTS], 3):
        tokens += prompt
        answer = turn(engine, prompt, max_tokens=length)
        assert answer.token_ids == greedy_answer(tokens, length)
        assert (answer.first_position, answer.finish_reason) == (0, FinishReason.LENGTH)
        assert engine.scheduler.requests["s"].status is RequestStatus.WAITING_FOR_STREAMING_REQ
        assert not engine.core.has_work
        tokens += answer.token_ids
    engine.core.abort_request("s")


def test_what_is_computed_stays_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    turn(engine, PROMPT)
    computed = engine.model.num_tokens
    answer = turn(engine, INPUTS[0])
    # the last token of the first answer, the new input, and three of four new tokens
    assert engine.model.num_tokens - computed == 1 + len(INPUTS[0]) + 3
    assert answer.num_cached_tokens == len(PROMPT) + 3
    engine.core.abort_request("s")


def test_limits_and_penalties_are_those_of_a_turn(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = turn(engine, PROMPT, max_tokens=6)
    history = PROMPT + first.token_ids + INPUTS[0]
    expected = greedy_answer(history, 8)
    stop = expected[4]
    second = turn(engine, INPUTS[0], max_tokens=8, stop_token_ids=(stop,), logprobs=1)
    assert second.token_ids == expected[: expected.index(stop) + 1]
    assert (second.finish_reason, second.stop_reason) == (FinishReason.STOP, stop)
    assert second.logprobs is not None
    assert len(second.logprobs) == len(second.token_ids)
    history += second.token_ids + INPUTS[1]
    third = turn(engine, INPUTS[1], max_tokens=5, min_tokens=5, stop_token_ids=(greedy_answer(history, 1)[0],))
    assert len(third.token_ids) == 5
    assert third.stop_reason is None
    engine.core.abort_request("s")


@pytest.mark.parametrize("forget", [False, True])
def test_an_idle_session_gives_its_blocks_to_who_needs_them(make_engine: MakeEngine, forget: bool) -> None:
    engine = make_engine(num_blocks=12, max_model_len=48)
    first = turn(engine, PROMPT)
    held = engine.scheduler.pool.num_in_use
    assert held > 0
    other = list(range(30, 60))
    assert engine.ask(other).token_ids == greedy_answer(other, 4)
    assert engine.scheduler.pool.num_in_use == 0, "the idle session lost its blocks"
    if forget:
        engine.scheduler.pool.forget_cached()
    history = PROMPT + first.token_ids + INPUTS[0]
    assert turn(engine, INPUTS[0]).token_ids == greedy_answer(history, 4)
    assert engine.scheduler.num_preemptions == 0
    engine.core.abort_request("s")


def test_the_longest_idle_session_gives_first(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=14, max_model_len=56)
    for name in "abc":
        turn(engine, [ord(name) % 60] * 10, name=name)
    turn(engine, [5], name="a")
    engine.ask([7] * 8)
    blocks = {name: engine.scheduler.kv.num_blocks(engine.scheduler.requests[name]) > 0 for name in "abc"}
    assert blocks == {"a": True, "b": False, "c": True}
    for name in "abc":
        engine.core.abort_request(name)


def test_sessions_that_all_want_to_go_on_do_not_wedge_each_other(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=14, max_model_len=56)
    history: dict[str, list[int]] = {}
    for name in "abc":
        history[name] = [ord(name) % 60] * 12
        history[name] += turn(engine, history[name], name=name, max_tokens=3).token_ids
    for name in "abc":
        engine.resume(name, [3] * 30, max_tokens=8)
        history[name] += [3] * 30
    engine.run()
    for name in "abc":
        assert engine.turns[name][1].token_ids == greedy_answer(history[name], 8)
        engine.core.abort_request(name)


def test_a_turn_survives_preemption(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=9, max_model_len=36)
    first = turn(engine, PROMPT[:6])
    other = engine.add([50] * 8, params={"max_tokens": 20})
    engine.step()
    second = turn(engine, [9, 9], max_tokens=18)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert second.token_ids == greedy_answer([*PROMPT[:6], *first.token_ids, 9, 9], 18)
    assert engine.answers[other].token_ids == greedy_answer([50] * 8, 20)
    engine.core.abort_request("s")


def test_input_for_no_session_is_dropped_and_counted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.resume("nobody", [1])
    plain = engine.add([1, 2])
    engine.resume(plain, [1])
    assert engine.scheduler.num_dropped_events == 2
    engine.run()
    turn(engine, PROMPT)
    engine.core.abort_request("s")
    engine.resume("s", [1])
    assert engine.scheduler.num_dropped_events == 3


def test_input_that_comes_before_the_turn_has_ended_waits_for_its_turn(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=7)
    engine.add(PROMPT, "s", resumable=True)
    engine.resume("s", INPUTS[0], max_tokens=6)
    engine.step()
    engine.resume("s", INPUTS[1], max_tokens=2)
    engine.core.finish_session("s")
    engine.run()
    tokens: list[int] = []
    answers = [*engine.turns["s"], engine.answers["s"]]
    for prompt, answer, length in zip([PROMPT, *INPUTS[:2]], answers, (4, 6, 2), strict=True):
        tokens += prompt
        assert answer.token_ids == greedy_answer(tokens, length)
        tokens += answer.token_ids
    # the session's end came with the last turn's last token
    assert answers[-1].finish_reason is FinishReason.LENGTH
    assert not engine.scheduler.requests
    engine.scheduler.check(idle=True)


def test_a_queued_turn_beyond_the_models_length_ends_the_session(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32)
    engine.add(PROMPT, "s", resumable=True)
    engine.resume("s", [1] * 20)
    engine.run()
    assert engine.turns["s"][0].token_ids == greedy_answer(PROMPT, 4)
    assert engine.answers["s"].error_code == "prompt_too_long"
    engine.scheduler.check(idle=True)


def test_the_end_between_two_turns_is_a_stop_and_within_one_an_abort(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for name, end, status in (
        ("a", engine.core.finish_session, RequestStatus.FINISHED_STOPPED),
        ("b", engine.core.abort_request, RequestStatus.FINISHED_STOPPED),
    ):
        turn(engine, PROMPT, name=name)
        session = engine.scheduler.requests[name]
        end(name)
        assert session.status is status
        assert engine.collect()[name].finish_reason is FinishReason.STOP
    engine.add(PROMPT, "c", resumable=True)
    engine.step()
    session = engine.scheduler.requests["c"]
    engine.core.abort_request("c")
    assert session.status is RequestStatus.FINISHED_ABORTED
    engine.core.finish_session("c")


@pytest.mark.few(15)
@pytest.mark.parametrize("num_kept", range(1, 9))
@pytest.mark.parametrize("taken", [False, True])
def test_what_follows_a_stop_string_is_dropped(make_engine: MakeEngine, num_kept: int, taken: bool) -> None:
    """At every place within and between blocks; taken: the session has lost its blocks before its next turn."""
    engine = make_engine(num_blocks=26, max_model_len=100)
    answer = turn(engine, PROMPT, max_tokens=9)
    if taken:
        engine.ask([7] * 90, params={"max_tokens": 9})
        assert engine.scheduler.requests["s"].num_computed_tokens == 0
    engine.resume("s", INPUTS[0], num_kept_output_tokens=num_kept)
    while len(engine.turns["s"]) == 1:
        engine.step()
    kept = [*PROMPT, *answer.token_ids[:num_kept]]
    again = engine.turns["s"][-1]
    assert again.token_ids == greedy_answer([*kept, *INPUTS[0]], 4)
    # what other prompts find of it is still what it says
    for prompt in ([*PROMPT, *answer.token_ids, 1], [*kept, *INPUTS[0], *again.token_ids, 1]):
        assert engine.ask(prompt).token_ids == greedy_answer(prompt, 4)
    engine.core.abort_request("s")


def test_a_reader_ends_the_turn_that_it_means(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, "s", resumable=True, params={"max_tokens": 50})
    engine.core.scheduler.end_sequence("s", 0)  # nothing was said yet
    for _ in range(3):
        engine.step()
    engine.core.scheduler.end_sequence("s", 0, 1)  # of another turn
    engine.step()
    engine.core.scheduler.end_sequence("s", 0, 0)
    engine.core.scheduler.end_sequence("s", 0, 0)  # it has ended
    engine.collect()
    [answer] = engine.turns["s"]
    assert answer.token_ids == greedy_answer(PROMPT, 4)
    assert answer.finish_reason is FinishReason.STOP
    assert engine.scheduler.requests["s"].status is RequestStatus.WAITING_FOR_STREAMING_REQ
    engine.resume("s", INPUTS[0], num_kept_output_tokens=5)
    assert engine.collect()["s"].error_message == "num_kept_output_tokens is 5, the turn before has 4 output tokens"
    engine.scheduler.check(idle=True)


def test_a_preempted_turn_is_ended_by_its_reader(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=14, max_model_len=48, scheduling_policy="priority")
    engine.add(PROMPT, "s", resumable=True, params={"max_tokens": 30}, priority=1)
    other = engine.add([50] * 11, params={"max_tokens": 30})
    for _ in range(40):
        engine.step()
        if engine.scheduler.requests["s"].num_preemptions:
            break
    assert engine.scheduler.requests["s"].status is RequestStatus.PREEMPTED
    engine.core.scheduler.end_sequence("s", 0)
    engine.collect()
    answer = engine.turns["s"][0]
    engine.resume("s", INPUTS[0], num_kept_output_tokens=2)
    engine.run()
    assert engine.turns["s"][1].token_ids == greedy_answer([*PROMPT, *answer.token_ids[:2], *INPUTS[0]], 4)
    assert engine.answers[other].token_ids == greedy_answer([50] * 11, 30)
    engine.core.abort_request("s")


def test_a_session_ends_with_an_error_at_the_models_length(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32)
    first = turn(engine, PROMPT, max_tokens=100)
    assert first.token_ids == greedy_answer(PROMPT, 32 - len(PROMPT))
    engine.resume("s", [1])
    answer = engine.collect()["s"]
    assert (answer.finish_reason, answer.error_code) == (FinishReason.ERROR, "prompt_too_long")
    assert "has 33 tokens" in answer.error_message
    engine.scheduler.check(idle=True)


def test_the_engine_refuses_a_wrong_turn_by_name(make_engine: MakeEngine) -> None:
    engine = make_engine()
    wrong: list[tuple[list[int], dict[str, Any], str]] = [
        ([], {}, "prompt_token_ids"),
        ([64], {}, "prompt_token_ids"),
        ([1], {"top_p": 0.0}, "top_p"),
    ]
    for prompt, params, field in wrong:
        update = StreamingUpdate(request_id="s", prompt_token_ids=prompt, sampling_params=SamplingParams(**params))
        with pytest.raises(InvalidRequest, match=field):
            engine.core.verify_update(update)
    transfers: list[dict[str, Any]] = [{"remote_prefill": True}, {"transfer_source": True}]
    for fields in transfers:
        with pytest.raises(InvalidRequest, match="resumable"):
            engine.request([1], resumable=True, **fields)


def test_i10_idle_sessions_cost_a_step_nothing(make_engine: MakeEngine) -> None:
    costs = []
    for count in (10, 2000):
        engine = make_engine(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=4096)
        for number in range(count):
            engine.add([number % 60, number // 60], f"s{number}", resumable=True, params={"max_tokens": 1})
        engine.run()
        engine.add([1] * 9, params={"max_tokens": 30})
        engine.step()
        costs.append(calls_in(engine, 5))
        engine.core.fail_all(Cancelled("x"))
        engine.scheduler.outputs.take()
    assert costs[0] == costs[1]


def test_i1_turns_equal_transformers(
    tiny_checkpoints: Callable[..., Path], make_real_engine: Callable[..., Harness]
) -> None:
    folder = tiny_checkpoints("llama")
    oracle = ARCHITECTURES["llama"][1].from_pretrained(folder, dtype="float32").eval()
    engine = make_real_engine(folder, max_num_batched_tokens=13)
    tokens: list[int] = []
    for length in (20, 7, 33):
        new = [(31 * i + 7 * length) % VOCAB_SIZE for i in range(length)]
        tokens += new
        with torch.inference_mode():
            output = oracle.generate(
                torch.tensor([tokens]), max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
        answer = turn(engine, new, max_tokens=9)
        assert answer.token_ids == output[0, len(tokens) :].tolist()
        tokens += answer.token_ids
    engine.core.abort_request("s")
