"""Signals to a worker: the first begins its drain and says what it waits for, the second ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.worker_settings import DecodeSettings, WorkerSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.decode.decode_servicer import decode_calls
from pdserve.worker.step_stream.step_stream_servicer import BeginCall
from pdserve.worker.worker import Worker
from pdserve.worker.worker_process import run_worker
from tests.support.run.waiting import HANG_S, eventually


@pytest.fixture(autouse=True)
def _unfrozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects of a test go with it."""
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.mark.parametrize(("first", "second"), [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
async def test_a_second_signal_ends_a_drain(
    tiny_checkpoints: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    first: signal.Signals,
    second: signal.Signals,
) -> None:
    draining, ready = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        """Stands for requests that do not end."""
        draining.set()
        await asyncio.Event().wait()

    def add(worker: Worker, settings: WorkerSettings) -> Mapping[str, BeginCall]:
        monkeypatch.setattr(worker, "drain", drain)
        monkeypatch.setattr(type(worker.engine), "num_streams", 2)
        return decode_calls(worker, settings)

    settings = DecodeSettings(num_blocks=8, max_model_len=64, connector="tcp", drain_s=7.5)
    with caplog.at_level(logging.INFO):
        running = asyncio.create_task(
            run_worker(
                settings,
                tiny_checkpoints("llama"),
                {WorkerRole.DECODE: add},
                ConfigError("a test"),
                on_ready=lambda identity: ready.set(),
            )
        )
        async with asyncio.timeout(HANG_S):
            await ready.wait()
            os.kill(os.getpid(), first)
            await draining.wait()
            await eventually(lambda: "draining 2 requests, at most 7.5 s; Ctrl-C again stops now" in caplog.text)
            assert not running.done()
            os.kill(os.getpid(), second)
            assert await running
