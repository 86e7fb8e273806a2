"""What one step computes, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from pdserve.common.errors import PdServeError
from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.request import Request

NO_TOKEN = -1
"""Sampled where a sequence's rules leave no token."""


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work, by vLLM's field names."""

    scheduled_new_reqs: list[Request] = field(default_factory=list)
    """Sequences that enter the batch, new or after preemption; their block tables are read once, now."""
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    """Blocks added to sequences that are in the batch already."""
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """request_id -> tokens to compute, at least 1 each."""
    finished_req_ids: list[str] = field(default_factory=list)
    """Sequences that left the batch since the last step: finished or preempted."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to) block ids: copied before anything is computed, for sequences that begin in the middle of a block."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """One step's result."""

    req_ids: list[str]
    """Sequences whose last known token was computed: each has one new token. A prompt that n sequences continue stands
    here n times in a row, in the order of their indexes."""
    sampled_token_ids: list[int]
    """`NO_TOKEN` for a sequence whose rules leave none."""
    logprobs: dict[int, LogprobsLists] = field(default_factory=dict)
    """Place in `req_ids` -> of the new token; only of those that ask."""
    failed: Mapping[int, PdServeError] = field(default_factory=dict)
    """Place in `req_ids` -> what ends the request instead of its new token."""
    pooler_output: dict[str, list[float]] = field(default_factory=dict)
    """request_id -> its embedding; of those whose prompt is complete."""
    prompt_logprobs: dict[str, LogprobsLists] = field(default_factory=dict)
    """request_id -> of the prompt tokens after those computed in this step; only of those that ask."""
    held_back: Set[str] = frozenset()
    """Sequences that got no token though all theirs were computed: the mask of their grammar has not come. Their last token
    counts as not computed."""
    device_event: object | None = None
    """On a GPU: recorded after the step's last kernel that writes KV."""
    failed_requests: Mapping[str, PdServeError] = field(default_factory=dict)
    """request_id -> what ends it whatever else came of it, in the middle of its prompt too."""
