"""`IterationStats`: what one step meant to its requests, for stat loggers."""

from __future__ import annotations

import msgspec

from pdserve.common import clock
from pdserve.common.request.engine_types import FinishReason, ModelRunnerStats


class FinishedRequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended, or a turn of a session. Times in seconds; None for a stage that it did not reach."""

    finish_reason: FinishReason
    """The reason of the sequence that ended last."""
    e2e_latency: float
    """From arrival to end."""
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens_param: int | None
    queued_time: float | None
    """From arrival to the first step."""
    prefill_time: float | None
    """From the first step to the first token."""
    decode_time: float | None
    """From the first token to the last."""
    inference_time: float | None
    """From the first step to the last token."""
    mean_time_per_output_token: float | None
    """After the first; None for a single token."""


class IterationStats(msgspec.Struct, kw_only=True):
    """One step, as its reader sees it."""

    iteration_timestamp: float = msgspec.field(default_factory=clock.unix_s)
    """Seconds since 1970."""
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    """Tokens of the prompts that have their first token in this step."""
    num_preempted_reqs: int = 0
    time_to_first_tokens_iter: list[float] = []
    """Seconds from arrival, of these prompts."""
    inter_token_latencies_iter: list[float] = []
    """Seconds since the sequence's last token, of each sequence with another one."""
    finished_requests: list[FinishedRequestStats] = []
    model_runner_stats: ModelRunnerStats | None = None
    """None if the step computed nothing."""
