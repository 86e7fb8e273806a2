"""`pdserve up` for tests, as a user starts it: its addresses, its pools seen from outside, its end.

Imports nothing but the standard library, so that environments without pdserve can use it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.run.waiting import HANG_S, wait_until

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
"""The environment of whoever runs the tests, without settings of pdserve."""
_READY = re.compile(r"^ready  OpenAI (http://\S+/v1)   gRPC (\S+).*\nmetrics  (.*)$", re.MULTILINE)
_SAMPLE = re.compile(r'^(pdserve_\w+)(?:\{state="(\w+)"\})? (\S+)$', re.MULTILINE)

_AT_REST = {"pdserve_engine_requests", "pdserve_open_transfers", "pdserve_requests_in_flight"}
"""Gauges that are 0 in a cluster without requests."""


@dataclass(frozen=True, slots=True)
class UpCluster:
    """A running `pdserve up`."""

    base_url: str
    """URL of OpenAI's API, ends with `/v1`."""
    grpc: str
    """Host and port of the router's gRPC front end."""
    metrics: dict[str, str]
    """Service, such as `router` or `prefill-0`, -> URL of its metrics."""
    log: Path

    def state(self, service: str) -> dict[tuple[str, str], float]:
        """Metric and its label `state`, or "" -> its value now, for metrics with no other label."""
        with urllib.request.urlopen(self.metrics[service], timeout=HANG_S) as answer:
            text = answer.read().decode()
        return {(name, state): float(value) for name, state, value in _SAMPLE.findall(text)}

    def check_pools(self) -> None:
        """Every worker comes to rest with no block in use, no request and no transfer, and the router with no request."""

        def busy() -> list[str]:
            found = []
            for service in self.metrics:
                for (name, state), value in self.state(service).items():
                    held = name == "pdserve_kv_blocks" and state == "in_use"
                    if value and (held or name in _AT_REST):
                        found.append(f"{service}: {name} {state} {value}")
            return found

        assert all(("pdserve_kv_blocks", "in_use") in self.state(name) for name in self.metrics if name != "router")
        assert ("pdserve_requests_in_flight", "") in self.state("router")
        wait_until(lambda: not busy(), lambda: f"the cluster is at rest: {busy()}")

    def addresses(self) -> set[tuple[str, int]]:
        """Host and port of everything that listens, as the log names it."""
        lines = "\n".join(line for line in self.log.read_text().splitlines() if line.startswith(("ready", "metrics")))
        return {(host, int(port)) for host, port in re.findall(r"(127\.0\.0\.1):(\d+)", lines)}


@contextmanager
def running_up(folder: Path, *flags: str, python: str = sys.executable) -> Iterator[UpCluster]:
    """`pdserve up` with the bundled model on free ports, as `make up` starts it. It ends by Ctrl-C.

    python: an interpreter that has pdserve. Raises: AssertionError if it ends with another status than 0, writes a traceback, or
    leaves a process or an open port.
    """
    log = folder / "up.log"
    command = [python, "-m", "pdserve.cli.main", "up", "--port", "0", "--grpc-port", "0", "--ask", "", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=ENVIRON, start_new_session=True
        )
    try:

        def said() -> re.Match[str] | None:
            assert process.poll() is None, f"it ended:\n{log.read_text()}"
            return _READY.search(log.read_text())

        base_url, grpc, metrics = wait_until(said, lambda: f"it is ready\n{log.read_text()}").groups()
        named = dict(re.findall(r"(\S+) (http://\S+/metrics)", metrics))
        cluster = UpCluster(base_url, grpc, named, log)
        yield cluster
    finally:
        process.send_signal(signal.SIGINT)
        try:
            status = process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    assert status == 0, log.read_text()
    assert "Traceback" not in log.read_text(), log.read_text()
    assert not is_group_alive(process.pid)
    assert not open_ports(cluster.addresses())


def is_group_alive(group: int) -> bool:
    """Return if a process of this group runs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def open_ports(addresses: set[tuple[str, int]]) -> list[tuple[str, int]]:
    """Addresses that accept a connection."""
    found = []
    for address in sorted(addresses):
        with socket.socket() as client:
            client.settimeout(HANG_S)
            if client.connect_ex(address) == 0:
                found.append(address)
    return found
