"""`GenerationRequest` as the bytes that travel in a call's message: a msgpack map of the fields that are not default.

Arrival costs no more than the bytes: the message is split into parts without building their values, entries are counted
by their headers, and only then is anything decoded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import msgspec

from pdserve.common import clock
from pdserve.common.errors import InvalidRequest, PeerError
from pdserve.common.request.generation_request import MAX_EOS_TOKEN_IDS, GenerationRequest, verify_num_given
from pdserve.common.request.multimodal import MAX_IMAGES
from pdserve.common.request.sampling_params import (
    MAX_ENTRIES,
    MAX_LOGITS_PROCESSOR_ARGS_BYTES,
    MAX_LOGITS_PROCESSORS,
    SamplingParams,
    verify_num_entries,
)
from pdserve.common.request.structured_outputs import MAX_SPEC_BYTES
from pdserve.common.request.trace_headers import valid_trace_headers

MAX_FIELDS = 64
"""Limit of a request, and of its sampling parameters."""
MAX_TRACE_HEADERS = 64
_MAX_ANY_BYTES = {
    # the only fields with values of any type; msgpack has up to 9 bytes for what JSON writes in 3
    "structured_outputs": 2 * MAX_SPEC_BYTES,
    "logits_processors": 4 * MAX_LOGITS_PROCESSORS * MAX_LOGITS_PROCESSOR_ARGS_BYTES,
}
_FIELD = re.compile(r"`\$\.([a-z_]+)")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(GenerationRequest).decode
_split = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_split_array = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_names = msgspec.msgpack.Decoder(tuple[str, ...]).decode

Parts = dict[str, msgspec.Raw]


def encode_request(request: GenerationRequest) -> bytes:
    """The request for workers. Its deadline goes as what is left of it."""
    return _encode(msgspec.structs.replace(request, timeout_s=request.remaining_s, deadline=0.0, cache_salt=None))


def decode_request(data: bytes, max_model_len: int, vocab_size: int | None = None) -> GenerationRequest:
    """The request of a peer, whose deadline begins now; `verify_received` and the engine check its values.

    vocab_size: where it is known.

    Raises: PeerError for what is no such map; InvalidRequest naming a field that is unknown here, has too many entries or
    another type; PromptTooLong.
    """
    try:
        parts = _parts(data, "request")
        ignorable = _names(parts["ignorable"]) if num_entries(parts.get("ignorable")) in range(1, MAX_FIELDS) else ()
        known = _known(parts, GenerationRequest, ignorable)
        _verify_request_entries(known, max_model_len)
        if "sampling_params" in known:
            sampling = _parts(known["sampling_params"], "request.sampling_params")
            known_sampling = _known(sampling, SamplingParams, ignorable, "sampling_params.")
            _verify_sampling_entries(known_sampling, vocab_size)
            if len(known_sampling) < len(sampling):
                known["sampling_params"] = msgspec.Raw(_encode(known_sampling))
        changed = len(known) < len(parts) or known.get("sampling_params") is not parts.get("sampling_params")
        request = _decode(_encode(known) if changed else data)
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error))
        raise InvalidRequest(f"request: {error}", field[1] if field else None) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise PeerError(f"a request of {len(data)} bytes cannot be decoded: {error}") from None
    request.deadline = clock.monotonic() + request.timeout_s
    request.trace_headers = valid_trace_headers(request.trace_headers)
    return request


def _parts(data: bytes | msgspec.Raw, name: str) -> Parts:
    """Field -> its bytes. Raises: InvalidRequest for too many, or one that comes twice; msgspec.DecodeError."""
    if (num := num_entries(data)) > MAX_FIELDS:
        raise InvalidRequest(f"{name} has {num} fields, at most {MAX_FIELDS} are allowed")
    parts = _split(data)
    if len(parts) != num:
        # of equal fields only the last was counted
        raise InvalidRequest(f"{name} has a field twice")
    return parts


def _known(parts: Parts, kind: type[msgspec.Struct], ignorable: Collection[str], prefix: str = "") -> Parts:
    """The parts that are fields of `kind`. Raises: InvalidRequest for another, unless the request says that it may be ignored."""
    known = {name: part for name, part in parts.items() if name in kind.__struct_fields__}
    for name in parts.keys() - known.keys():
        if prefix + name not in ignorable:
            raise InvalidRequest(
                f"request.{prefix}{name[:64]!r} is a field that this worker does not know", prefix + name[:64]
            )
    return known


def _verify_request_entries(parts: Parts, max_model_len: int) -> None:
    verify_num_given(
        num_entries(parts.get("prompt_token_ids")) + num_entries(parts.get("output_token_ids")), max_model_len
    )
    for field, limit in (
        ("eos_token_ids", MAX_EOS_TOKEN_IDS),
        ("trace_headers", MAX_TRACE_HEADERS),
        ("ignorable", MAX_FIELDS),
        ("mm_features", MAX_IMAGES),
    ):
        if (num := num_entries(parts.get(field))) > limit:
            unit = "tokens" if field == "eos_token_ids" else "entries"
            raise InvalidRequest(f"request.{field} has {num} {unit}, at most {limit} are allowed", field)


def _verify_sampling_entries(parts: Parts, vocab_size: int | None) -> None:
    counts = {field: num_entries(parts.get(field)) for field in (*MAX_ENTRIES, "allowed_token_ids")}
    verify_num_entries(counts, vocab_size)
    if counts["bad_words_token_ids"]:
        spelled = _split_array(parts["bad_words_token_ids"])
        verify_num_entries({}, of_bad_words=[num_entries(sequence) for sequence in spelled])
    for field, limit in _MAX_ANY_BYTES.items():
        if field in parts and (size := memoryview(parts[field]).nbytes) > limit:
            raise InvalidRequest(f"{field} has {size} bytes, at most {limit} are allowed", field)
    if "structured_outputs" in parts:
        form: Mapping[str, msgspec.Raw] = _split(parts["structured_outputs"])
        verify_num_entries({}, num_choices=num_entries(form.get("choice")))


def num_entries(part: bytes | msgspec.Raw | None) -> int:
    """Entries of an encoded array or map, read only from its header; 0 for anything else."""
    data = memoryview(part or b"")
    first = data[0] if data else 0
    if 0x80 <= first <= 0x9F:
        return first & 0x0F
    if first in (0xDC, 0xDE):
        return int.from_bytes(data[1:3])
    return int.from_bytes(data[1:5]) if first in (0xDD, 0xDF) else 0
