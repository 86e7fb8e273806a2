"""The receiving engine decides last, by its real cache: receive, prefill what is left, or ask for prefill."""

from __future__ import annotations

import pytest

from pdserve.engine.output_stream import OutputStream
from pdserve.engine.request import RequestStatus
from pdserve.engine.scheduler.kv_messages import ReceiveInto, StopReceiving
from tests.support.engine.engine_harness import MakeEngine
from tests.support.engine.hash_model import greedy_answer

PROMPT = list(range(22))
"""Five full blocks of four tokens, and two tokens."""


@pytest.mark.parametrize(("limit", "local"), [(None, False), (0, False), (1, False), (2, True), (30, True)])
def test_what_is_left_is_computed_here_up_to_the_limit(make_engine: MakeEngine, limit: int | None, local: bool) -> None:
    engine = make_engine()
    engine.ask(PROMPT)
    computed = engine.scheduler.num_computed_prompt_tokens
    request_id = engine.add(PROMPT, remote_prefill=True, local_prefill_tokens=limit)
    if not local:
        engine.step()
        assert engine.scheduler.requests[request_id].status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert [type(message) for message in engine.outbox.take()] == [ReceiveInto]
        engine.must_be_idle = False
        return
    first = engine.scheduler.outputs.take()
    assert [(output.request_id, output.prefills_locally, output.new_token_ids) for output in first] == [
        (request_id, True, [])
    ]
    assert engine.outbox.take() == [StopReceiving(request_id)]
    assert engine.run()[request_id].token_ids == greedy_answer(PROMPT, 4)
    assert engine.scheduler.num_computed_prompt_tokens - computed == 2


async def test_a_resumed_sequence_keeps_its_positions_when_its_reader_was_busy(make_engine: MakeEngine) -> None:
    engine = make_engine()
    answer = greedy_answer(PROMPT, 6)
    engine.ask(PROMPT)
    request_id = engine.add(
        PROMPT,
        params={"max_tokens": 6},
        output=answer[:3],
        remote_prefill=True,
        local_prefill_tokens=8,
        index=2,
    )
    stream = OutputStream(request_id)
    while engine.scheduler.requests:
        for output in engine.core.step().outputs:
            stream.put(output)
    [whole] = [output async for output in stream]
    assert whole.prefills_locally
    assert (whole.index, whole.first_position, whole.new_token_ids) == (2, 3, answer[3:])


def test_a_prompt_of_which_nothing_is_here_is_received(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add([1, 2, 3], remote_prefill=True, local_prefill_tokens=100)
    engine.step()
    assert [type(message) for message in engine.outbox.take()] == [ReceiveInto]
    engine.must_be_idle = False


def test_the_workers_own_cap_holds_as_well(make_engine: MakeEngine) -> None:
    engine = make_engine(max_local_prefill_tokens=1)
    engine.ask(PROMPT, prefill_here=True)
    engine.add(PROMPT, remote_prefill=True, local_prefill_tokens=30)
    engine.step()
    assert [type(message) for message in engine.outbox.take()] == [ReceiveInto]
    engine.must_be_idle = False


def test_without_a_source_more_than_the_limit_asks_for_prefill(make_engine: MakeEngine) -> None:
    engine = make_engine()
    refused = engine.ask(PROMPT, local_prefill_tokens=21)
    assert (refused.error_code, refused.uncached_tokens, refused.token_ids) == ("needs_prefill", 22, [])
    assert engine.ask(PROMPT, local_prefill_tokens=22).token_ids == greedy_answer(PROMPT, 4)
    assert engine.ask(PROMPT, local_prefill_tokens=2).token_ids == greedy_answer(PROMPT, 4)


def test_a_preempted_sequence_does_not_move_for_an_estimate(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32)
    ids = [engine.add([n] * 9, params={"max_tokens": 18}, local_prefill_tokens=9) for n in range(2)]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert all(engine.answers[ids[n]].token_ids == greedy_answer([n] * 9, 18) for n in range(2))


def test_time_of_prefill_is_that_of_steps_with_prompt_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, params={"max_tokens": 3})
    engine.step()
    spent = engine.core.stats().prefill_s
    assert spent > 0
    engine.run()
    assert engine.core.stats().prefill_s == spent
