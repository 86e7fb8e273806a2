"""Messages of `StepStreamService` as plain values, in both directions; received ones are validated here."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from itertools import chain
from typing import NamedTuple

from pdserve.common.errors import Overloaded, PdServeError, PeerError, from_code
from pdserve.common.security.peer_message import max_event_bytes
from pdserve.v1 import step_stream_pb2

MAX_COMMANDS = 1024
"""Most ended sequences, cancelled calls and turns, each, in one message of a router."""
MAX_SUBMISSIONS = 512
"""Most submissions in one message of a router: each has up to eight fields of the 8,192 that a message may have."""
MAX_EVENTS = 1024
"""Most events in one message of a worker: each has four fields of the 8,192 that a message may have."""
MAX_ENTRIES = 8192
"""Most entries of the columns in one message: a worker ends a message earlier (`StepOutbox`)."""
_MAX_TOKENS = 1 << 16
"""Tokens of one message, besides those of its last entry, which may be a whole output."""
_MESSAGE_BYTES = 2 << 20
_TOKEN_BYTES = 16
_MAX_END_CHARS = 2000
"""Characters of an error's message."""


def max_step_bytes(max_model_len: int) -> int:
    """Size up to which a router takes a message of a worker: a full one, whose last entry or event is a whole output."""
    return _MESSAGE_BYTES + _TOKEN_BYTES * max_model_len


def max_bulk_bytes(max_model_len: int, vocab_size: int) -> int:
    """The same for the bulk stream, where the last event may be as large as one can be."""
    return _MESSAGE_BYTES + max_event_bytes(max_model_len, vocab_size)


def end_to_wire(error: PdServeError | None) -> step_stream_pb2.CallEnd:
    """error: None if the call has ended well."""
    if error is None:
        return step_stream_pb2.CallEnd()
    return step_stream_pb2.CallEnd(
        code=error.code,
        message=error.message.encode(errors="replace").decode()[:_MAX_END_CHARS],
        field=(error.field or "").encode(errors="replace").decode(),
        retry_after_s=error.retry_after_s if isinstance(error, Overloaded) else 0.0,
    )


def end_from_wire(end: step_stream_pb2.CallEnd) -> PdServeError | None:
    """The peer's error; None if the call has ended well."""
    if not end.code:
        return None
    error = from_code(end.code, end.message, end.field, end.retry_after_s)
    if isinstance(error, Overloaded):
        error.by_peer = True
    return error


class StepTokens(NamedTuple):
    """New tokens of one sequence of a call."""

    key: int
    sequence: int
    """Index in the request."""
    first_position: int
    token_ids: list[int]


class StepEvent(NamedTuple):
    """An event of a call that is more than new tokens."""

    key: int
    message: bytes = b""
    """Serialized: an event of the call's kind, or a `CallEnd`."""
    is_end: bool = False


def end_event(key: int, error: PdServeError | None = None) -> StepEvent:
    """The last event of a call; nothing of the error itself is kept. error: None if it has ended well."""
    return StepEvent(key, end_to_wire(error).SerializeToString(), is_end=True)


def merged(entries: Iterable[StepTokens | StepEvent]) -> list[StepTokens | StepEvent]:
    """The same with fewer entries: tokens of a sequence that follow one another are one, unless an event of their call comes
    between them. The lists of tokens that are passed do not change."""
    kept: list[StepTokens | StepEvent] = []
    places: dict[tuple[int, int], int] = {}
    """Key and sequence -> its last entry."""
    events: dict[int, int] = {}
    """Key -> place of its last event."""
    copied: set[int] = set()
    for entry in entries:
        if isinstance(entry, StepEvent):
            events[entry.key] = len(kept)
            kept.append(entry)
            continue
        name = entry.key, entry.sequence
        place = places.get(name, -1)
        before = kept[place] if place > events.get(entry.key, -1) else None
        if isinstance(before, StepTokens) and before.first_position + len(before.token_ids) == entry.first_position:
            if place in copied:
                before.token_ids.extend(entry.token_ids)
            else:
                copied.add(place)
                kept[place] = before._replace(token_ids=before.token_ids + entry.token_ids)
            continue
        places[name] = len(kept)
        kept.append(entry)
    return kept


def step_outputs(entries: Iterable[StepTokens | StepEvent]) -> step_stream_pb2.StepOutputs:
    """One message, of `merged` entries."""
    keys: list[int] = []
    indexes: list[int] = []
    first_positions: list[int] = []
    token_ids: list[list[int]] = []
    events: list[step_stream_pb2.CallEvent] = []
    for entry in merged(entries):
        if isinstance(entry, StepEvent):
            event = step_stream_pb2.CallEvent(key=entry.key, num_before=len(keys))
            if entry.is_end:
                event.end.MergeFromString(entry.message)
                event.end.SetInParent()
            else:
                event.message = entry.message
            events.append(event)
            continue
        key, index, first_position, ids = entry
        keys.append(key)
        indexes.append(index)
        first_positions.append(first_position)
        token_ids.append(ids)
    num_tokens = [len(ids) for ids in token_ids]
    return step_stream_pb2.StepOutputs(
        keys=keys,
        indexes=indexes if any(indexes) else (),
        first_positions=first_positions,
        num_tokens=num_tokens if num_tokens.count(1) != len(num_tokens) else (),
        token_ids=chain.from_iterable(token_ids),
        events=events,
    )


class Columns(NamedTuple):
    """The columns of a `StepOutputs`, of equal lengths."""

    keys: list[int]
    indexes: list[int]
    first_positions: list[int]
    token_ids: list[list[int]]


def columns_of(message: step_stream_pb2.StepOutputs, max_model_len: int = 1 << 20) -> Columns:
    """The columns, counted before they are converted. max_model_len: of the worker, in tokens.

    Raises: PeerError for more entries, tokens or events than a message may have, columns that do not fit together, an entry
    without a token, or events that are not in their order.
    """
    _verify_count("entries", MAX_ENTRIES, message.keys, message.indexes, message.first_positions, message.num_tokens)
    _verify_count("tokens", _MAX_TOKENS + max_model_len, message.token_ids)
    _verify_count("events", MAX_EVENTS, message.events)
    keys, first_positions = list(message.keys), list(message.first_positions)
    flat, num_tokens, indexes = list(message.token_ids), list(message.num_tokens), list(message.indexes)
    count = len(keys)
    fits = (len(num_tokens), sum(num_tokens)) == (count, len(flat)) if num_tokens else len(flat) == count
    if not fits or len(first_positions) != count or (indexes and len(indexes) != count):
        raise PeerError(
            f"a step has {count} keys, {len(indexes)} indexes, {len(first_positions)} positions, {len(num_tokens)} numbers "
            f"of tokens and {len(flat)} tokens, which do not fit together"
        )
    if num_tokens:
        if 0 in num_tokens:
            raise PeerError(f"entry {num_tokens.index(0)} of a step has no token")
        token_ids, at = [], 0
        for num in num_tokens:
            token_ids.append(flat[at : at + num])
            at += num
    else:
        token_ids = [[token_id] for token_id in flat]
    before = 0
    for event in message.events:
        if not before <= event.num_before <= count:
            raise PeerError(
                f"a step's event comes after {event.num_before} of {count} entries, and one before it after {before}"
            )
        before = event.num_before
    return Columns(keys, indexes or [0] * count, first_positions, token_ids)


def _verify_count(what: str, limit: int, *columns: Sized) -> None:
    """Raises: PeerError."""
    count = max(map(len, columns))
    if count > limit:
        raise PeerError(f"a step has {count} {what}, at most {limit} are possible")
