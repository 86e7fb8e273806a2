"""Conversion between our types and generated messages, in one place; received values are validated here."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from pdserve.common.block_hash import DIGEST_BYTES, BlockHasher
from pdserve.common.errors import DigestMismatch, InvalidRequest, PeerError, PromptTooLong
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.engine_types import EngineCoreOutput, FinishReason, LogprobsLists
from pdserve.common.request.pooling_params import PoolingParams, PoolingType
from pdserve.common.request.prepared_request import (
    MAX_EOS_TOKEN_IDS,
    MAX_TENANT_BYTES,
    PreparedRequest,
    ResumeState,
    verify_client_request_id,
    verify_request_id,
)
from pdserve.common.request.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGITS_PROCESSORS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    NamedLogitsProcessor,
    RequestOutputKind,
    SamplingParams,
    clamped_logit_bias,
)
from pdserve.common.request.structured_outputs import FIELD, MAX_CHOICES, StructuredOutputsParams
from pdserve.common.request.trace_headers import valid_trace_headers
from pdserve.common.timeline import to_unix_ns
from pdserve.v1 import kv_source_pb2, request_pb2

_SAMPLING_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "skip_special_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "spaces_between_special_tokens",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "n",
    "best_of",
)
_SAMPLING_PLAIN = ("include_stop_str_in_output", "ignore_eos")
_FINISH_TO_WIRE = {
    FinishReason.STOP: request_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: request_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: request_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: request_pb2.FINISH_REASON_ERROR,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}
_KIND_TO_WIRE = {
    RequestOutputKind.CUMULATIVE: request_pb2.OUTPUT_KIND_CUMULATIVE,
    RequestOutputKind.DELTA: request_pb2.OUTPUT_KIND_DELTA,
    RequestOutputKind.FINAL_ONLY: request_pb2.OUTPUT_KIND_FINAL_ONLY,
}
_KIND_FROM_WIRE = {wire: kind for kind, wire in _KIND_TO_WIRE.items()}
_KIND_FROM_WIRE[request_pb2.OUTPUT_KIND_UNSPECIFIED] = RequestOutputKind.CUMULATIVE
_POOLING_TO_WIRE: dict[PoolingType, request_pb2.PoolingType.ValueType] = {
    "last": request_pb2.POOLING_TYPE_LAST,
    "mean": request_pb2.POOLING_TYPE_MEAN,
}
_POOLING_FROM_WIRE = {wire: name for name, wire in _POOLING_TO_WIRE.items()}
_POOLING_FROM_WIRE[request_pb2.POOLING_TYPE_UNSPECIFIED] = PoolingParams().pooling_type


def sampling_to_wire(params: SamplingParams) -> request_pb2.SamplingParams:
    message = request_pb2.SamplingParams(
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=params.bad_words,
        bad_words_token_ids=[request_pb2.TokenSequence(token_ids=ids) for ids in params.bad_words_token_ids],
        output_kind=_KIND_TO_WIRE[params.output_kind],
        logits_processors=[
            request_pb2.LogitsProcessor(name=one.name, args=msgspec.json.encode(one.args).decode())
            for one in params.logits_processors
        ],
    )
    for name in (*_SAMPLING_OPTIONAL, *_SAMPLING_PLAIN):
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

    Raises: InvalidRequest for values outside their limits; for too many entries before anything is made of them.
    """
    verify_entries(message, vocab_size)
    given: dict[str, object] = dict(defaults or {})
    given |= {name: getattr(message, name) for name in _SAMPLING_OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    given |= {name: getattr(message, name) for name in _SAMPLING_PLAIN}
    output_kind = _KIND_FROM_WIRE.get(message.output_kind)
    if output_kind is None:
        raise InvalidRequest(f"output_kind is {message.output_kind}, which is none", "output_kind")
    params = SamplingParams(
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
    params.verify()
    return params


MAX_BAD_WORDS_TOKEN_IDS = 2 * MAX_BAD_WORDS
"""A text is spelled with and without a space before it."""
MAX_BAD_WORD_TOKENS = 4 * MAX_BAD_WORD_CHARS + 1
"""Most tokens of one spelling: one per byte, and the space."""
_MOST_ENTRIES: Mapping[str, tuple[int, str]] = {
    "stop": (MAX_STOP_STRINGS, " strings"),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, " ids"),
    "logit_bias": (MAX_LOGIT_BIASES, " tokens"),
    "bad_words": (MAX_BAD_WORDS, " texts"),
    "bad_words_token_ids": (MAX_BAD_WORDS_TOKEN_IDS, " sequences"),
    "logits_processors": (MAX_LOGITS_PROCESSORS, ""),
}


def verify_entries(message: request_pb2.SamplingParams, vocab_size: int | None) -> None:
    """A client's or a peer's message, before anything is made of it. vocab_size: None where it is not known.

    Raises: InvalidRequest for more entries of a field than it may have.
    """
    for field, (limit, unit) in _MOST_ENTRIES.items():
        if (num := len(getattr(message, field))) > limit:
            raise InvalidRequest(f"{field} must be at most {limit}{unit}, not {num}", field)
    for place, sequence in enumerate(message.bad_words_token_ids):
        if (num := len(sequence.token_ids)) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words_token_ids[{place}] must be at most {MAX_BAD_WORD_TOKENS} tokens, not {num}",
                "bad_words_token_ids",
            )
    if (num := len(message.structured_outputs.choice)) > MAX_CHOICES:
        raise InvalidRequest(f"structured_outputs.choice must have 1 to {MAX_CHOICES} texts, not {num}", FIELD)
    if vocab_size is not None and (num := len(message.allowed_token_ids)) > vocab_size:
        raise InvalidRequest(f"allowed_token_ids must be at most {vocab_size} tokens, not {num}", "allowed_token_ids")


def _logits_processors(message: request_pb2.SamplingParams) -> Iterator[NamedLogitsProcessor]:
    for place, one in enumerate(message.logits_processors):
        try:
            args = msgspec.json.decode(one.args, type=dict[str, Any]) if one.args else {}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(
                f"logits_processors[{place}].args must be a JSON object: {error}", "logits_processors"
            ) from error
        yield NamedLogitsProcessor(name=one.name, args=args)


def pooling_to_wire(params: PoolingParams) -> request_pb2.PoolingParams:
    return request_pb2.PoolingParams(
        pooling_type=_POOLING_TO_WIRE[params.pooling_type], normalize=params.normalize, dimensions=params.dimensions
    )


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


def prepared_to_wire(request: PreparedRequest) -> request_pb2.PreparedRequest:
    return request_pb2.PreparedRequest(
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
        resume=None if request.resume is None else _resume_to_wire(request.resume),
    )


def _resume_to_wire(resume: ResumeState) -> request_pb2.ResumeState:
    return request_pb2.ResumeState(index=resume.index, output_token_ids=resume.output_token_ids)


def _resume_from_wire(message: request_pb2.PreparedRequest) -> ResumeState | None:
    if not message.HasField("resume"):
        return None
    return ResumeState(index=message.resume.index, output_token_ids=list(message.resume.output_token_ids))


def prepared_from_wire(
    message: request_pb2.PreparedRequest, hasher: BlockHasher, max_model_len: int, vocab_size: int | None = None
) -> PreparedRequest:
    """The request with block hashes of this worker's own making: what names cached KV is never taken from a caller.

    Trace headers that are no valid trace context are left out. `sampling` of an embedding is not read.

    Raises: InvalidRequest, PromptTooLong before anything is hashed; DigestMismatch when the request digest is not that
    of these tokens under this root and deployment key.
    """
    _verify_prepared(message, max_model_len)
    is_embedding = message.HasField("pooling")
    params = SamplingParams() if is_embedding else sampling_from_wire(message.sampling, vocab_size=vocab_size)
    if message.resume.index >= params.n:
        raise InvalidRequest(
            f"request.resume.index is {message.resume.index}, below n ({params.n}) is needed", "resume"
        )
    token_ids = list(message.prompt_token_ids)
    given = [*token_ids, *message.resume.output_token_ids]
    block_hashes = hasher.extend(message.hash_root, given)
    if hasher.request_digest(message.hash_root, block_hashes, given) != message.request_digest:
        raise DigestMismatch(
            f"request.request_digest is {message.request_digest.hex()}, which is not that of the {len(given)} tokens "
            "under request.hash_root and this worker's deployment key"
        )
    return PreparedRequest(
        request_id=message.request_id,
        prompt_token_ids=token_ids,
        sampling_params=params,
        eos_token_ids=tuple(message.eos_token_ids),
        block_hashes=block_hashes,
        hash_root=message.hash_root,
        request_digest=message.request_digest,
        deadline=time.monotonic() + message.deadline_s,
        trace_headers=valid_trace_headers(message.trace_headers),
        client_request_id=message.client_request_id,
        priority=message.priority,
        tenant=message.tenant,
        pooling_params=pooling_from_wire(message.pooling) if is_embedding else None,
        resume=_resume_from_wire(message),
    )


def _verify_prepared(message: request_pb2.PreparedRequest, max_model_len: int) -> None:
    """Check sizes and lengths. Raises: InvalidRequest; a router never sends such a request, an attacker may."""
    num_tokens = len(message.prompt_token_ids) + len(message.resume.output_token_ids)
    verify_request_id(message.request_id)
    if not message.prompt_token_ids:
        raise InvalidRequest("request.prompt_token_ids is empty", "prompt_token_ids")
    if num_tokens > max_model_len:
        raise PromptTooLong(
            f"request.prompt_token_ids and request.resume have {num_tokens} tokens, max_model_len is {max_model_len}",
            "prompt_token_ids",
        )
    if (num := len(message.eos_token_ids)) > MAX_EOS_TOKEN_IDS:
        raise InvalidRequest(
            f"request.eos_token_ids has {num} tokens, at most {MAX_EOS_TOKEN_IDS} are allowed", "eos_token_ids"
        )
    if message.HasField("pooling") and message.HasField("resume"):
        raise InvalidRequest("request.resume is given, and an embedding has no output to go on from", "resume")
    for field in ("hash_root", "request_digest"):
        if (size := len(getattr(message, field))) != DIGEST_BYTES:
            raise InvalidRequest(f"request.{field} has {size} bytes, {DIGEST_BYTES} are needed", field)
    if not 0 < message.deadline_s <= 86_400:
        raise InvalidRequest(
            f"request.deadline_s is {message.deadline_s}, above 0 and at most 86400 is needed", "deadline_s"
        )
    verify_client_request_id(message.client_request_id)
    if len(message.tenant) > MAX_TENANT_BYTES:
        raise InvalidRequest(
            f"request.tenant has {len(message.tenant)} bytes, at most {MAX_TENANT_BYTES} are allowed", "tenant"
        )


def layout_to_wire(layout: KvLayout) -> kv_source_pb2.KvLayout:
    return kv_source_pb2.KvLayout(**{name: getattr(layout, name) for name in layout.__struct_fields__})


def layout_from_wire(message: kv_source_pb2.KvLayout) -> KvLayout:
    return KvLayout(**{name: getattr(message, name) for name in KvLayout.__struct_fields__})


def finish_reason_to_wire(reason: FinishReason | None) -> request_pb2.FinishReason.ValueType:
    return request_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_WIRE[reason]


def finish_reason_from_wire(value: request_pb2.FinishReason.ValueType) -> FinishReason | None:
    """Unknown values, which a newer peer may send, read as an error that ended the sequence."""
    if value == request_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return _FINISH_FROM_WIRE.get(value, FinishReason.ERROR)


def logprobs_to_wire(logprobs: LogprobsLists | None) -> request_pb2.Logprobs | None:
    if logprobs is None or not len(logprobs):
        return None
    return request_pb2.Logprobs(
        width=len(logprobs.logprobs[0]),
        token_ids=[token_id for entries in logprobs.logprob_token_ids for token_id in entries],
        logprobs=[value for entries in logprobs.logprobs for value in entries],
        sampled_ranks=logprobs.sampled_token_ranks,
    )


def logprobs_from_wire(message: request_pb2.Logprobs) -> LogprobsLists:
    """Raises: PeerError when the lists do not fit together."""
    width, count = message.width, len(message.sampled_ranks)
    if not width or len(message.token_ids) != width * count or len(message.logprobs) != width * count:
        raise PeerError(
            f"a worker sent log-probabilities of {count} tokens with {width} entries each, but "
            f"{len(message.token_ids)} token ids and {len(message.logprobs)} values"
        )
    starts = range(0, width * count, width)
    return LogprobsLists(
        [list(message.token_ids[start : start + width]) for start in starts],
        [list(message.logprobs[start : start + width]) for start in starts],
        list(message.sampled_ranks),
    )


PIECE_BYTES = 1 << 20
"""Bytes of a prompt's log-probabilities, in one message."""
_ENTRY_BYTES = 9
"""Bytes of one candidate, at most: a varint of 5 bytes and a float."""


def prompt_logprobs_to_wire(logprobs: LogprobsLists | None) -> Iterator[request_pb2.PromptLogprobs]:
    """Messages with the log-probabilities of a whole prompt, in pieces."""
    if logprobs is None:
        return
    width = len(logprobs.logprobs[0]) if len(logprobs) else 1
    step = max(1, PIECE_BYTES // (width * _ENTRY_BYTES + _ENTRY_BYTES))
    for start in range(0, len(logprobs), step):
        piece = logprobs_to_wire(logprobs.part(start, start + step))
        yield request_pb2.PromptLogprobs(first_position=start + 1, logprobs=piece)


def outputs_to_wire(output: EngineCoreOutput, moment_names: Mapping[str, tuple[str, ...]]) -> request_pb2.Outputs:
    """moment_names: the engine's moment -> the timeline's moments for it."""
    moments = {wire: at for name, at in output.moments.items() for wire in moment_names.get(name, ())}
    return request_pb2.Outputs(
        index=output.index,
        first_position=output.first_position,
        token_ids=output.new_token_ids,
        finish_reason=finish_reason_to_wire(output.finish_reason),
        stop_token_id=output.stop_reason if isinstance(output.stop_reason, int) else None,
        num_cached_tokens=output.num_cached_tokens,
        moments=moments_to_wire(moments) if moments else (),
        logprobs=logprobs_to_wire(output.new_logprobs),
    )


MAX_MOMENTS = 64
MAX_MOMENT_NAME_CHARS = 64


def moments_to_wire(moments_monotonic_s: Mapping[str, float]) -> list[request_pb2.Moment]:
    return [request_pb2.Moment(name=name, unix_ns=to_unix_ns(at)) for name, at in moments_monotonic_s.items()]


def moments_from_wire(messages: Iterable[request_pb2.Moment]) -> dict[str, int]:
    """name -> wall-clock nanoseconds. Raises: PeerError for more or longer ones than a timeline has."""
    moments: dict[str, int] = {}
    for message in messages:
        name = message.name
        if len(moments) == MAX_MOMENTS or len(name) > MAX_MOMENT_NAME_CHARS:
            raise PeerError(
                f"a worker sent more than {MAX_MOMENTS} moments, or one with a name of {len(name)} characters"
            )
        moments[name] = message.unix_ns
    return moments
