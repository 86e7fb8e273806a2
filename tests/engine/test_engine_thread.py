"""The engine's thread: in which order commands, steps and outputs come, and when it looks through the pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.common.errors import WorkerLost
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreOutputs
from pdserve.engine import engine_thread
from pdserve.engine.engine_thread import EngineThread, in_event_loop
from tests.support.run.waiting import eventually


class ScriptedCore:
    """Steps give what the test has put there; everything that happens is written down."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.num_steps = self.num_checks = 0
        self.in_step: Callable[[], None] = lambda: None
        self.outputs: list[EngineCoreOutput] = []
        self.has_work = self.has_computed = self.is_loading = False
        self.scheduler = SimpleNamespace(
            requests={}, grammars=SimpleNamespace(), check=self._check, outputs=SimpleNamespace(take=list)
        )

    def _check(self) -> None:
        self.num_checks += 1

    def step(self) -> EngineCoreOutputs:
        self.num_steps += 1
        in_step, self.in_step = self.in_step, lambda: None
        in_step()
        outputs, self.outputs = self.outputs, []
        return EngineCoreOutputs(outputs=outputs)

    def fail_all(self, cause: WorkerLost) -> None:
        self.happened.append("failed")


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture
async def thread(core: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineThread]:
    monkeypatch.setattr(engine_thread, "IDLE_BEAT_S", 0.01)

    def told(outputs: EngineCoreOutputs) -> None:
        core.happened.extend(f"told {output.request_id}" for output in outputs.outputs)

    call_soon = in_event_loop(asyncio.get_running_loop())
    thread = EngineThread(core, call_soon, told, lambda error: core.happened.append("died"), 1, None)
    yield thread
    thread.stop()
    assert not thread.is_alive


async def test_what_is_posted_during_a_step_is_done_before_its_outputs_are_told(
    core: ScriptedCore, thread: EngineThread
) -> None:
    def want(_: Any) -> None:
        thread.call_soon(lambda: core.happened.append("blocks leave"))

    core.outputs = [EngineCoreOutput(request_id="r")]
    core.in_step = lambda: thread.post(want)
    thread.start()
    await eventually(lambda: len(core.happened) == 2)
    assert core.happened == ["blocks leave", "told r"]


async def test_outputs_are_told_although_a_command_fails(
    core: ScriptedCore, thread: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("a broken command")

    core.outputs = [EngineCoreOutput(request_id="r")]
    core.in_step = lambda: thread.post(fail)
    thread.start()
    await eventually(lambda: "died" in core.happened)
    assert sorted(core.happened) == ["died", "failed", "told r"]
    assert "a broken command" in caplog.text


async def test_an_end_that_comes_during_a_step_is_heard(core: ScriptedCore, thread: EngineThread) -> None:
    core.outputs = [EngineCoreOutput(request_id="r")]
    core.in_step = lambda: thread._inbox.put(None)
    thread.start()
    await eventually(lambda: not thread.is_alive)
    await eventually(lambda: core.happened == ["told r"])
    assert core.num_steps == 1


async def test_the_pool_is_looked_through_once_when_a_whole_beat_was_idle(
    core: ScriptedCore, thread: EngineThread
) -> None:
    thread.start()
    await eventually(lambda: core.num_steps > 5)
    assert core.num_checks == 1
    core.outputs = [EngineCoreOutput(request_id="r")]
    thread.post(lambda core: None)
    num_steps = core.num_steps
    await eventually(lambda: core.num_steps > num_steps + 5)
    assert core.num_checks == 2


async def test_a_request_that_only_waits_lets_nobody_look_through_the_pool(
    core: ScriptedCore, thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "BLOCKED_S", 0.001)
    core.has_work = True
    thread.start()
    await eventually(lambda: core.num_steps > 5)
    assert core.num_checks == 0
