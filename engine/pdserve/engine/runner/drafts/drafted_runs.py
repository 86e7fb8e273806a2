"""Results of a step in which some rows have drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.common.request.engine_types import LogprobsLists
from pdserve.engine.runner.inputs.input_batch import InputBatch
from pdserve.engine.runner.inputs.sampled_inputs import SampledPlan
from pdserve.engine.runner.results.finite_values import not_finite
from pdserve.engine.sampling.sampler import SamplerOutput
from pdserve.engine.scheduler_output import NO_TOKEN, GrammarOutput, ModelRunnerOutput, RequestFailure
from pdserve.engine.speculation.confirmed_runs import NO_DRAFT, confirmed_lengths


def without_late_masks(plan: SampledPlan, grammar: GrammarOutput) -> SampledPlan:
    """The plan in which no run goes on after its last position that has a mask, for rows with a grammar."""
    if plan.runs is None:
        return plan
    num_masks = Counter(grammar.structured_output_request_ids)
    is_last = [
        offset == num_masks.get(req_id, 0) - 1
        for req_id, offset in zip(plan.req_ids, plan.runs.offsets.tolist(), strict=True)
    ]
    return replace(plan, runs=replace(plan.runs, drafts=np.where(is_last, NO_DRAFT, plan.runs.drafts)))


def read_runs(
    batch: InputBatch,
    plan: SampledPlan,
    is_finite: NDArray[np.bool_],
    sampled: SamplerOutput,
    result: ModelRunnerOutput,
    dtype: torch.dtype,
    num_tokens: Mapping[str, int] | None = None,
) -> None:
    """Append the tokens of a step with drafts to the batch, and write them into `result`, as `ModelRunner.read` does.

    A run ends before a position that has no token: a later step samples it again as its first. num_tokens: tokens of each run that
    is not held back, where rank 0 has found them; None: what the drafts confirm.
    """
    if plan.runs is None:
        raise ValueError("no row has drafts")
    numbers = plan.firsts
    token_ids = sampled.sampled_token_ids[numbers]
    if num_tokens is None:
        has_failed = np.array([number in sampled.failed for number in numbers.tolist()])
        is_usable = is_finite & (token_ids != NO_TOKEN) & ~has_failed
        confirmed = confirmed_lengths(token_ids, plan.runs.drafts, is_usable, plan.runs.lengths)
    else:
        confirmed = np.array([num_tokens.get(plan.req_ids[first], 0) for first in plan.runs.firsts.tolist()])
    logprobs = {} if sampled.logprobs is None else sampled.logprobs.lists()
    all_ids: list[int] = sampled.sampled_token_ids.tolist()
    for first, length in zip(plan.runs.firsts.tolist(), confirmed.tolist(), strict=True):
        req_id, row = plan.req_ids[first], int(plan.rows[first])
        is_there, number = batch.rows.get(req_id) == row, int(numbers[first])
        if req_id in result.held_back:
            if is_there:
                batch.append_run(row, [])
            continue
        if not is_finite[first]:
            result.failed_requests[req_id] = RequestFailure.of(not_finite("logits", dtype))
        num_sequences = int(plan.num_sequences[first])
        if is_there and num_sequences > 1:
            batch.append_tokens(np.array([row]), sampled.sampled_token_ids[number : number + 1])
        elif is_there:
            batch.append_run(row, all_ids[number : number + length])
        for sequence in range(number, number + num_sequences):
            # one sequence has several tokens, or several have one each
            run = range(sequence, sequence + length)
            place = len(result.req_ids)
            if sequence in sampled.failed:
                result.failed[place] = RequestFailure.of(sampled.failed[sequence])
            if run.start in logprobs:
                result.logprobs[place] = _joined([logprobs[number] for number in run])
            result.req_ids.append(req_id)
            result.sampled_token_ids.append([all_ids[number] for number in run])


def _joined(parts: list[LogprobsLists]) -> LogprobsLists:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.followed_by(part)
    return whole
