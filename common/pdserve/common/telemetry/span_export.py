"""`SpanExport`: the SDK's own export of spans in batches, with counts of their outcomes and an end in bounded time.

Ending a span never waits: a full queue drops spans, and an endpoint that does not respond loses a batch. Both are counted, and a
collector that fails is logged once when it begins to and once when it is back.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from pdserve.common.telemetry.metrics import ExportCounts

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 2.0
"""Seconds for which a stopping process waits for the last batches."""
_MAX_QUEUED_SPANS = 2048
"""The SDK's own default."""


class SpanExport(BatchSpanProcessor):
    """Hands finished spans to an exporter, in batches. The SDK's variables `OTEL_BSP_...` set their size and delay."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        """endpoint: for the log. Raises: ValueError for a variable that is not a positive number."""
        self.counts = ExportCounts()
        self._max_queued = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, "").strip() or _MAX_QUEUED_SPANS)
        self._num_ended = 0
        self._counted = _CountedExporter(exporter, endpoint, self.counts)
        super().__init__(self._counted, max_queue_size=self._max_queued)

    def on_end(self, span: ReadableSpan) -> None:
        """Any thread; never waits."""
        super().on_end(span)
        if span.context is not None and span.context.trace_flags.sampled:
            self._num_ended += 1
            # the SDK does not say what it drops; while its queue is full, these are all that neither left nor wait
            self.counts.dropped = max(self.counts.dropped, self._num_ended - self._counted.num_spans - self._max_queued)

    def shutdown(self) -> None:
        """Export what is queued, within `SHUTDOWN_TIMEOUT_S`; what is still queued then ends with the process."""
        stopping = threading.Thread(target=super().shutdown, name="span-export-end", daemon=True)
        stopping.start()
        stopping.join(SHUTDOWN_TIMEOUT_S)
        self.counts.dropped = max(self.counts.dropped, self._num_ended - self._counted.num_spans)


class _CountedExporter(SpanExporter):
    """Counts what another exporter was given, by outcome."""

    def __init__(self, exporter: SpanExporter, endpoint: str, counts: ExportCounts) -> None:
        self.num_spans = 0
        """Spans that left the queue."""
        self._exporter = exporter
        self._endpoint = endpoint
        self._counts = counts
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Raises nothing."""
        self.num_spans += len(spans)
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            # without its text, which may repeat the collector's URL and so a password
            log.debug("a batch of spans could not be exported: %s", type(error).__name__)
            result = SpanExportResult.FAILURE
        self._count(len(spans), result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _count(self, num_spans: int, done: bool) -> None:
        if done:
            self._counts.exported += num_spans
            if self._failing:
                log.warning("spans reach %s again; %d were lost", self._endpoint, self._counts.failed)
        else:
            self._counts.failed += num_spans
            if not self._failing:
                log.warning(
                    "spans cannot be exported to %s: it does not take them; requests are served as usual",
                    self._endpoint,
                )
        self._failing = not done
