"""`AuditLog`: one JSON line per client request and per failed authentication, without content."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from pdserve.common import clock
from pdserve.common.errors import ConfigError
from pdserve.common.telemetry.line_writer import LineFile, LineSink, LineWriter, StandardError
from pdserve.router.tenants.client import Client

STDERR = "stderr"
MAX_WAITING_LINES = 65_536
MAX_FAILURES_PER_S = 50
"""Most lines per second about failed authentications; further failures are counted in the next line."""


class AuditLog:
    """Writes audit lines to the target; without a target, writes nothing. `close` it."""

    def __init__(self, target: str | None, model: str, *, clock: Callable[[], float] = clock.unix_s) -> None:
        """target: a path, `stderr`, or None. model: the model's name for clients. clock: seconds since 1970.

        Raises: ConfigError for a file that cannot be written.
        """
        self._model = model
        self._clock = clock
        self._second, self._num_failures, self._num_left_out = 0, 0, 0
        self._writer: LineWriter[dict[str, object]] | None = None
        if target is not None:
            self._writer = LineWriter("audit_log", _sink(target), msgspec.json.encode, max_waiting=MAX_WAITING_LINES)

    @property
    def counts(self) -> Mapping[str, int]:
        """Outcome -> lines, as `LineWriter.counts`."""
        return self._writer.counts if self._writer is not None else {"written": 0, "dropped": 0}

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
        if self._writer is None:
            return
        moment = datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)
        self._writer.put(
            {
                "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                "event": event,
                "tenant": client.tenant,
                "key": client.key_name,
                "address": client.address,
                **fields,
            }
        )

    def close(self) -> None:
        """Write the queued lines, for a limited time, and close the file."""
        if self._writer is not None:
            self._writer.close()


def _sink(target: str) -> LineSink:
    if target == STDERR:
        return StandardError()
    try:
        return LineFile(Path(target))
    except OSError as error:
        raise ConfigError(f"audit_log {target}: {error.strerror}") from error
