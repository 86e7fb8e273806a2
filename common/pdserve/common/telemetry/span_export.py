"""`SpanExport`: sends finished spans to a collector, in a thread of its own.

Ending a span never waits: a full queue drops it, and an endpoint that does not respond loses a batch. Both are counted, and
logged once when they begin and once when they end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from pdserve.common.telemetry.metrics import ExportCounts

log = logging.getLogger(__name__)

MAX_QUEUED_SPANS = 8192
MAX_BATCH_SPANS = 512
EXPORT_TIMEOUT_S = 2.0
"""Seconds for the collector to accept one batch."""
SHUTDOWN_TIMEOUT_S = 2.0
"""Seconds for which a stopping process waits for the last batches."""


class SpanExport(SpanProcessor):
    """Hands finished spans to an exporter, in batches."""

    def __init__(
        self, exporter: SpanExporter, endpoint: str, *, every_s: float, max_queued: int = MAX_QUEUED_SPANS
    ) -> None:
        """endpoint: for the log. every_s: how long spans wait for others; a full batch goes at once."""
        self.counts = ExportCounts()
        self._exporter = exporter
        self._endpoint = endpoint
        self._every_s = every_s
        self._max_queued = max_queued
        self._queue: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._leaving = False
        self._gives_up_at = float("inf")
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        """Any thread; never waits."""
        if self._leaving or len(self._queue) >= self._max_queued:
            self.counts.dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) >= MAX_BATCH_SPANS:
            self._wake.set()

    def shutdown(self) -> None:
        """Export what is queued, within `SHUTDOWN_TIMEOUT_S`, unless the collector takes nothing anyway.

        Harmless when called again.
        """
        if self._leaving:
            return
        self._gives_up_at = 0.0 if self._failing else time.monotonic() + SHUTDOWN_TIMEOUT_S
        self._leaving = True
        self._wake.set()
        if self._failing:
            self._exporter.shutdown()  # ends its waiting for the next try
        self._thread.join(SHUTDOWN_TIMEOUT_S)
        self.counts.dropped += len(self._queue)
        self._queue.clear()
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """The thread flushes by itself; here only to have the interface whole."""
        self._wake.set()
        return True

    def _run(self) -> None:
        while not self._leaving:
            self._wake.wait(self._every_s)
            self._wake.clear()
            self._export()

    def _export(self) -> None:
        while self._queue and time.monotonic() < self._gives_up_at:
            batch = [self._queue.popleft() for _ in range(min(MAX_BATCH_SPANS, len(self._queue)))]
            try:
                done = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception as error:
                # without its text, which may repeat the collector's URL and so a password
                log.debug("a batch of spans could not be exported: %s", type(error).__name__)
                done = False
            self._count(len(batch), done)

    def _count(self, num_spans: int, done: bool) -> None:
        if done:
            self.counts.exported += num_spans
            if self._failing:
                log.warning("spans reach %s again; %d were lost", self._endpoint, self.counts.failed)
        else:
            self.counts.failed += num_spans
            if not self._failing:
                log.warning(
                    "spans cannot be exported to %s: it does not take them; requests are served as usual",
                    self._endpoint,
                )
        self._failing = not done
