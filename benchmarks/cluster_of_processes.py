"""Starts `pdserve up` for a benchmark, waits for it, pins its processes, and stops it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

START_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pin_trees(cluster: int) -> None:
    """Every thread of the router and of prefill workers on core 0, every thread of decode workers on core 1."""
    router = psutil.Process(cluster)
    for process in (router, *router.children(recursive=True)):
        core = 1 if "decode" in process.cmdline() else 0
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


@contextmanager
def serving(
    model: Path, flags: Sequence[str] = (), *, pinned: bool = False, grpc_port: int | None = None
) -> Iterator[str]:
    """The base URL of a cluster; one prefill and one decode worker unless `flags` say otherwise.

    pinned: whole processes as `pin_trees` says; else only the workers' computing threads, as `pdserve up` does it.
    grpc_port: port of the router's gRPC front end.
    """
    port = free_port()
    command = [
        sys.executable, "-m", "pdserve.cli.main", "up", "--model", str(model), "--ask", "",
        "--port", str(port), "--grpc-port", str(grpc_port or free_port()), *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the cluster did not start: {process.poll()}")
            try:
                if httpx.get(f"{url}/health", timeout=1).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        if pinned:
            pin_trees(process.pid)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
