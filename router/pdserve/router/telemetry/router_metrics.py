"""`RouterMetrics`: a router's Prometheus metrics. Requests are counted when they end; states are read at the scrape."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from pdserve.common import clock
from pdserve.common.errors import Cancelled, PdServeError
from pdserve.common.request.cached_tokens import CACHED_SOURCES
from pdserve.common.telemetry.loop_histogram import LoopHistogram
from pdserve.common.telemetry.metrics import LATENCY_BUCKETS_S, TOKEN_BUCKETS_S, Families, by_label
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.placement.block_moves import MOVE_OUTCOMES, BlockMoves
from pdserve.router.placement.role_switching import CHANGE_OUTCOMES
from pdserve.router.workers.worker import RemoteWorker, WorkerState

MIGRATION_OUTCOMES = ("moved", "failed")
"""The next worker continued it; or it was resumed as after a death."""
_KEPT_PAUSES = 256
"""Of sequences that moved, for the median."""


class RouterMetrics:
    """Metrics of one router."""

    def __init__(
        self,
        registry: CollectorRegistry,
        num_requests: Callable[[], int],
        worker_counts: Callable[[], Mapping[str, Mapping[str, int]]],
        num_indexed_blocks: Callable[[], int],
        moves: BlockMoves | None = None,
        num_role_changes: Callable[[], Mapping[tuple[str, str], int]] = dict,
    ) -> None:
        """num_requests: returns the prompts in the router. worker_counts: returns role -> state -> number of workers.
        num_indexed_blocks: returns the number of block hashes in the prefix index. moves: of cached blocks; None counts none.
        num_role_changes: returns (role, outcome) -> changes of role that the router has asked for.
        """

        def seconds(name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
            return Histogram(name, meaning, labels, buckets=buckets, registry=registry)

        def count(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, labels, registry=registry)

        self.request_seconds = seconds("pdserve_request_seconds", "Prompts served, from arrival to the last token.")
        self.ttft_seconds = seconds("pdserve_time_to_first_token_seconds", "From arrival to the first token.")
        self.itl_seconds = LoopHistogram(
            "pdserve_inter_token_latency_seconds", "Between two tokens of one answer.", TOKEN_BUCKETS_S, registry
        )
        self.tpot_seconds = seconds(
            "pdserve_time_per_output_token_seconds",
            "Mean time per token after the first, one observation per answer.",
            buckets=TOKEN_BUCKETS_S,
        )
        self.phase_seconds = seconds(
            "pdserve_request_phase_seconds", "Phases of the critical path; an answer's add up to its time.", "phase"
        )
        self.requests = count("pdserve_requests_total", "Prompts, by outcome.", "outcome")
        self.errors = count(
            "pdserve_errors_total", "Requests that failed, by cause; clients that left are none.", "code"
        )
        self.attempts = count("pdserve_attempts_total", "Attempts, by outcome.", "outcome")
        self.migrations = count(
            "pdserve_migrations_total", "Sequences that another decode worker was to continue, by outcome.", "outcome"
        )
        for outcome in MIGRATION_OUTCOMES:
            self.migrations.labels(outcome)
        self.migration_pause_seconds = seconds(
            "pdserve_migration_pause_seconds",
            "From a sequence's last token at one decode worker to its first at the next.",
            buckets=TOKEN_BUCKETS_S,
        )
        self._pauses_s: deque[float] = deque(maxlen=_KEPT_PAUSES)
        self.placements = count("pdserve_placements_total", "Attempts placed.", "policy", "kind")
        self.resumes_with_other_sampler = count(
            "pdserve_resumes_with_other_sampler_total",
            "Attempts whose workers, or the worker that sampled the tokens before, differ in the version of the sampler.",
        )
        self.placed_calls = PlacedCalls(
            count("pdserve_placed_calls_total", "Calls of attempts placed.", "role", "worker")
        )
        self.adapter_requests = AdapterRequests(
            count("pdserve_lora_requests_total", "Prompts with a LoRA adapter, by adapter.", "adapter")
        )
        self.prompt_tokens = count("pdserve_prompt_tokens_total", "Prompt tokens of answers that began.")
        cached_tokens = count(
            "pdserve_cached_prompt_tokens_total",
            "The part of the prompt tokens that needed no computing, by the source of their blocks.",
            "source",
        )
        self.cached_tokens = {source: cached_tokens.labels(source) for source in CACHED_SOURCES}
        """Source -> its counter."""
        self.output_tokens = count("pdserve_output_tokens_total", "Tokens sent to clients.")

        def states() -> Iterable[Metric]:
            in_flight, indexed = num_requests(), num_indexed_blocks()
            yield GaugeMetricFamily("pdserve_requests_in_flight", "Prompts in the router now.", value=in_flight)
            yield GaugeMetricFamily("pdserve_indexed_blocks", "Block hashes in the prefix index.", value=indexed)
            moved = dict.fromkeys(MOVE_OUTCOMES, 0) if moves is None else moves.counts()
            meaning = "Moves of cached blocks to the worker that computes a prompt, by outcome."
            yield by_label(CounterMetricFamily, "pdserve_block_moves", meaning, ["outcome"], moved)
            meaning = "Bytes of the moves that brought their blocks, as they were placed."
            num_bytes = 0 if moves is None else moves.num_bytes
            yield CounterMetricFamily("pdserve_block_move_bytes", meaning, value=num_bytes)
            pairs = [(role.value, outcome) for role in WorkerRole for outcome in CHANGE_OUTCOMES]
            changes = dict.fromkeys(pairs, 0) | dict(num_role_changes())
            meaning = "Changes of a worker's role that this router has asked for by itself, by role and outcome."
            yield by_label(CounterMetricFamily, "pdserve_role_changes", meaning, ["role", "outcome"], changes)
            labels, by_role = ["role", "state"], worker_counts()
            workers = {(role, state): number for role, of in by_role.items() for state, number in of.items()}
            yield by_label(GaugeMetricFamily, "pdserve_workers", "Workers, by role and state.", labels, workers)

        registry.register(Families(states))

    def failed(self, error: PdServeError) -> None:
        """Count the error that ended a prompt or a request. A client that left is not one."""
        if not isinstance(error, Cancelled):
            self.errors.labels(error.code).inc()

    def migrated(self, pause_s: float | None) -> None:
        """Count a sequence that another worker was to continue. pause_s: as of `PromptTrace.migrated`."""
        self.migrations.labels("failed" if pause_s is None else "moved").inc()
        if pause_s is not None:
            self.migration_pause_seconds.observe(pause_s)
            self._pauses_s.append(pause_s)

    @property
    def median_migration_pause_s(self) -> float | None:
        """Of the last sequences that moved; None without any."""
        return statistics.median(self._pauses_s) if self._pauses_s else None

    def error_counts(self) -> dict[str, int]:
        """Error's code -> requests since the start."""
        return _counts(self.errors, "code")

    def migration_counts(self) -> dict[str, int]:
        """Outcome -> sequences that another worker was to continue, since the start."""
        return _counts(self.migrations, "outcome")


def _counts(counter: Counter, label: str) -> dict[str, int]:
    """Value of its only label -> count."""
    # a counter also has samples of the times at which its series began
    samples = (sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total"))
    return {sample.labels[label]: int(sample.value) for sample in samples}


MAX_ADAPTER_SERIES = 128


class AdapterRequests:
    """Counts prompts in a metric with the label `adapter`: by name for the first 128 names, and as `other` for later ones."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._names: set[str] = set()

    def add(self, name: str, num_prompts: int) -> None:
        """Count prompts of one request."""
        if name not in self._names and len(self._names) < MAX_ADAPTER_SERIES:
            self._names.add(name)
        self._counter.labels(name if name in self._names else "other").inc(num_prompts)


KEPT_S = 600.0
"""Seconds for which a dead worker's series remains after its last call, so that some scrapes see its last value."""


class PlacedCalls:
    """Counts calls in a metric with the labels role and worker."""

    def __init__(self, counter: Counter, *, clock: Callable[[], float] = clock.monotonic) -> None:
        self._counter = counter
        self._clock = clock
        self._last: dict[tuple[str, str], tuple[RemoteWorker, float]] = {}
        """Series -> (worker of its last call, time of that call)."""

    def add(self, role: str, worker: RemoteWorker) -> None:
        """Count a call at a worker."""
        series, now = (role, worker.identity.worker_id), self._clock()
        if series not in self._last:
            self._forget(now)
        self._last[series] = worker, now
        self._counter.labels(*series).inc()

    def _forget(self, now: float) -> None:
        for series, (worker, placed_at) in list(self._last.items()):
            if worker.state is WorkerState.DEAD and now - placed_at > KEPT_S:
                del self._last[series]
                self._counter.remove(*series)
