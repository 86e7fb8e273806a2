"""Abort in every state: the request ends once, its blocks come back, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.kv_cache.block_pool import PinnedBlocks
from pdserve.engine.request import RequestStatus
from pdserve.engine.scheduler.kv_messages import (
    HoldReturned,
    Landed,
    ReceiveInto,
    Revoke,
    Settled,
    SourceFinished,
    Want,
)
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer

PROMPT = [7] * 22
OTHER = [1] * 6
Reach = Callable[[Harness], RequestStatus]


def _room(engine: Harness) -> ReceiveInto:
    (room,) = [message for message in engine.outbox.messages if isinstance(message, ReceiveInto)]
    return room


def waiting(engine: Harness) -> RequestStatus:
    engine.add(PROMPT, "x")
    return RequestStatus.WAITING


def waiting_without_room(engine: Harness) -> RequestStatus:
    engine.add([8] * 60, "fills", params={"max_tokens": 1})
    engine.step()
    engine.add(PROMPT, "x")
    engine.step()
    return RequestStatus.WAITING


def overdue(engine: Harness) -> RequestStatus:
    waiting_without_room(engine)
    engine.scheduler.starvation.overdue.append(engine.scheduler.requests["x"])
    engine.step()
    return RequestStatus.WAITING


def prefilling(engine: Harness) -> RequestStatus:
    engine.add(PROMPT, "x")
    engine.step()
    return RequestStatus.RUNNING


def decoding(engine: Harness) -> RequestStatus:
    engine.add(PROMPT, "x", params={"max_tokens": 20})
    while "x" not in engine.answers:
        engine.step()
    return RequestStatus.RUNNING


def preempted(engine: Harness) -> RequestStatus:
    engine.add(PROMPT, "x", priority=9, params={"max_tokens": 20})
    while "x" not in engine.answers:
        engine.step()
    engine.add([8] * 40, "grows", params={"max_tokens": 14})
    while engine.scheduler.requests["x"].status is RequestStatus.RUNNING:
        engine.step()
    return RequestStatus.PREEMPTED


def unreserved(engine: Harness) -> RequestStatus:
    engine.add(PROMPT, "x", remote_prefill=True)
    return RequestStatus.WAITING_FOR_REMOTE_KVS


def receiving(engine: Harness) -> RequestStatus:
    unreserved(engine)
    engine.step()
    return RequestStatus.WAITING_FOR_REMOTE_KVS


def partly_landed(engine: Harness) -> RequestStatus:
    receiving(engine)
    engine.core.apply(Landed("x", 3))
    return RequestStatus.WAITING_FOR_REMOTE_KVS


def finished_before_it_landed(engine: Harness) -> RequestStatus:
    receiving(engine)
    engine.core.apply(SourceFinished("x", len(PROMPT), (1,)))
    return RequestStatus.WAITING_FOR_REMOTE_KVS


def landed_with_its_hold_out(engine: Harness) -> RequestStatus:
    finished_before_it_landed(engine)
    engine.core.apply(Landed("x", 6))
    return RequestStatus.WAITING_FOR_REMOTE_KVS


def ready(engine: Harness) -> RequestStatus:
    landed_with_its_hold_out(engine)
    engine.core.apply(HoldReturned("x", _room(engine).hold))
    engine.outbox.take()
    return RequestStatus.WAITING


def unwanted_source(engine: Harness) -> RequestStatus:
    engine.add(PROMPT, "x", transfer_source=True)
    engine.step()
    return RequestStatus.RUNNING


def unwanted_source_that_gave_way(engine: Harness) -> RequestStatus:
    unwanted_source(engine)
    engine.add([8] * 70, "wanted", transfer_source=True, wanted_from=0)
    engine.step()
    return RequestStatus.PREEMPTED


def wanted_after_it_gave_way(engine: Harness) -> RequestStatus:
    unwanted_source_that_gave_way(engine)
    engine.core.apply(Want("x", 0))
    return RequestStatus.PREEMPTED


def wanted_source_that_waits(engine: Harness) -> RequestStatus:
    engine.add(PROMPT, "x", transfer_source=True)
    engine.core.apply(Want("x", 0))
    return RequestStatus.WAITING


def wanted_source_with_blocks_out(engine: Harness) -> RequestStatus:
    wanted_source_that_waits(engine)
    engine.step()
    engine.step()
    return RequestStatus.RUNNING


def idle_session(engine: Harness) -> RequestStatus:
    engine.add(PROMPT, "x", resumable=True)
    while "x" not in engine.turns:
        engine.step()
    return RequestStatus.WAITING_FOR_STREAMING_REQ


def session_that_waits_for_its_next_turn(engine: Harness) -> RequestStatus:
    idle_session(engine)
    engine.resume("x", [9] * 10)
    return RequestStatus.WAITING


def session_in_its_next_turn(engine: Harness) -> RequestStatus:
    idle_session(engine)
    engine.resume("x", [9] * 20)
    engine.step()
    return RequestStatus.RUNNING


STATES: list[Reach] = [
    idle_session,
    session_that_waits_for_its_next_turn,
    session_in_its_next_turn,
    waiting,
    waiting_without_room,
    overdue,
    prefilling,
    decoding,
    preempted,
    unreserved,
    receiving,
    partly_landed,
    finished_before_it_landed,
    landed_with_its_hold_out,
    ready,
    unwanted_source,
    unwanted_source_that_gave_way,
    wanted_after_it_gave_way,
    wanted_source_that_waits,
    wanted_source_with_blocks_out,
]


def give_back(engine: Harness) -> None:
    holds: list[PinnedBlocks] = [
        message.hold for message in engine.outbox.take() if isinstance(message, ReceiveInto | Settled)
    ]
    for hold in holds:
        engine.core.apply(HoldReturned("whoever", hold))


@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
@pytest.mark.parametrize("by", ["abort", "revoke"])
def test_abort(make_engine: MakeEngine, reach: Reach, by: str) -> None:
    engine = make_engine(
        num_blocks=20,
        max_model_len=80,
        max_num_batched_tokens=9,
        scheduling_policy="priority",
    )
    engine.add(OTHER, "other", params={"max_tokens": 9})
    status = reach(engine)
    assert engine.scheduler.requests["x"].status is status
    said = engine.answers["x"].token_ids if "x" in engine.answers else []
    if by == "abort":
        aborted = engine.core.abort_request("x")
        assert aborted is not None
        assert aborted.request_id == "x"
    else:
        engine.core.apply(Revoke("x"))
    assert engine.core.abort_request("x") is None
    engine.scheduler.check()
    # a session between two turns has nothing to abort: that is its end
    is_idle = by == "abort" and status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert engine.collect()["x"].finish_reason is (FinishReason.STOP if is_idle else FinishReason.ABORT)
    assert engine.answers["x"].token_ids == said
    while engine.core.has_work:
        engine.step()
        give_back(engine)
    give_back(engine)
    assert engine.answers["other"].token_ids == greedy_answer(OTHER, 9)
    for name, answer in engine.answers.items():
        assert name in ("x", "wanted") or answer.finish_reason is FinishReason.LENGTH
    assert engine.scheduler.waiting.num_waiting_tokens == 0
    assert len(engine.scheduler.starvation.overdue) == len(engine.scheduler.starvation.preempted) == 0


def test_a_resting_source_is_forgotten(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(PROMPT, "x", transfer_source=True)
    engine.run()
    assert engine.core.abort_request("x") is None
    engine.core.apply(Want("x", 0))
    assert engine.outbox.take() == []
    assert engine.scheduler.num_dropped_events == 1
