"""When running sequences move from a hot decode worker to an idle one: pure decisions over what the workers' steps have shown."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.router.placement import rebalancing
from pdserve.router.placement.rebalancing import MOST_AT_ONCE, Rebalancing
from pdserve.router.workers.step_times import StepTimes
from pdserve.router.workers.worker import RemoteWorker
from tests.router.candidates import worker
from tests.router.fake_worker import LAYOUT
from tests.support.models.kv_layouts import with_shape


class Sequence:
    """A movable one."""

    def __init__(self, num_output_tokens: int = 500) -> None:
        self.num_output_tokens = num_output_tokens
        self.num_moves = 0

    def move(self) -> None:
        self.num_moves += 1

    def stay(self) -> None:
        self.num_moves -= 1


def decode(name: str, num: int, step_s: Any = None, num_tokens: int = 500, **fields: Any) -> RemoteWorker:
    """With so many sequences. step_s: seconds of a step with n."""
    made = worker(name, "decode", num_running=num, **fields)
    made.movable = {Sequence(num_tokens) for _ in range(num)}
    if step_s is not None:
        for _ in range(50):
            made.step_times.add(num, step_s(num))
    return made


def linear(num: int) -> float:
    return 0.010 + 0.002 * num


def find(*workers: RemoteWorker) -> Any:
    return Rebalancing("auto", lambda: workers).find(workers)


def test_a_line_through_the_steps() -> None:
    times = StepTimes()
    for num in (2, 8, 5, 20) * 10:
        times.add(num, linear(num))
    assert times.per_sequence_s == pytest.approx(0.002)
    assert times.predicted_s(40, 0.002) == pytest.approx(linear(40))
    same = StepTimes()
    for _ in range(10):
        same.add(4, linear(4))
    assert same.per_sequence_s is None
    assert StepTimes().predicted_s(3, 0.1) is None


def test_pauses_are_no_steps() -> None:
    times = StepTimes()
    for now in (0.0, 0.1, 5.0, 5.2):
        times.arrived(3, now)
    times.arrived(0, 5.3)
    assert (times.line.weight, times.line.y) == (pytest.approx(1.99), pytest.approx(0.1 * 0.99 + 0.2))


def test_sequences_leave_the_worker_with_the_longest_steps() -> None:
    hot, cold = decode("d1", 20, linear), decode("d2", 4, linear)
    found = find(cold, hot)
    assert found.source is hot
    assert found.num_sequences == MOST_AT_ONCE
    assert found.gain_s == pytest.approx(0.008)
    assert find(decode("d1", 20, linear), decode("d2", 18, linear)) is None, "too little to gain"


def test_a_worker_without_steps_is_thought_to_be_like_the_source() -> None:
    fresh = decode("d2", 0)
    hot = decode("d1", 20, linear)
    assert find(hot, fresh) is None, "nothing shows what a sequence costs"
    for _ in range(50):
        hot.step_times.add(10, linear(10))
    assert find(hot, fresh).source is hot


def test_a_slow_worker_is_not_given_more() -> None:
    hot = decode("d1", 20, linear)
    slow = decode("d2", 4, lambda num: 0.2 + 0.002 * num)
    for engine in (hot, slow):
        engine.step_times.add(1, 0.01 if engine is hot else 0.2)
    assert find(hot, slow) is None or find(hot, slow).source is slow


def test_a_move_must_save_more_than_its_pause() -> None:
    hot, cold = decode("d1", 20, linear, num_tokens=1), decode("d2", 4, linear)
    assert find(hot, cold) is None
    many = Rebalancing("auto", lambda: (hot, cold))
    for each in hot.movable:
        each.num_output_tokens = 100  # type: ignore[misc]
    assert many.find((hot, cold)) is not None
    for _ in range(50):
        many.paused(5.0)
    assert many.find((hot, cold)) is None


def test_other_blocks_go_nowhere() -> None:
    other = decode("d2", 0, linear, layout=with_shape(LAYOUT, block_size=32))
    assert find(decode("d1", 20, linear), other) is None


@pytest.mark.parametrize(
    ("setting", "num_workers", "moves"), [("always", 2, True), ("always", 1, False), ("auto", 2, True)]
)
async def test_it_looks_again_and_again(
    monkeypatch: pytest.MonkeyPatch, setting: Any, num_workers: int, moves: bool
) -> None:
    monkeypatch.setattr(rebalancing, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(rebalancing, "ALWAYS_EVERY_S", 0.01)
    workers = [decode("d1", 20, linear), decode("d2", 4, linear)][:num_workers]
    running = asyncio.create_task(Rebalancing(setting, lambda: workers).run())
    await asyncio.sleep(0.2)
    running.cancel()
    num_moves = [each.num_moves for worker in workers for each in worker.movable]  # type: ignore[attr-defined]
    assert (sum(num_moves) > 0) is moves
    if setting == "auto":
        assert sum(num_moves) == MOST_AT_ONCE, "then the reports are awaited"
