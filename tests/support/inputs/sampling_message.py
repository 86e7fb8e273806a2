"""Sampling parameters as a client of `InferenceService` sends them."""

from __future__ import annotations

import msgspec

from pdserve.common.request.sampling_params import RequestOutputKind, SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.v1 import request_pb2

_PLAIN = [
    field.name
    for field in request_pb2.SamplingParams.DESCRIPTOR.fields
    if field.message_type is None and field.enum_type is None and not field.is_repeated
]
_KINDS = {
    RequestOutputKind.CUMULATIVE: request_pb2.OUTPUT_KIND_CUMULATIVE,
    RequestOutputKind.DELTA: request_pb2.OUTPUT_KIND_DELTA,
    RequestOutputKind.FINAL_ONLY: request_pb2.OUTPUT_KIND_FINAL_ONLY,
}


def sampling_to_wire(params: SamplingParams) -> request_pb2.SamplingParams:
    """The message of a client with these parameters."""
    message = request_pb2.SamplingParams(
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        bad_words_token_ids=[request_pb2.TokenSequence(token_ids=ids) for ids in params.bad_words_token_ids],
        output_kind=_KINDS[params.output_kind],
        logits_processors=[
            request_pb2.LogitsProcessor(name=one.name, args=msgspec.json.encode(one.args).decode())
            for one in params.logits_processors
        ],
    )
    for name in _PLAIN:
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
