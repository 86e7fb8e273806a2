"""Nobody is passed for ever: a request that finds no room becomes overdue, and then nothing passes it."""

from __future__ import annotations

from collections import deque

import pytest

from pdserve.engine.scheduler.kv_messages import HoldReturned, Landed, ReceiveInto, Settled, SourceFinished
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import greedy_answer

LARGE = [9] * 44


def small_stream(engine: Harness, steps: int, *, priority: int = 0, remote: bool = False) -> int | None:
    """Small requests without end, two always waiting; returns in which step `large` came in."""
    landing: deque[ReceiveInto] = deque()
    number = 0
    entered = None
    for step in range(steps):
        while sum(name.startswith("small") for name in engine.scheduler.requests) < 4:
            prompt, params = [number % 60, number // 60] * 5, {"max_tokens": 4 + number % 3}
            engine.add(prompt, f"small{number}", priority=priority, remote_prefill=remote, params=params)
            number += 1
        engine.step()
        landing += [message for message in engine.outbox.take() if isinstance(message, ReceiveInto)]
        for room in [landing.popleft() for _ in range(len(landing)) if landing[0].request_id.startswith("small")]:
            engine.core.apply(Landed(room.request_id, len(room.hold)))
            engine.core.apply(SourceFinished(room.request_id, 10, (1,)))
            engine.core.apply(HoldReturned(room.request_id, room.hold))
        if entered is None and ("large" in engine.running() or any(room.request_id == "large" for room in landing)):
            entered = step
    for name in list(engine.scheduler.requests):
        engine.core.abort_request(name)
    for room in (*landing, *(message for message in engine.outbox.take() if isinstance(message, ReceiveInto))):
        engine.core.apply(HoldReturned(room.request_id, room.hold))
    return entered


@pytest.mark.diagonal
@pytest.mark.parametrize("large_remote", [False, True])
@pytest.mark.parametrize("small_remote", [False, True])
def test_a_large_request_is_not_starved_by_small_ones(
    make_engine: MakeEngine, large_remote: bool, small_remote: bool
) -> None:
    entered = {}
    for max_overtakes in (4, 16, 10**9):
        engine = make_engine(num_blocks=14, max_overtakes=max_overtakes)
        engine.add([0] * 10, "small", params={"max_tokens": 6})
        engine.step()
        engine.add(LARGE, "large", remote_prefill=large_remote)
        entered[max_overtakes] = small_stream(engine, 150, remote=small_remote)
    assert entered[10**9] is None, "the small ones do not keep it out, so this shows nothing"
    assert entered[4] is not None
    assert entered[16] is not None
    assert entered[4] < entered[16]


def test_an_overdue_request_keeps_back_its_equals_and_worse_but_not_better_ones(make_engine: MakeEngine) -> None:
    for priority, expected in ((1, True), (2, True), (0, False)):
        engine = make_engine(num_blocks=14, max_overtakes=4, scheduling_policy="priority")
        engine.add([0] * 10, "small", params={"max_tokens": 6})
        engine.step()
        engine.add(LARGE, "large", priority=1)
        assert (small_stream(engine, 150, priority=priority) is not None) is expected


def test_a_ready_sequence_passes_an_overdue_one(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16, max_overtakes=1)
    engine.add([2] * 20, "ready", remote_prefill=True, params={"max_tokens": 6})
    engine.step()
    (room,) = engine.outbox.take()
    assert isinstance(room, ReceiveInto)
    engine.add(LARGE, "large")
    passing = engine.add([3] * 5)
    engine.step()
    assert engine.scheduler.requests["large"] in engine.scheduler.starvation.overdue
    for offset, block in enumerate(room.hold.block_ids):
        for place in range(4):
            engine.kv_cache[block, place] = (offset * 4 + place) * 1024 + 2
    engine.core.apply(Landed("ready", len(room.hold)))
    engine.core.apply(SourceFinished("ready", 20, tuple(greedy_answer([2] * 20, 1))))
    engine.core.apply(HoldReturned("ready", room.hold))
    engine.step()
    assert "ready" in engine.running()
    answers = engine.run()
    assert answers["ready"].token_ids == greedy_answer([2] * 20, 6)[1:]
    assert answers["large"].token_ids == greedy_answer(LARGE, 4)
    assert answers[passing].token_ids == greedy_answer([3] * 5, 4)


def test_a_local_request_is_not_starved_by_wanted_transfers(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=24, max_num_seqs=1, max_overtakes=8)
    engine.add([5] * 6, "local", params={"max_tokens": 1})
    for number in range(40):
        engine.add([number] * 8, f"wanted{number}", transfer_source=True, wanted_from=0)
        engine.step()
        for message in engine.outbox.take():
            assert isinstance(message, Settled)
            engine.core.apply(HoldReturned(message.request_id, message.hold))
        if "local" in engine.answers:
            break
    assert engine.answers["local"].token_ids == greedy_answer([5] * 6, 1)
    engine.run()
    for message in engine.outbox.take():
        assert isinstance(message, Settled)
        engine.core.apply(HoldReturned(message.request_id, message.hold))


def test_an_overdue_request_that_is_aborted_lets_the_others_go_on(make_engine: MakeEngine) -> None:
    for remote in (False, True):
        engine = make_engine(num_blocks=14, max_overtakes=1)
        engine.add([1] * 20, "runs", params={"max_tokens": 30})
        engine.step()
        engine.add(LARGE, "large", remote_prefill=remote)
        engine.add([2] * 3, "passes", params={"max_tokens": 1})
        engine.step()
        engine.step()
        engine.add([3] * 3, "waits", params={"max_tokens": 1})
        engine.step()
        assert "passes" in engine.answers
        assert "waits" not in engine.answers
        engine.core.abort_request("large")
        engine.step()
        assert engine.answers["waits"].token_ids == greedy_answer([3] * 3, 1)
        assert len(engine.scheduler.starvation.overdue) == 0
        engine.run()
