"""A request's life in an engine by vLLM's names, as code for its `EngineCore`, `Scheduler` and `Request` follows it."""

from __future__ import annotations

import time

from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest, FinishReason, StreamingUpdate
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.engine_core import EngineCore
from pdserve.engine.request import Request, RequestStatus
from tests.support.engine.engine_harness import MakeEngine
from tests.support.engine.hash_model import greedy_answer

PROMPT = [11, 12, 13, 14, 15, 16, 17]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


def of(core: EngineCore, request_id: str) -> Request:
    return core.scheduler.requests[request_id]


def finished(steps: list[EngineCoreOutputs]) -> dict[str, FinishReason | None]:
    return {output.request_id: output.finish_reason for step in steps for output in step.outputs if output.finished}


def until_idle(core: EngineCore) -> list[EngineCoreOutputs]:
    steps = []
    while core.has_work:
        steps.append(core.step())
    return steps


def test_waiting_running_finished(make_engine: MakeEngine) -> None:
    core = make_engine(max_num_batched_tokens=4).core
    core.add_request(
        EngineCoreRequest(
            request_id="req-1",
            prompt_token_ids=PROMPT,
            sampling_params=GREEDY,
            pooling_params=None,
            eos_token_id=2,
            arrival_time=time.monotonic(),
            cache_salt=None,
            priority=0,
            trace_headers={},
        )
    )
    request = of(core, "req-1")
    assert (request.status, request.num_computed_tokens, request.num_cached_tokens) == (RequestStatus.WAITING, 0, -1)
    assert core.step().outputs == []  # a chunk of the prompt
    assert (request.status, request.num_computed_tokens, request.num_cached_tokens) == (RequestStatus.RUNNING, 4, 0)
    [first] = core.step().outputs
    assert (first.new_token_ids, first.finished) == (greedy_answer(PROMPT, 1), False)
    assert [event.type.name for event in first.events] == ["QUEUED", "SCHEDULED"]
    [*_, last] = until_idle(core)
    assert last.finished_req_ids == ["req-1"]
    assert (request.status, str(last.outputs[0].finish_reason)) == (RequestStatus.FINISHED_LENGTH_CAPPED, "length")
    assert last.scheduler_stats is not None
    assert (last.scheduler_stats.num_running_reqs, last.scheduler_stats.kv_cache_usage) == (0, 0.0)
    assert "req-1" not in core.scheduler.requests


def test_ends_by_eos_stop_token_and_abort(make_engine: MakeEngine) -> None:
    core = make_engine().core
    second = greedy_answer(PROMPT, 2)[1]
    for name, stops, eos in (("eos", (), second), ("stop", (second,), None), ("abort", (), None)):
        params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=stops)
        core.add_request(
            EngineCoreRequest(request_id=name, prompt_token_ids=PROMPT, sampling_params=params, eos_token_id=eos)
        )
    requests = {name: of(core, name) for name in ("eos", "stop", "abort")}
    steps = [core.step(), core.step()]
    core.abort_request("abort")
    ends = finished([*steps, core.step()])
    assert ends == {"eos": FinishReason.STOP, "stop": FinishReason.STOP, "abort": FinishReason.ABORT}
    assert {name: request.status.name for name, request in requests.items()} == {
        "eos": "FINISHED_STOPPED",
        "stop": "FINISHED_STOPPED",
        "abort": "FINISHED_ABORTED",
    }
    assert (requests["eos"].stop_reason, requests["stop"].stop_reason) == (None, second)


def test_preempted_and_resumed(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32)
    core = engine.core
    for number in range(2):
        params = SamplingParams(temperature=0.0, max_tokens=18)
        prompt = [number] * 9
        core.add_request(EngineCoreRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling_params=params))
    seen: list[RequestStatus] = []
    tokens: list[int] = []
    later = of(core, "r1")
    while core.has_work:
        tokens += [
            token for output in core.step().outputs if output.request_id == "r1" for token in output.new_token_ids
        ]
        if later.status not in seen[-1:]:
            seen.append(later.status)
    assert [status.name for status in seen] == ["RUNNING", "PREEMPTED", "RUNNING", "FINISHED_LENGTH_CAPPED"]
    assert later.num_preemptions == 1
    assert tokens == greedy_answer([1] * 9, 18)


def test_a_session_waits_for_its_next_turn(make_engine: MakeEngine) -> None:
    core = make_engine().core
    core.add_request(
        EngineCoreRequest(request_id="talk", prompt_token_ids=PROMPT, sampling_params=GREEDY, resumable=True)
    )
    session = of(core, "talk")
    turns = []
    for added in ([21, 22], [31], None):
        steps = until_idle(core)
        turns.append([token for step in steps for output in step.outputs for token in output.new_token_ids])
        assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        if added is not None:
            core.resume_request(StreamingUpdate(request_id="talk", prompt_token_ids=added, sampling_params=GREEDY))
    before = PROMPT
    for added, turn in zip(([21, 22], [31], []), turns, strict=True):
        assert turn == greedy_answer(before, 3)
        before = [*before, *turn, *added]
    core.finish_session("talk")
    until_idle(core)
    assert session.status is RequestStatus.FINISHED_STOPPED
