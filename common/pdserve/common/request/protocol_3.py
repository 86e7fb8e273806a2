"""Requests as services of protocol version 3 exchange them, in generated messages. Goes with the version after this one."""

from __future__ import annotations

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.generation_request import MAX_EOS_TOKEN_IDS, GenerationRequest, verify_num_given
from pdserve.common.request.params_wire import (
    KIND_TO_WIRE,
    POOLING_TO_WIRE,
    SAMPLING_OPTIONAL,
    SAMPLING_PLAIN,
    pooling_from_wire,
    sampling_from_wire,
)
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.v1 import decode_pb2, request_pb2

LAST_VERSION = 3
"""Workers of this version take no `generation_request`."""


def sampling_to_wire(params: SamplingParams) -> request_pb2.SamplingParams:
    message = request_pb2.SamplingParams(
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        bad_words_token_ids=[request_pb2.TokenSequence(token_ids=ids) for ids in params.bad_words_token_ids],
        output_kind=KIND_TO_WIRE[params.output_kind],
        logits_processors=[
            request_pb2.LogitsProcessor(name=one.name, args=msgspec.json.encode(one.args).decode())
            for one in params.logits_processors
        ],
    )
    for name in (*SAMPLING_OPTIONAL, *SAMPLING_PLAIN):
        if (value := getattr(params, name)) is not None:
            setattr(message, name, value)
    if params.structured_outputs is not None:
        message.structured_outputs.CopyFrom(_structured_outputs_to_wire(params.structured_outputs))
    return message


def _structured_outputs_to_wire(params: StructuredOutputsParams) -> request_pb2.StructuredOutputs:
    return request_pb2.StructuredOutputs(
        json=None if params.json is None else params.json_schema,
        regex=params.regex,
        choice=params.choice,
        grammar=params.grammar,
        json_object=bool(params.json_object),
        structural_tag=params.structural_tag,
        disable_any_whitespace=params.disable_any_whitespace,
        disable_additional_properties=params.disable_additional_properties,
        whitespace_pattern=params.whitespace_pattern,
    )


def pooling_to_wire(params: PoolingParams) -> request_pb2.PoolingParams:
    return request_pb2.PoolingParams(
        pooling_type=POOLING_TO_WIRE[params.pooling_type], normalize=params.normalize, dimensions=params.dimensions
    )


def request_to_version_3(request: GenerationRequest) -> request_pb2.PreparedRequest:
    """The request for a worker of version 3."""
    message = request_pb2.PreparedRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_wire(request.sampling_params),
        eos_token_ids=request.eos_token_ids,
        hash_root=request.hash_root,
        request_digest=request.request_digest,
        deadline_s=request.remaining_s,
        trace_headers=request.trace_headers,
        client_request_id=request.client_request_id,
        priority=request.priority,
        tenant=request.tenant,
        pooling=None if request.pooling_params is None else pooling_to_wire(request.pooling_params),
    )
    if request.is_resumed:
        resume = request_pb2.ResumeState(index=request.index, output_token_ids=request.output_token_ids)
        message.resume.CopyFrom(resume)
    return message


def turn_to_version_3(request: GenerationRequest) -> decode_pb2.NextTurn:
    """A session's later turn for a worker of version 3."""
    return decode_pb2.NextTurn(
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_wire(request.sampling_params),
        trace_headers=request.trace_headers,
    )


def request_of_version_3(
    message: request_pb2.PreparedRequest, max_model_len: int, vocab_size: int | None = None
) -> GenerationRequest:
    """The request of a router of version 3; `sampling` of an embedding is not read. Raises: InvalidRequest, PromptTooLong."""
    verify_num_given(len(message.prompt_token_ids) + len(message.resume.output_token_ids), max_model_len)
    if (num := len(message.eos_token_ids)) > MAX_EOS_TOKEN_IDS:
        raise InvalidRequest(
            f"request.eos_token_ids has {num} tokens, at most {MAX_EOS_TOKEN_IDS} are allowed", "eos_token_ids"
        )
    is_embedding, is_resumed = message.HasField("pooling"), message.HasField("resume")
    if is_embedding and is_resumed:
        raise InvalidRequest("request.resume is given, and an embedding has no output to go on from", "resume")
    params = SamplingParams() if is_embedding else sampling_from_wire(message.sampling, vocab_size=vocab_size)
    return GenerationRequest(
        request_id=message.request_id,
        prompt_token_ids=list(message.prompt_token_ids),
        sampling_params=params,
        pooling_params=pooling_from_wire(message.pooling) if is_embedding else None,
        output_token_ids=list(message.resume.output_token_ids),
        index=message.resume.index,
        n=1 if is_resumed else params.n,
        eos_token_ids=tuple(message.eos_token_ids),
        hash_root=message.hash_root,
        request_digest=message.request_digest,
        timeout_s=message.deadline_s,
        trace_headers=dict(message.trace_headers),
        client_request_id=message.client_request_id,
        priority=message.priority,
        tenant=message.tenant,
    )


def turn_of_version_3(
    message: decode_pb2.DecodeTurn, max_model_len: int, vocab_size: int | None = None
) -> GenerationRequest:
    """A session's turn of a router of version 3. Raises: InvalidRequest, PromptTooLong."""
    if message.HasField("open"):
        return request_of_version_3(message.open, max_model_len, vocab_size)
    turn = message.next
    verify_num_given(len(turn.prompt_token_ids), max_model_len)
    return GenerationRequest(
        prompt_token_ids=list(turn.prompt_token_ids),
        sampling_params=sampling_from_wire(turn.sampling, vocab_size=vocab_size),
        trace_headers=dict(turn.trace_headers),
    )
