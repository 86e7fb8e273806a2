"""Sampling and pooling parameters of the public protocol; received values are counted here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.pooling_params import PoolingParams, PoolingType
from pdserve.common.request.sampling_params import (
    MAX_ENTRIES,
    NamedLogitsProcessor,
    RequestOutputKind,
    SamplingParams,
    clamped_logit_bias,
    verify_num_entries,
)
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.v1 import request_pb2

_OPTIONAL = tuple(
    field.name
    for field in request_pb2.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.message_type is None
)
"""Fields of one value, which the message has or not; they have the names of those of `SamplingParams`."""
_PLAIN = ("include_stop_str_in_output", "ignore_eos")
_KIND_FROM_WIRE = {
    request_pb2.OUTPUT_KIND_UNSPECIFIED: RequestOutputKind.CUMULATIVE,
    request_pb2.OUTPUT_KIND_CUMULATIVE: RequestOutputKind.CUMULATIVE,
    request_pb2.OUTPUT_KIND_DELTA: RequestOutputKind.DELTA,
    request_pb2.OUTPUT_KIND_FINAL_ONLY: RequestOutputKind.FINAL_ONLY,
}
_POOLING_FROM_WIRE: dict[request_pb2.PoolingType.ValueType, PoolingType] = {
    request_pb2.POOLING_TYPE_UNSPECIFIED: PoolingParams().pooling_type,
    request_pb2.POOLING_TYPE_LAST: "last",
    request_pb2.POOLING_TYPE_MEAN: "mean",
}


def _structured_outputs_from_wire(message: request_pb2.StructuredOutputs) -> StructuredOutputsParams:
    texts = ("json", "regex", "grammar", "structural_tag", "whitespace_pattern")
    return StructuredOutputsParams(
        choice=tuple(message.choice) or None,
        json_object=message.json_object or None,
        disable_any_whitespace=message.disable_any_whitespace,
        disable_additional_properties=message.disable_additional_properties,
        **{name: getattr(message, name) for name in texts if message.HasField(name)},  # type: ignore[arg-type]
    )


def sampling_from_wire(
    message: request_pb2.SamplingParams,
    defaults: Mapping[str, object] | None = None,
    *,
    vocab_size: int | None = None,
) -> SamplingParams:
    """Absent fields take `defaults`, then ours. vocab_size: where it is known.

    Raises: InvalidRequest for too many entries, before anything is made of them; other limits are those of `verify`.
    """
    verify_entries(message, vocab_size)
    given: dict[str, object] = dict(defaults or {})
    given |= {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    given |= {name: getattr(message, name) for name in _PLAIN}
    output_kind = _KIND_FROM_WIRE.get(message.output_kind)
    if output_kind is None:
        raise InvalidRequest(f"output_kind is {message.output_kind}, which is none", "output_kind")
    return SamplingParams(
        output_kind=output_kind,
        logits_processors=tuple(_logits_processors(message)),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=clamped_logit_bias(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids) or None,
        bad_words=tuple(message.bad_words),
        bad_words_token_ids=tuple(tuple(sequence.token_ids) for sequence in message.bad_words_token_ids),
        structured_outputs=(
            _structured_outputs_from_wire(message.structured_outputs)
            if message.HasField("structured_outputs")
            else None
        ),
        **given,  # type: ignore[arg-type]
    )


def verify_entries(message: request_pb2.SamplingParams, vocab_size: int | None) -> None:
    """A client's or a peer's message, before anything is made of it. vocab_size: None where it is not known.

    Raises: InvalidRequest for more entries of a field than it may have.
    """
    verify_num_entries(
        {field: len(getattr(message, field)) for field in (*MAX_ENTRIES, "allowed_token_ids")},
        vocab_size,
        of_bad_words=[len(sequence.token_ids) for sequence in message.bad_words_token_ids],
        num_choices=len(message.structured_outputs.choice),
    )


def _logits_processors(message: request_pb2.SamplingParams) -> Iterator[NamedLogitsProcessor]:
    for place, one in enumerate(message.logits_processors):
        try:
            args = msgspec.json.decode(one.args, type=dict[str, Any]) if one.args else {}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(
                f"logits_processors[{place}].args must be a JSON object: {error}", "logits_processors"
            ) from error
        yield NamedLogitsProcessor(name=one.name, args=args)


def pooling_from_wire(message: request_pb2.PoolingParams) -> PoolingParams:
    """Absent fields have our defaults. Raises: InvalidRequest for values outside their limits."""
    pooling_type = _POOLING_FROM_WIRE.get(message.pooling_type)
    if pooling_type is None:
        raise InvalidRequest(f"pooling_type is {message.pooling_type}, which is none", "pooling_type")
    params = PoolingParams(
        pooling_type=pooling_type,
        normalize=message.normalize if message.HasField("normalize") else True,
        dimensions=message.dimensions if message.HasField("dimensions") else None,
    )
    params.verify()
    return params
