"""`pdserve up` for a benchmark: started, waited for, pinned as it pins itself, stopped."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

START_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(model: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """The base URL of a cluster; one prefill and one decode worker unless `flags` say otherwise."""
    port = free_port()
    command = [
        sys.executable, "-m", "pdserve.cli.main", "up", "--model", str(model), "--ask", "",
        "--port", str(port), "--grpc-port", str(free_port()), *flags,
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
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
