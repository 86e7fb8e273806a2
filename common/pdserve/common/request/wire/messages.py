"""Conversion between our types and generated messages, in one place; received values are validated here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pdserve.common.errors import PdServeError, PeerError
from pdserve.common.kv_layout import BlockShape, KvLayout
from pdserve.common.request.block_source import BlockSource
from pdserve.common.request.cached_tokens import CACHED_SOURCES, CachedTokens
from pdserve.common.request.engine_types import EngineCoreOutput, FinishReason, LogprobsLists
from pdserve.common.timeline import to_unix_ns
from pdserve.common.worker_identity import WorkerRole
from pdserve.v1 import kv_source_pb2, prefill_pb2, request_pb2, step_stream_pb2, worker_pb2

_FINISH_TO_WIRE = {reason: request_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_ENDED_TO_WIRE = dict(prefill_pb2.Ended.How.items())
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}
_ROLE_TO_WIRE = {WorkerRole.PREFILL: worker_pb2.ROLE_PREFILL, WorkerRole.DECODE: worker_pb2.ROLE_DECODE}
_ROLE_FROM_WIRE = {wire: role for role, wire in _ROLE_TO_WIRE.items()}


def layout_to_wire(layout: KvLayout) -> kv_source_pb2.KvLayout:
    shapes = [kv_source_pb2.BlockShape(**msgspec.structs.asdict(shape)) for shape in layout.shapes]
    return kv_source_pb2.KvLayout(**msgspec.structs.asdict(layout) | {"shapes": shapes})


def layout_from_wire(message: kv_source_pb2.KvLayout) -> KvLayout:
    shapes = tuple(
        BlockShape(**{name: getattr(shape, name) for name in BlockShape.__struct_fields__}) for shape in message.shapes
    )
    fields = {name: getattr(message, name) for name in KvLayout.__struct_fields__}
    groups = {name: tuple(getattr(message, name)) for name in ("group_shapes", "group_windows", "group_chunks")}
    return KvLayout(**fields | groups | {"shapes": shapes})


def role_to_wire(role: WorkerRole | None) -> worker_pb2.Role.ValueType:
    return worker_pb2.ROLE_UNSPECIFIED if role is None else _ROLE_TO_WIRE[role]


def role_from_wire(value: worker_pb2.Role.ValueType) -> WorkerRole | None:
    """None for an unspecified role, and for one that a newer peer may have."""
    return _ROLE_FROM_WIRE.get(value)


def block_source_from_wire(submission: step_stream_pb2.Submission) -> BlockSource | None:
    """None if a submission names none."""
    if not submission.HasField("block_source"):
        return None
    given = submission.block_source
    return BlockSource(given.worker_id, given.epoch, given.address, given.limit_s)


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


def prompt_logprobs_to_wire(
    logprobs: LogprobsLists | None, first_position: int = 1
) -> Iterator[request_pb2.PromptLogprobs]:
    """Messages with the log-probabilities of a prompt, in pieces. first_position: of the first one, 0 being the first token."""
    if logprobs is None:
        return
    width = len(logprobs.logprobs[0]) if len(logprobs) else 1
    step = max(1, PIECE_BYTES // (width * _ENTRY_BYTES + _ENTRY_BYTES))
    for start in range(0, len(logprobs), step):
        piece = logprobs_to_wire(logprobs.part(start, start + step))
        yield request_pb2.PromptLogprobs(first_position=first_position + start, logprobs=piece)


def cached_tokens_to_wire(tokens: CachedTokens | None) -> request_pb2.CachedTokens | None:
    return request_pb2.CachedTokens(**tokens.by_source()) if tokens is not None and tokens.total else None


def cached_tokens_from_wire(message: request_pb2.CachedTokens) -> CachedTokens:
    return CachedTokens(**{source: getattr(message, source) for source in CACHED_SOURCES})


def outputs_to_wire(output: EngineCoreOutput, moment_names: Mapping[str, tuple[str, ...]]) -> request_pb2.Outputs:
    """moment_names: the engine's moment -> the timeline's moments for it."""
    moments = {wire: at for name, at in output.moments.items() for wire in moment_names.get(name, ())}
    return request_pb2.Outputs(
        index=output.index,
        first_position=output.first_position,
        token_ids=output.new_token_ids,
        finish_reason=finish_reason_to_wire(output.finish_reason),
        stop_token_id=output.stop_reason if isinstance(output.stop_reason, int) else None,
        cached_tokens=cached_tokens_to_wire(output.cached_tokens),
        moments=moments_to_wire(moments) if moments else (),
        logprobs=logprobs_to_wire(output.new_logprobs),
    )


MAX_MOMENTS = 64
MAX_MOMENT_NAME_CHARS = 64


def ended_to_wire(state: str, cause: PdServeError | None) -> prefill_pb2.Ended:
    """state: a name of `SourceState`; those that `Ended.How` lacks are failures, or the router's own doing."""
    how = _ENDED_TO_WIRE.get(state, prefill_pb2.Ended.HOW_UNSPECIFIED)
    return prefill_pb2.Ended(how=how, cause="" if cause is None else cause.message)


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
