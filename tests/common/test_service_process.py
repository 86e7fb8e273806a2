"""Children of a service: started where gRPC is at work, stopped in time, and never left over."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pdserve.common.processes import service_process
from pdserve.common.processes.service_process import start_process
from tests.support.run.waiting import HANG_S, eventually

ROOT = Path(__file__).parents[2]
IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
)


@pytest.mark.process
@pytest.mark.timeout(3 * HANG_S)
def test_no_child_crashes_where_grpc_is_at_work() -> None:
    """The handlers of gRPC are on, as if a library had loaded it before us."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.processes.starting_processes", "150"],
        # the folder of the tests is not on the path where PYTHONSAFEPATH is set, as in the Makefile
        env=os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT, capture_output=True, text=True, timeout=2 * HANG_S, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.split()) == (0, ["done"]), ended.stderr


@pytest.mark.process
@pytest.mark.parametrize("module", ["pdserve.cli.main", "pdserve.worker.engine_process"])
def test_grpc_is_loaded_without_its_handlers(module: str) -> None:
    code = (
        "import importlib, os, sys, pdserve.common\n"
        "assert 'grpc' not in sys.modules\n"
        f"importlib.import_module({module!r})\n"
        "assert os.environ['GRPC_ENABLE_FORK_SUPPORT'] == '0'\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=HANG_S)


async def test_the_status_and_what_is_inherited() -> None:
    read, write = os.pipe()
    code = f"import os; os.write({write}, os.environ['SAID'].encode()); raise SystemExit(7)"
    process = await start_process([sys.executable, "-c", code], pass_fds=(write,), environ={"SAID": "hello"})
    os.close(write)
    with os.fdopen(read, "rb") as said:
        assert await asyncio.to_thread(said.read) == b"hello"
    assert await process.wait() == 7
    assert process.returncode == 7
    # its number may be another's by now
    process.kill()


async def test_what_cannot_be_started_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        await start_process(["/no/such/program"])


async def test_a_process_that_drains_is_not_killed(caplog: pytest.LogCaptureFixture) -> None:
    process = await start_process(["/bin/sleep", "600"])
    assert process.returncode is None
    await process.stop("it", HANG_S, asyncio.Event())
    assert process.returncode == -signal.SIGTERM
    assert not caplog.records


async def test_a_process_that_does_not_drain_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    read, write = os.pipe()
    process = await start_process(
        [sys.executable, "-c", f"import os; os.dup2({write}, 1); {IGNORES_TERM}"], pass_fds=(write,)
    )
    os.close(write)
    with os.fdopen(read, "rb") as said:
        assert await asyncio.to_thread(said.readline) == b"on\n"
    await process.stop("it", 0.1, asyncio.Event())
    assert process.returncode == -signal.SIGKILL
    assert caplog.messages == ["it did not end in time; killing it"]


async def test_a_second_signal_ends_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_process, "HURRY_S", HANG_S)
    read, write = os.pipe()
    process = await start_process(
        [sys.executable, "-c", f"import os; os.dup2({write}, 1); {IGNORES_TERM}"], pass_fds=(write,)
    )
    os.close(write)
    with os.fdopen(read, "rb") as said:
        assert await asyncio.to_thread(said.readline) == b"on\n"
    hurry = asyncio.Event()
    hurry.set()
    await process.stop("it", HANG_S, hurry)
    # Python's own answer to SIGINT
    assert process.returncode == -signal.SIGINT


async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    name = f"pdserve-{os.getpid()}-600"
    for _ in range(20):
        starting = asyncio.create_task(start_process(["/bin/sh", "-c", "sleep 600", name]))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    here = psutil.Process()
    await eventually(lambda: not [child for child in here.children() if name in child.cmdline()])
