"""`pdserve up` restarts its only decode worker: a running stream waits for it, and its text is as if nothing had happened."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest

from pdserve.router.requests.tasks.placed_task import WAIT_FOR_WORKER_S
from tests.support.processes.up_cluster import UpCluster, running_up
from tests.support.run.waiting import HANG_S, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(4 * HANG_S)]

BODY = {"prompt": "The capital of France is", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}


def decode_worker(up: UpCluster) -> psutil.Process | None:
    """The decode worker that runs, if any."""
    port = up.metrics["decode-0"].split(":")[2].split("/")[0]
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "decode" in command and ("--metrics-port", port) in pairwise(command):
            return process
    return None


def streamed(client: httpx.Client, kill: psutil.Process | None = None) -> str:
    """The text of the answer. kill: ended by SIGKILL after the first piece."""
    text = []
    with client.stream("POST", "completions", json=BODY) as answer:
        for line in answer.iter_lines():
            assert '"error"' not in line, line
            if line.startswith("data: {"):
                text.append(line)
                if kill is not None:
                    kill.kill()
                    kill = None
    pieces = [httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"] for line in text]
    return "".join(choices[0]["text"] for choices in pieces if choices)


def test_a_stream_waits_for_the_only_decode_worker(tmp_path: Path) -> None:
    with (
        running_up(tmp_path) as up,
        httpx.Client(base_url=up.base_url, trust_env=False, timeout=3 * HANG_S) as client,
        ThreadPoolExecutor() as threads,
    ):
        undisturbed = streamed(client)
        worker = decode_worker(up)
        assert worker is not None
        holding = threads.submit(hold_restart, up, worker)
        assert streamed(client, worker) == undisturbed
        holding.result()
        up.check_pools()


def hold_restart(up: UpCluster, worker: psutil.Process) -> None:
    """Stop the worker's successor for twice the time that a request waits for other workers."""

    def successor() -> psutil.Process | None:
        found = decode_worker(up)
        return found if found is not None and found.pid != worker.pid else None

    held = wait_until(successor)
    held.send_signal(signal.SIGSTOP)
    time.sleep(2 * WAIT_FOR_WORKER_S)
    held.send_signal(signal.SIGCONT)
