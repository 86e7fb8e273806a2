"""`AuditLog`: one JSON line per client request and per failed authentication, without content.

A separate thread writes the lines, so that a hanging disk delays no request. Lines that do not fit into the queue are counted and
dropped.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import logging.handlers
import os
import queue
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import msgspec

from pdserve.common import clock
from pdserve.common.errors import ConfigError
from pdserve.router.tenants.client import Client

log = logging.getLogger(__name__)

STDERR = "stderr"
MAX_WAITING_LINES = 65_536
CLOSE_S = 2.0
MAX_FAILURES_PER_S = 50
"""Most lines per second about failed authentications; further failures are counted in the next line."""


class _Queue(logging.handlers.QueueHandler):
    """A handler that never waits; lines that do not fit into the queue are counted."""

    def __init__(self, lines: queue.Queue[Any]) -> None:
        super().__init__(lines)
        self.num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The unchanged record, which needs no formatting and stays in this process."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            if not self.num_dropped:
                log.error("the audit log cannot keep up: lines are left out, and counted in pdserve_audit_lines_total")
            self.num_dropped += 1


class _Writer(logging.handlers.QueueListener):
    """Writes queued lines in a thread, which ends with the process if the disk hangs."""

    def __init__(self, lines: queue.Queue[Any], handler: logging.Handler) -> None:
        super().__init__(lines, handler)
        self._lines = lines

    def enqueue_sentinel(self) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)

    def stop(self) -> None:
        """Wait a limited time, unlike the overridden method; the thread continues until it has written the queue."""
        self.enqueue_sentinel()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            self._thread = self._thread if self._thread.is_alive() else None

    @property
    def has_stopped(self) -> bool:
        """True if the thread has ended."""
        return self._thread is None


class _File(logging.handlers.WatchedFileHandler):
    """A file handler that opens the file, with mode 600, again after a rotation."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))


class AuditLog:
    """Writes audit lines to the target; without a target, writes nothing. `close` it."""

    def __init__(self, target: str | None, model: str, *, clock: Callable[[], float] = clock.unix_s) -> None:
        """target: a path, `stderr`, or None. model: the model's name for clients. clock: seconds since 1970.

        Raises: ConfigError for a file that cannot be written.
        """
        self._model = model
        self._clock = clock
        self._second, self._num_failures, self._num_left_out = 0, 0, 0
        self.num_written = 0
        self._logger: logging.Logger | None = None
        if target is None:
            return
        # not a registered logger: several routers may be in one process, and no other handler may get these lines
        self._logger = logging.Logger("pdserve.audit", logging.INFO)
        lines: queue.Queue[Any] = queue.Queue(MAX_WAITING_LINES)
        self._queue = _Queue(lines)
        self._logger.addHandler(self._queue)
        handler = _handler(target)
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._writer = _Writer(lines, handler)
        self._handler = handler
        self._writer.start()

    @property
    def num_dropped(self) -> int:
        """Number of lines that were dropped because the queue was full."""
        return self._queue.num_dropped if self._logger is not None else 0

    def request(
        self,
        client: Client,
        *,
        request_id: str,
        operation: str,
        num_prompts: int,
        num_prompt_tokens: int,
        num_output_tokens: int,
        num_cached_tokens: int,
        outcome: str,
        status: int,
        duration_s: float,
        lora_name: str = "",
    ) -> None:
        """Log the end of a client's request. request_id: "" if it was refused before it had an id.

        operation: OpenTelemetry's name of its kind. outcome: a finish reason, or the code of an error. status: the HTTP status,
        also for gRPC. num_cached_tokens: as workers report it, even if the client gets 0. lora_name: the adapter; "" for none.
        """
        self._write(
            "request",
            client,
            request_id=request_id,
            operation=operation,
            model=lora_name or self._model,
            prompts=num_prompts,
            prompt_tokens=num_prompt_tokens,
            output_tokens=num_output_tokens,
            cached_tokens=num_cached_tokens,
            outcome=outcome,
            status=status,
            duration_s=round(duration_s, 4),
        )

    def failed_authentication(self, address: str, cause: str) -> None:
        """Log a missing or invalid key, at a bounded rate."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._num_failures = second, 0
        self._num_failures += 1
        if self._num_failures > MAX_FAILURES_PER_S:
            self._num_left_out += 1
            return
        left_out, self._num_left_out = self._num_left_out, 0
        self._write(
            "authentication_failed", Client(address=address), outcome="unauthenticated", status=401, cause=cause,
            left_out=left_out,
        )  # fmt: skip

    def _write(self, event: str, client: Client, **fields: object) -> None:
        if self._logger is None:
            return
        moment = datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "event": event,
            "tenant": client.tenant,
            "key": client.key_name,
            "address": client.address,
            **fields,
        }
        self.num_written += 1
        self._logger.info("%s", msgspec.json.encode(line).decode())

    def close(self) -> None:
        """Write the queued lines, for at most twice `CLOSE_S`, and close the file."""
        if self._logger is not None:
            self._writer.stop()
            if self._writer.has_stopped:
                self._handler.close()


def _handler(target: str) -> logging.Handler:
    if target == STDERR:
        return logging.StreamHandler(sys.stderr)
    try:
        return _File(Path(target))
    except OSError as error:
        raise ConfigError(f"audit_log {target}: {error.strerror}") from error
