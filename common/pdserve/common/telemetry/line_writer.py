"""`LineWriter`: writes the lines of a log of its own in a thread, so that a hanging disk delays no request.

What does not fit into the queue, and what the disk does not take, is counted and left out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from pdserve.common.rate_limited_log import RateLimitedLog

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Seconds for which a process that ends waits for its last lines."""
T = TypeVar("T")


class LineSink(Protocol):
    """Where lines go."""

    def write(self, line: bytes) -> None:
        """Append a line, which ends with a newline. Raises: OSError."""
        ...

    def close(self) -> None: ...


class StandardError:
    """The standard error of this process."""

    def write(self, line: bytes) -> None:
        sys.stderr.write(line.decode())
        sys.stderr.flush()

    def close(self) -> None:
        """Nothing: the stream is the process's."""


class Rotation(NamedTuple):
    """FILE becomes FILE.1, FILE.1 becomes FILE.2 and so on, before FILE would be larger than this."""

    max_bytes: int
    max_files: int
    """FILE included; the oldest one is deleted."""


class LineFile:
    """A file with mode 600. Where something else renames it, as log rotation does, it is opened again under its name.

    With a rotation of its own it belongs to one process, and begins empty: what an earlier process wrote is moved aside.
    """

    def __init__(self, path: Path, rotation: Rotation | None = None) -> None:
        """Raises: OSError, also for a file that is rotated and that another process writes, or that is no regular file."""
        self._path = path
        self._rotation = rotation
        self._file = self._opened()
        self._size = os.fstat(self._file).st_size
        self._is_torn = False
        """True if the file ends within a line."""
        if rotation is not None and self._size:
            self._rotate(rotation)

    def write(self, line: bytes) -> None:
        self._follow()
        if self._rotation is not None and self._size and self._size + len(line) > self._rotation.max_bytes:
            self._rotate(self._rotation)
        rest = b"\n" + line if self._is_torn else line
        begun = False
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
                begun = True
        except OSError:
            if begun:
                self._drop_part()
            raise
        self._is_torn = False
        self._size += len(line)

    def close(self) -> None:
        os.close(self._file)

    def _opened(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        if self._rotation is None:
            return os.open(self._path, flags, 0o600)
        # a pipe without a reader would make the open wait
        file = os.open(self._path, flags | os.O_NONBLOCK, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OSError(errno.EBUSY, "another process writes it") from error
        except OSError:
            os.close(file)
            raise
        return file

    def _reopen(self) -> None:
        file = self._opened()
        os.close(self._file)
        self._file, self._size, self._is_torn = file, os.fstat(file).st_size, False

    def _follow(self) -> None:
        """Open the file again if its name no longer leads to it."""
        own = os.fstat(self._file)
        try:
            named = self._path.stat()
        except FileNotFoundError:
            named = None
        if named is None or (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino):
            self._reopen()

    def _rotate(self, rotation: Rotation) -> None:
        for number in range(rotation.max_files - 1, 0, -1):
            source = self._numbered(number - 1)
            if source.exists():
                source.replace(self._numbered(number))
        if rotation.max_files == 1:
            self._path.unlink(missing_ok=True)
        self._reopen()

    def _numbered(self, number: int) -> Path:
        return self._path if number == 0 else self._path.with_name(f"{self._path.name}.{number}")

    def _drop_part(self) -> None:
        """After a write that failed within a line."""
        self._is_torn = True
        if self._rotation is not None:  # else other processes may have written after it
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
                self._is_torn = False


class LineWriter(Generic[T]):
    """For use by one thread, as the event loop's. `close` it."""

    def __init__(
        self,
        setting: str,
        sink: LineSink,
        encode: Callable[[T], bytes],
        *,
        max_waiting: int,
        max_waiting_bytes: int | None = None,
    ) -> None:
        """setting: names the log in warnings. encode: makes a line of an item, in the writer's thread.

        max_waiting: limit of waiting items; max_waiting_bytes: of the sum of their sizes, as `put` is told them; None: no limit.
        """
        self._setting = setting
        self._sink = sink
        self._encode = encode
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._items: queue.SimpleQueue[tuple[T, int] | None] = queue.SimpleQueue()
        self._warnings = RateLimitedLog(log)
        # each of these counts is written by one thread only
        self._num_put = self._bytes_put = self._num_refused = 0
        self._num_taken = self._bytes_taken = self._num_failed = 0
        self._num_written = 0
        self._thread = threading.Thread(target=self._run, name=f"{setting}-writer", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        """Outcome -> lines: `written`, and `dropped`, which did not fit into the queue or were not taken by the disk."""
        return {"written": self._num_written, "dropped": self._num_refused + self._num_failed}

    @property
    def has_stopped(self) -> bool:
        """True if the thread has written its last line."""
        return not self._thread.is_alive()

    def put(self, item: T, num_bytes: int = 0) -> None:
        """Have an item written. Never waits. num_bytes: its size while it waits."""
        waiting = self._num_put - self._num_taken
        waiting_bytes = self._bytes_put - self._bytes_taken
        limit = self._max_waiting_bytes
        if waiting >= self._max_waiting or (limit is not None and waiting and waiting_bytes + num_bytes > limit):
            self._num_refused += 1
            self._warnings.warning("full", "%s: the disk cannot keep up, lines are left out", self._setting)
            return
        self._num_put += 1
        self._bytes_put += num_bytes
        self._items.put((item, num_bytes))

    def close(self) -> None:
        """Write the waiting lines, for at most `CLOSE_S`, and close the sink; a thread whose disk hangs ends with the process."""
        self._items.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (entry := self._items.get()) is not None:
            item, num_bytes = entry
            try:
                self._sink.write(self._encode(item) + b"\n")
                self._num_written += 1
            except Exception as error:
                self._num_failed += 1
                cause = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
                self._warnings.warning("failed", "%s: a line could not be written: %s", self._setting, cause)
            self._num_taken += 1
            self._bytes_taken += num_bytes
        self._sink.close()
