"""Background tasks: what fails is started again, counted, and never ends in silence."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest
from prometheus_client import generate_latest

from pdserve.common.tasks import background_task as module
from pdserve.common.tasks.background_task import RESTARTS, background_task
from pdserve.common.telemetry.metrics import make_registry
from tests.support.run.waiting import HANG_S


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_BACKOFF_S", 0.04)


async def test_a_task_that_fails_is_started_again_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    before, runs = RESTARTS["ticks"], []

    async def run() -> None:
        runs.append(asyncio.get_running_loop().time())
        if len(runs) < 6:
            raise ValueError("a bug")

    with caplog.at_level(logging.ERROR):
        await asyncio.wait_for(background_task("ticks", run), HANG_S)
    assert len(runs) == 6
    assert RESTARTS["ticks"] == before + 5
    waits = [later - earlier for earlier, later in itertools.pairwise(runs)]
    assert all(wait >= least for wait, least in zip(waits, (0.01, 0.02, 0.04, 0.04, 0.04), strict=True))
    assert caplog.text.count("ValueError: a bug") == 5
    page = generate_latest(make_registry(None)).decode()
    assert f'pdserve_background_task_restarts_total{{task="ticks"}} {float(before + 5)}' in page


async def test_a_task_ends_when_it_returns_or_is_cancelled() -> None:
    before = RESTARTS["watch"]

    async def forever() -> None:
        await asyncio.Event().wait()

    task = background_task("watch", forever)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert RESTARTS["watch"] == before
