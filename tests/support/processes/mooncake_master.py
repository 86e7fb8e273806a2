"""A real `mooncake_master` for tests, with its metadata server, on loopback ports; ended by its id."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.reserved_port import reserved_port
from tests.support.run.waiting import HANG_S, wait_until

OPTIONS = ("--default_kv_lease_ttl=200", "--client_ttl=3")
"""A block that was read may soon be given up, and a client that has ended is soon forgotten."""


def skip_without_mooncake() -> None:
    """Skip the test where Mooncake cannot run."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip('Mooncake is not installed: pip install "pdserve[mooncake]"')
    if missing := [name for name in ("ibverbs", "rdmacm") if ctypes.util.find_library(name) is None]:
        pytest.skip(f"Mooncake needs lib{missing[0]}1, which is not installed")


class MooncakeMaster:
    """One master, which keeps its ports over restarts. It writes nothing but its log to disk."""

    def __init__(self, folder: Path, port: int, metadata_port: int, metrics_port: int) -> None:
        self.port, self.metadata_port = port, metadata_port
        self._metrics_port = metrics_port
        self._log = folder / "mooncake_master.log"
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, segment_mib: int = 64, *, has_metadata_server: bool = True) -> str:
        """For `kv_store`."""
        options = f"segment_mib={segment_mib}&host=127.0.0.1"
        if has_metadata_server:
            options += f"&metadata=http://127.0.0.1:{self.metadata_port}/metadata"
        return f"mooncake://127.0.0.1:{self.port}?{options}"

    def start(self) -> MooncakeMaster:
        """Start, without a value, and wait until it answers."""
        program = Path(sys.executable).parent / "mooncake_master"
        command = [
            str(program) if program.exists() else shutil.which("mooncake_master") or str(program),
            f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={self.metadata_port}", "--http_metadata_server_host=127.0.0.1",
            f"--metrics_port={self._metrics_port}", "--metrics_host=127.0.0.1", "--logtostderr", *OPTIONS,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        wait_until(self._answers, "mooncake_master answers")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        with contextlib.suppress(OSError):
            for port in (self.port, self.metadata_port):
                socket.create_connection(("127.0.0.1", port), HANG_S).close()
            return True
        return False

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end; harmless when it has ended."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self._process.wait(HANG_S)


@contextlib.contextmanager
def mooncake_master(folder: Path, *, starts: bool = True) -> Iterator[MooncakeMaster]:
    """A master that ends with the block. Skips the test where there is none."""
    skip_without_mooncake()
    with reserved_port() as port, reserved_port() as metadata_port, reserved_port() as metrics_port:
        master = MooncakeMaster(folder, port, metadata_port, metrics_port)
        try:
            yield master.start() if starts else master
        finally:
            master.kill()
