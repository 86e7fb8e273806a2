"""`child`: a process for checks that may abort or hang; it returns its results as JSON lines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import IO, TypeVar

import msgspec

_LAST_CHARS = 300
"""Last characters of a failed child's output that are shown."""

Answer = TypeVar("Answer")


class ChildBroke(Exception):
    """The child ended without a result or printed something else; the text says which."""


class RunningChild:
    """A running child process, made by `child`."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self.timed_out = False
        self._process = process
        self._errors = errors

    def answer(self, kind: type[Answer]) -> Answer:
        """The next line that the child prints, decoded. Raises: ChildBroke; TimeoutError after `expire`."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            code = self._process.wait()
            if self.timed_out:
                raise TimeoutError
            how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4 * _LAST_CHARS))
            last = " ".join(self._errors.read().decode(errors="replace").split())[-_LAST_CHARS:]
            raise ChildBroke(f"{how}: {last}" if last else how)
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            raise ChildBroke(f"it printed something else than an answer: {error}") from error

    def send(self, value: object) -> None:
        """Write one JSON line to its standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(value) + b"\n")

    def expire(self) -> None:
        """Kill it, so that the call that waits for its answer raises TimeoutError."""
        self.timed_out = True
        self._process.kill()


@contextlib.contextmanager
def child(
    module: str, *arguments: str, timeout_s: float, environ: Mapping[str, str] | None = None
) -> Iterator[RunningChild]:
    """Run `python -m module arguments`; kill it when the block or its time ends. environ: added to this process's environment."""
    with (
        tempfile.TemporaryFile() as errors,  # not a pipe: a library that logs much would fill it and block
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments], bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **(environ or {})},
        ) as process,
    ):  # fmt: skip
        started = RunningChild(process, errors)
        timer = threading.Timer(timeout_s, started.expire)
        timer.daemon = True
        timer.start()
        try:
            yield started
        finally:
            timer.cancel()
            process.kill()
