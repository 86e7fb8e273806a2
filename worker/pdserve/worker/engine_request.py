"""Makes an `EngineCoreRequest` from a `PreparedRequest`."""

from __future__ import annotations

import time

from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.prepared_request import PreparedRequest


def sequence_stem(request_id: str, attempt: int) -> str:
    """`request.attempt`, so that late events of an attempt do not reach the next."""
    return f"{request_id}.{attempt}"


def engine_request_id(request_id: str, attempt: int, index: int) -> str:
    """`request.attempt.index`, equal to `EngineCoreRequest.sequence_id`."""
    return f"{sequence_stem(request_id, attempt)}.{index}"


def make_engine_request(
    request: PreparedRequest,
    attempt: int,
    *,
    remote_prefill: bool = False,
    transfer_source: bool = False,
    prefill_here: bool = False,
    local_prefill_tokens: int | None = None,
    resumable: bool = False,
) -> EngineCoreRequest:
    """The `EngineCoreRequest` of a request: all of its sequences, or the one that is resumed."""
    resume = request.resume
    index = 0 if resume is None else resume.index
    return EngineCoreRequest(
        request_id=engine_request_id(request.request_id, attempt, index),
        sequence_stem=sequence_stem(request.request_id, attempt),
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        pooling_params=request.pooling_params,
        output_token_ids=[] if resume is None else resume.output_token_ids,
        eos_token_ids=request.eos_token_ids,
        arrival_time=time.monotonic(),
        block_hashes=request.block_hashes,
        hash_root=request.hash_root,
        remote_prefill=remote_prefill,
        transfer_source=transfer_source,
        prefill_here=prefill_here,
        local_prefill_tokens=local_prefill_tokens,
        resumable=resumable,
        priority=request.priority,
        tenant=request.tenant,
        index=index,
        n=request.num_sequences,
        trace_headers=request.trace_headers,
        client_request_id=request.client_request_id,
        deadline=request.deadline,
    )
