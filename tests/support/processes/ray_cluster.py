"""Ray's nodes and `pdserve up --ray` as processes of a test; a node can be killed, and nothing of them remains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.run.waiting import HANG_S

START_S = 240.0
"""Limit of the start of all nodes, which is some 20 processes."""


@dataclass
class RayNodes:
    """A Ray cluster."""

    address: str
    """host:port of its GCS."""
    process: subprocess.Popen[str]

    def of_node(self, host: str) -> list[psutil.Process]:
        """The node's raylet, and every process that it started, those of workers included."""
        [raylet] = [
            process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if process.name() == "raylet" and f"--node_ip_address={host}" in process.cmdline()
        ]
        return [raylet, *raylet.children(recursive=True)]

    def kill_node(self, host: str) -> None:
        """End the whole node at once, as by a loss of power."""
        processes = self.of_node(host)
        for end in (psutil.Process.suspend, psutil.Process.kill):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    end(process)
        psutil.wait_procs(processes, HANG_S)


@contextmanager
def ray_nodes(num_nodes: int) -> Iterator[RayNodes]:
    """`num_nodes` nodes of two CPUs each and a head without; afterwards none of their processes lives."""
    # short, for the sockets that Ray makes in it
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        yield from _ray_nodes(num_nodes, Path(folder))


def _ray_nodes(num_nodes: int, folder: Path) -> Iterator[RayNodes]:
    program = Path(__file__).with_name("ray_nodes.py")
    # Ray writes the address of its last cluster into this folder, which it makes only for a cluster in the default place
    (folder / "ray").mkdir()
    # of 15 by default, with which workers starve next to other tests
    environ = os.environ | {"RAY_TMPDIR": str(folder), "RAY_worker_niceness": "0"}
    with (folder / "nodes").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(program), str(num_nodes), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, text=True, start_new_session=True, env=environ,
        )  # fmt: skip
    started: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "nodes").read_text()
        started = psutil.Process(process.pid).children(recursive=True)
        yield RayNodes(json.loads(line), process)
        started += psutil.Process(process.pid).children(recursive=True)
    finally:
        # ends when its standard input does
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=HANG_S)
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(started, HANG_S / 2)
        for left in alive:
            left.kill()
        assert not alive, [left.cmdline() for left in alive]


class RayUp:
    """A `pdserve up --ray`."""

    def __init__(self, address: str, log: Path, *arguments: str) -> None:
        self.log = log
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
        command = [sys.executable, "-m", "pdserve", "up", "demo", "--ray", address, "--port", "0", "--grpc-port", "0"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--ask", "", *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ,
                start_new_session=True,
            )  # fmt: skip

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match of the pattern in the output. A start of Ray's actor and of the worker are two of Python."""
        give_up_at = time.monotonic() + START_S
        while (match := re.search(pattern, self.log.read_text())) is None:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < give_up_at, f"no {pattern} in {self.log.read_text()}"
            time.sleep(0.05)
        return match

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
