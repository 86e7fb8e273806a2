"""An attempt that may move: once at a time, and again if it stayed."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.router.requests.tasks.sequence_move import SequenceMove
from pdserve.router.workers.worker import RemoteWorker
from tests.router.candidates import worker
from tests.support.run.waiting import eventually


class Moves:
    """Answers each try as the test says."""

    def __init__(self) -> None:
        self.num_tried = 0
        self.answers: asyncio.Queue[bool | Exception] = asyncio.Queue()

    async def __call__(self, source: RemoteWorker) -> bool:
        self.num_tried += 1
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_what_stays_may_move_later_and_what_moves_is_not_moved_twice() -> None:
    source, moves = worker("d0"), Moves()
    with SequenceMove(source, moves, lambda: 3) as move:
        assert source.movable == {move}
        for expected, answer in ((1, False), (2, True)):
            move.move()
            move.move()
            await eventually(lambda expected=expected: moves.num_tried == expected)  # type: ignore[misc]
            moves.answers.put_nowait(answer)
            await asyncio.sleep(0.01)
        move.move()
        await asyncio.sleep(0.01)
        assert moves.num_tried == 2
    assert not source.movable


async def test_a_worker_that_drains_is_left_with_each_report_until_its_sequences_go() -> None:
    source, moves = worker("d0"), Moves()
    source.refuse_more()
    with SequenceMove(source, moves, lambda: 3):
        for expected in (1, 2, 3):
            await eventually(lambda expected=expected: moves.num_tried == expected)  # type: ignore[misc]
            moves.answers.put_nowait(False)
            await asyncio.sleep(0.01)
            source.report(type(source.load)(draining=True))


async def test_a_bug_is_logged_and_ends_no_attempt(caplog: pytest.LogCaptureFixture) -> None:
    source, moves = worker("d0"), Moves()
    with SequenceMove(source, moves, lambda: 3) as move:
        move.move()
        moves.answers.put_nowait(RuntimeError("a bug"))
        await asyncio.sleep(0.01)
    assert "a sequence could not be moved" in caplog.text
