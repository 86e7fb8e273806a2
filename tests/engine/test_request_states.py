"""The state machine of a request: every edge of the table, and no other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pdserve.common.request.engine_types import EngineCoreEventType, EngineCoreRequest, FinishReason
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.request import FINISH_REASONS, FINISHED, IllegalMove, Request, RequestStatus, Wait
from tests.support.engine.engine_harness import MakeEngine

S = RequestStatus
TABLE = {
    S.WAITING: {S.RUNNING, S.WAITING_FOR_REMOTE_KVS},
    S.WAITING_FOR_FSM: {S.WAITING_FOR_REMOTE_KVS, S.WAITING},
    S.WAITING_FOR_REMOTE_KVS: {S.WAITING, S.PREEMPTED},
    S.RUNNING: {S.PREEMPTED, S.WAITING_FOR_STREAMING_REQ},
    S.PREEMPTED: {S.RUNNING, S.WAITING_FOR_REMOTE_KVS},
    S.WAITING_FOR_STREAMING_REQ: {S.WAITING_FOR_FSM, S.WAITING},
}
ENDS = {S.FINISHED_STOPPED, S.FINISHED_LENGTH_CAPPED, S.FINISHED_ABORTED, S.FINISHED_ERROR}


def make_request(**fields: Any) -> Request:
    given = {"request_id": "a", "prompt_token_ids": [1, 2, 3], "sampling_params": SamplingParams(), **fields}
    return Request(EngineCoreRequest(**given))


@pytest.mark.parametrize(("before", "after"), [*itertools.product(RequestStatus, RequestStatus)])
def test_a_request_moves_along_the_table_and_nowhere_else(before: RequestStatus, after: RequestStatus) -> None:
    request = make_request()
    request.status = before
    if before not in ENDS and (after in TABLE[before] or after in ENDS):
        request.move_to(after)
        assert request.status is after
    else:
        with pytest.raises(IllegalMove, match=f"{before.name} -> {after.name}"):
            request.move_to(after)
        assert request.status is before


def test_finished_states_have_the_four_reasons_that_clients_see() -> None:
    assert FINISHED == ENDS
    assert all(status.is_finished == (status in ENDS) for status in RequestStatus)
    assert FINISH_REASONS == {
        S.FINISHED_STOPPED: FinishReason.STOP,
        S.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
        S.FINISHED_ABORTED: FinishReason.ABORT,
        S.FINISHED_ERROR: FinishReason.ERROR,
    }
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]


def test_events_are_told_once_and_in_order(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32)
    for number in range(2):
        engine.add([number] * 9, f"r{number}", params={"max_tokens": 18})
    told: dict[str, list[EngineCoreEventType]] = {"r0": [], "r1": []}
    while engine.core.has_work:
        for output in engine.core.step().outputs:
            times = [event.timestamp for event in output.events]
            assert times == sorted(times)
            told[output.request_id] += [event.type for event in output.events]
    assert engine.scheduler.num_preemptions == 1
    first, again = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED
    assert told == {"r0": [first, again], "r1": [first, again, EngineCoreEventType.PREEMPTED, again]}


def test_the_status_names_the_first_thing_still_missing() -> None:
    request = make_request(remote_prefill=True)
    assert request.status is S.WAITING_FOR_REMOTE_KVS
    request.waits_for = {Wait.GRAMMAR, Wait.REMOTE_KV}
    request.status = S.WAITING_FOR_FSM
    request.settle_wait(Wait.GRAMMAR)
    assert request.status is S.WAITING_FOR_REMOTE_KVS
    request.settle_wait(Wait.REMOTE_KV)
    assert request.status is S.WAITING


def test_waits_may_end_in_any_order_and_more_than_once() -> None:
    request = make_request(remote_prefill=True)
    request.waits_for = {Wait.GRAMMAR, Wait.REMOTE_KV}
    request.status = S.WAITING_FOR_FSM
    request.settle_wait(Wait.REMOTE_KV)
    assert request.status is S.WAITING_FOR_FSM
    request.settle_wait(Wait.REMOTE_KV)
    request.settle_wait(Wait.GRAMMAR)
    assert request.status is S.WAITING
    assert make_request().status is S.WAITING


def append(request: Request, *tokens: int, max_model_len: int = 100) -> list[RequestStatus | None]:
    return [request.append_output(token, max_model_len) for token in tokens]


def test_eos_ends_it_unless_it_is_ignored() -> None:
    assert append(make_request(eos_token_ids=(7, 8)), 1, 8) == [None, S.FINISHED_STOPPED]
    params = SamplingParams(ignore_eos=True, max_tokens=3)
    assert append(make_request(eos_token_ids=(7,), sampling_params=params), 7, 7, 7)[:2] == [None, None]


def test_a_stop_token_ends_it_and_is_named() -> None:
    request = make_request(sampling_params=SamplingParams(stop_token_ids=(5,)), eos_token_ids=(7,))
    assert append(request, 4, 5) == [None, S.FINISHED_STOPPED]
    assert request.stop_reason == 5
    ended_by_eos = make_request(eos_token_ids=(7,))
    append(ended_by_eos, 7)
    assert ended_by_eos.stop_reason is None


def test_nothing_stops_it_before_min_tokens_but_length() -> None:
    params = SamplingParams(min_tokens=3, max_tokens=10, stop_token_ids=(5,))
    request = make_request(sampling_params=params, eos_token_ids=(7,))
    assert append(request, 7, 5, 7) == [None, None, S.FINISHED_STOPPED]
    short = make_request(sampling_params=SamplingParams(min_tokens=5, max_tokens=5))
    assert append(short, 1, 1, max_model_len=5) == [None, S.FINISHED_LENGTH_CAPPED]


def test_max_tokens_and_max_model_len_cap_it() -> None:
    request = make_request(sampling_params=SamplingParams(max_tokens=2))
    assert append(request, 1, 1) == [None, S.FINISHED_LENGTH_CAPPED]
    assert append(make_request(), 1, max_model_len=4) == [S.FINISHED_LENGTH_CAPPED]
    ends_both_ways = make_request(sampling_params=SamplingParams(max_tokens=1), eos_token_ids=(7,))
    assert append(ends_both_ways, 7) == [S.FINISHED_STOPPED]
