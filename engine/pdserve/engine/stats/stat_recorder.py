"""`StatRecorder`: makes `IterationStats` of an engine's outputs, and passes them to stat loggers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from pdserve.common import clock
from pdserve.common.request.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    StreamingUpdate,
)
from pdserve.common.telemetry.request_metrics import RequestMetrics, unix_s
from pdserve.engine.stats.iteration_stats import FinishedRequestStats, IterationStats
from pdserve.engine.stats.stat_logger import StatLoggerBase

LOG_EVERY_S = 10.0
log = logging.getLogger(__name__)


class _Turn:
    """A request, or one turn of a session, until its end."""

    __slots__ = ("max_tokens", "metrics", "num_open")

    def __init__(self, arrival_time: float, num_prompt_tokens: int, max_tokens: int | None, num_sequences: int) -> None:
        """arrival_time: `clock.monotonic()` seconds."""
        self.metrics = RequestMetrics(arrival_time=unix_s(arrival_time), num_prompt_tokens=num_prompt_tokens)
        self.max_tokens = max_tokens
        self.num_open = num_sequences


class StatRecorder:
    """Used where the engine's outputs are read. A logger that fails is reported once and gets nothing more."""

    def __init__(self, loggers: Iterable[StatLoggerBase]) -> None:
        self._loggers = list(loggers)
        self._turns: dict[str, deque[_Turn]] = {}
        """Request id -> the running turn, then those that are queued."""
        self._logged_at = clock.monotonic()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Call it before the request can have an output."""
        num_tokens = len(request.prompt_token_ids)
        turn = _Turn(request.arrival_time, num_tokens, request.sampling_params.max_tokens, request.n)
        self._turns[request.request_id] = deque([turn])

    def resume_request(self, update: StreamingUpdate) -> None:
        """Add a session's next turn."""
        if (turns := self._turns.get(update.request_id)) is not None:
            num_tokens = len(update.prompt_token_ids)
            turns.append(_Turn(update.arrival_time, num_tokens, update.sampling_params.max_tokens, 1))

    def record(self, outputs: EngineCoreOutputs) -> None:
        """Pass a step on to the loggers."""
        if not outputs.outputs and outputs.model_runner_stats is None:
            return
        iteration = IterationStats(model_runner_stats=outputs.model_runner_stats)
        for output in outputs.outputs:
            turns = self._turns.get(output.request_id)
            if turns:
                self._see(output, turns, iteration)
        for logger in list(self._loggers):
            try:
                logger.record(outputs.scheduler_stats, iteration)
            except Exception:
                self._drop(logger)
        if clock.monotonic() - self._logged_at >= LOG_EVERY_S:
            self.log()

    def _see(self, output: EngineCoreOutput, turns: deque[_Turn], iteration: IterationStats) -> None:
        turn = turns[0]
        metrics = turn.metrics
        num_preemptions = metrics.num_preemptions
        last = (metrics.token_timestamps.get(output.index) or (None,))[-1]
        is_first = metrics.first_token_time is None
        metrics.see(output)
        iteration.num_generation_tokens += len(output.new_token_ids)
        iteration.num_preempted_reqs += metrics.num_preemptions > num_preemptions
        if is_first and metrics.time_to_first_token is not None:
            iteration.num_prompt_tokens += metrics.num_prompt_tokens
            iteration.time_to_first_tokens_iter.append(metrics.time_to_first_token)
        if last is not None and output.new_token_ids:
            iteration.inter_token_latencies_iter.append(metrics.token_timestamps[output.index][-1] - last)
        if output.finish_reason is None:
            return
        turn.num_open -= 1
        if turn.num_open > 0 and not output.error_code:
            return
        turns.popleft()
        metrics.end()
        iteration.finished_requests.append(_finished(turn, output.finish_reason))
        if output.finished:
            del self._turns[output.request_id]

    def log(self) -> None:
        """Let all loggers log."""
        self._logged_at = clock.monotonic()
        for logger in list(self._loggers):
            try:
                logger.log()
            except Exception:
                self._drop(logger)

    def _drop(self, logger: StatLoggerBase) -> None:
        log.exception("stat logger %s failed, and gets no more statistics", type(logger).__name__)
        self._loggers.remove(logger)


def _finished(turn: _Turn, reason: FinishReason) -> FinishedRequestStats:
    metrics = turn.metrics
    scheduled, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
    return FinishedRequestStats(
        finish_reason=reason,
        e2e_latency=metrics.e2e_latency or 0.0,
        num_prompt_tokens=metrics.num_prompt_tokens,
        num_generation_tokens=metrics.num_generation_tokens,
        max_tokens_param=turn.max_tokens,
        queued_time=metrics.time_in_queue,
        prefill_time=None if scheduled is None or first is None else first - scheduled,
        decode_time=None if first is None or last is None else last - first,
        inference_time=None if scheduled is None or last is None else last - scheduled,
        mean_time_per_output_token=metrics.mean_time_per_output_token,
    )
