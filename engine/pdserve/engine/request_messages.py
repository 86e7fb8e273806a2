"""A request and its outputs as messages between two processes. If one cannot be sent or read, only it fails, with its field."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from pdserve.common.errors import InternalError, InvalidRequest, PeerError
from pdserve.common.ipc.frames import MAX_FRAME_BYTES
from pdserve.common.request.engine_types import EngineCoreOutputs, EngineCoreRequest
from pdserve.engine.output_stream import refused_outputs

encode = msgspec.msgpack.Encoder().encode
ENCODING_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, PeerError, msgspec.MsgspecError)
"""Errors with which a value is not encoded, or is longer than a message may be."""
_TOKEN_BYTES = 5
"""Largest encoding of a token id."""
_decode_request = msgspec.msgpack.Decoder(EngineCoreRequest).decode


def unsendable(request: EngineCoreRequest, error: Exception) -> InvalidRequest:
    """The refusal of a request of which one of `ENCODING_ERRORS` was raised."""
    field = _field_at_fault(request)
    return InvalidRequest(f"{field} cannot be sent to the engine's process: {error}", field)


def _field_at_fault(request: EngineCoreRequest) -> str:
    """The first sampling parameter that cannot be encoded; without any, the longest part of the prompt."""
    for field in msgspec.structs.fields(request.sampling_params):
        try:
            encode(getattr(request.sampling_params, field.name))
        except ENCODING_ERRORS:
            return field.name
    num_bytes = {
        "prompt_token_ids": _TOKEN_BYTES * len(request.prompt_token_ids),
        "prompt_embeds": 0 if request.prompt_embeds is None else len(request.prompt_embeds.data),
        "multi_modal_data": sum(len(feature.data) for feature in request.mm_features),
    }
    return max(num_bytes, key=num_bytes.__getitem__)


def decode_request(encoded: msgspec.Raw) -> EngineCoreRequest:
    """Raises: InvalidRequest with the field."""
    try:
        return _decode_request(encoded)
    except msgspec.DecodeError as error:
        named = re.search(r"`\$\.(\w+)", str(error))
        raise InvalidRequest(f"the request cannot be read: {error}", named and named[1]) from error


def output_messages(outputs: EngineCoreOutputs) -> Iterator[bytes]:
    """The encoded messages of one step. An output that no message holds ends its request; the others are sent."""
    payload = encode(outputs)
    if len(payload) <= MAX_FRAME_BYTES:
        yield payload
    elif len(outputs.outputs) > 1:
        for output in outputs.outputs:
            yield from output_messages(EngineCoreOutputs(outputs=[output]))
        yield encode(msgspec.structs.replace(outputs, outputs=[]))
    else:
        [output] = outputs.outputs
        error = InternalError(f"an output has {len(payload)} bytes, at most {MAX_FRAME_BYTES} can be sent")
        yield encode(refused_outputs(output.request_id, error))
