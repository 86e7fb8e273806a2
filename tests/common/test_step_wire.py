"""Messages of step streams: what is sent arrives in the order of each call, and what does not fit together is refused."""

from __future__ import annotations

import random

import pytest

from pdserve.common.errors import (
    AdapterUnavailable,
    InvalidRequest,
    Overloaded,
    PdServeError,
    PeerError,
    WorkerLost,
)
from pdserve.common.request.wire.step_wire import (
    StepEvent,
    StepTokens,
    columns_of,
    end_event,
    end_from_wire,
    end_to_wire,
    merged,
    step_outputs,
)
from pdserve.common.security.peer_message import parsed
from pdserve.v1 import step_stream_pb2
from tests.support.inputs.fuzz_cases import Fuzzer
from tests.support.inputs.message_changes import MessageChanges


def random_entries(draw: random.Random, count: int) -> list[StepTokens | StepEvent]:
    """Entries of a few calls with one or two sequences, whose positions mostly follow one another."""
    positions: dict[tuple[int, int], int] = {}
    entries: list[StepTokens | StepEvent] = []
    for number in range(count):
        key, sequence = draw.randint(1, 4), draw.choice((0, 0, 0, 1))
        if draw.random() < 0.2:
            entries.append(StepEvent(key, b"%d" % number))
            continue
        if draw.random() < 0.1:
            positions[key, sequence] = draw.randrange(100)
        first = positions.get((key, sequence), 0)
        token_ids = [draw.randrange(1 << 32) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        positions[key, sequence] = first + len(token_ids)
        entries.append(StepTokens(key, sequence, first, token_ids))
    return entries


def flat(entries: list[StepTokens | StepEvent]) -> dict[int, list[object]]:
    """Call -> its events in order, and between them each sequence's tokens, with position, in order."""
    found: dict[int, list[object]] = {}
    for entry in entries:
        call = found.setdefault(entry.key, [{}])
        if isinstance(entry, StepEvent):
            call += [entry.message, {}]
            continue
        sequences = call[-1]
        assert isinstance(sequences, dict)
        tokens = sequences.setdefault(entry.sequence, [])
        tokens.extend((entry.first_position + at, id_) for at, id_ in enumerate(entry.token_ids))
    return found


def received(message: step_stream_pb2.StepOutputs) -> list[StepTokens | StepEvent]:
    columns, at = columns_of(message), 0
    entries: list[StepTokens | StepEvent] = []
    tokens = [StepTokens(*entry) for entry in zip(*columns, strict=True)]
    for event in message.events:
        entries += tokens[at : event.num_before]
        at = event.num_before
        entries.append(StepEvent(event.key, event.message))
    return entries + tokens[at:]


def test_each_call_gets_its_tokens_and_events_in_their_order() -> None:
    draw = random.Random(1)
    for count in (0, 1, 2, 5, 40, 200):
        for _ in range(20):
            sent = random_entries(draw, count)
            message = step_stream_pb2.StepOutputs.FromString(step_outputs(sent).SerializeToString())
            assert flat(received(message)) == flat(sent)


def test_a_step_of_single_tokens_needs_three_columns() -> None:
    message = step_outputs([StepTokens(key, 0, 7, [key + 100]) for key in (1, 2, 3)])
    assert message == step_stream_pb2.StepOutputs(keys=[1, 2, 3], first_positions=[7, 7, 7], token_ids=[101, 102, 103])


def test_tokens_of_several_steps_are_merged_up_to_the_next_event() -> None:
    token_ids = [5]
    sent = [StepTokens(1, 0, 0, token_ids), StepTokens(2, 0, 0, [6]), StepTokens(1, 0, 1, [7])]
    message = step_outputs([*sent, StepEvent(1, b"x"), StepTokens(1, 0, 2, [8])])
    assert (message.keys, message.num_tokens, message.token_ids) == ([1, 2, 1], [2, 1, 1], [5, 7, 6, 8])
    assert message.events[0].num_before == 2
    assert token_ids == [5]


def test_tokens_of_sequences_in_turn_are_merged_each_up_to_the_next_event() -> None:
    turns = [StepTokens(1, sequence, at, [10 * sequence + at]) for at in range(3) for sequence in (0, 1)]
    rest = StepTokens(1, 0, 3, [3]), StepTokens(1, 0, 5, [5])
    sent: list[StepTokens | StepEvent] = [*turns, StepEvent(1, b"x"), *rest]
    assert merged(sent) == [
        StepTokens(1, 0, 0, [0, 1, 2]),
        StepTokens(1, 1, 0, [10, 11, 12]),
        StepEvent(1, b"x"),
        *rest,
    ]
    assert [each.token_ids for each in turns] == [[0], [10], [1], [11], [2], [12]]


MISFITS = {
    "positions": {"keys": [1], "token_ids": [1]},
    "tokens": {"keys": [1], "first_positions": [0]},
    "indexes": {"keys": [1], "first_positions": [0], "token_ids": [1], "indexes": [0, 0]},
    "numbers": {"keys": [1], "first_positions": [0], "token_ids": [1], "num_tokens": [1, 0]},
    "sums": {"keys": [1], "first_positions": [0], "token_ids": [1], "num_tokens": [2**32 - 1]},
    "keys": {"first_positions": [0], "token_ids": [1]},
}


@pytest.mark.parametrize("fields", MISFITS.values(), ids=MISFITS)
def test_columns_that_do_not_fit_together_are_refused(fields: dict[str, list[int]]) -> None:
    with pytest.raises(PeerError, match="do not fit together"):
        columns_of(step_stream_pb2.StepOutputs(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("places", [[1], [0, 2], [2**32 - 1]])
def test_events_beyond_the_columns_are_refused(places: list[int]) -> None:
    events = [step_stream_pb2.CallEvent(key=1, num_before=place) for place in places]
    with pytest.raises(PeerError, match="entries"):
        columns_of(step_stream_pb2.StepOutputs(events=events))


def test_events_out_of_order_are_refused() -> None:
    events = [step_stream_pb2.CallEvent(key=1, num_before=place) for place in (1, 0)]
    with pytest.raises(PeerError, match="one before it after 1"):
        columns_of(step_stream_pb2.StepOutputs(keys=[1], first_positions=[0], token_ids=[1], events=events))


@pytest.mark.parametrize(
    "error",
    [None, WorkerLost("gone"), InvalidRequest("n is 0", "n"), Overloaded("full", 2.5), AdapterUnavailable("no")],
)
def test_an_end_arrives_as_it_was(error: PdServeError | None) -> None:
    end = end_from_wire(step_stream_pb2.CallEnd.FromString(end_to_wire(error).SerializeToString()))
    assert type(end) is type(error)
    if error is not None and end is not None:
        assert (end.code, end.message) == (error.code, error.message)
    if isinstance(error, InvalidRequest) and isinstance(end, InvalidRequest):
        assert end.field == error.field
    if isinstance(end, Overloaded):
        assert (end.retry_after_s, end.by_peer) == (2.5, True)


def test_an_end_leaves_as_it_would_alone() -> None:
    message = step_outputs([end_event(1), end_event(2, Overloaded("full", 2.5))])
    assert [each.WhichOneof("event") for each in message.events] == ["end", "end"]
    assert [each.end for each in message.events] == [end_to_wire(None), end_to_wire(Overloaded("full", 2.5))]


def test_a_strange_end_is_the_peers_error() -> None:
    assert isinstance(end_from_wire(step_stream_pb2.CallEnd(code="new")), PeerError)
    for retry_after_s in (float("nan"), float("inf"), -1.0):
        error = end_from_wire(step_stream_pb2.CallEnd(code="overloaded", retry_after_s=retry_after_s))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s == 1.0


@pytest.mark.fuzz(share=0.3)
def test_changed_steps_are_read_or_refused(fuzzer: Fuzzer) -> None:
    changes = MessageChanges(fuzzer.draw, addresses=("",), max_bytes=64 << 10)
    for _ in fuzzer.cases():
        message = step_outputs(random_entries(fuzzer.draw, fuzzer.draw.choice((1, 3, 30))))
        if fuzzer.draw.random() < 0.7:
            message = changes.changed(message)
        raw = message.SerializeToString()
        if fuzzer.draw.random() < 0.4:
            raw = fuzzer.bytes(raw)
        try:
            received(parsed("a step", step_stream_pb2.StepOutputs.FromString, raw))
        except PeerError:
            continue
