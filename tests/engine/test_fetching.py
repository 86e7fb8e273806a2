"""Blocks of a prompt that another worker's prefix cache has: looked up, offered, received, and the rest computed here."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest, TransferFailed
from pdserve.common.request.engine_types import FinishReason
from pdserve.engine.request import RequestStatus, Wait
from pdserve.engine.scheduler.kv_messages import (
    Found,
    HoldReturned,
    IntoEngine,
    Landed,
    Lookup,
    Missed,
    Offered,
    ReceiveFailed,
    ReceiveInto,
    Revoke,
    Settled,
    SourceFinished,
    StopReceiving,
    Want,
)
from pdserve.engine.scheduler.transfer_events import KvSendTracker
from tests.support.engine.engine_fetches import SOURCE
from tests.support.engine.engine_harness import Harness, MakeEngine
from tests.support.engine.hash_model import STATE, Chunk, Window, greedy_answer, prompt_of
from tests.support.engine.pool_blocks import copy_blocks

WINDOWS: tuple[Window, ...] = (None, 9, (None, 9), (None, Chunk(8)), (None, STATE))


class Fetch:
    """The messages between a receiver and its source, which a test exchanges."""

    def __init__(self, receiver: Harness, source: Harness, prompt: list[int], **fields: Any) -> None:
        self.receiver, self.source = receiver, source
        fields = {"request_id": "r", "params": {"max_tokens": 6}} | fields
        self.request = receiver.request(prompt, block_source=SOURCE, **fields)
        receiver.submit(self.request)

    def look_up(self) -> int:
        """Places that the source has found."""
        hashes = self.request.block_hashes[
            : (len(self.request.prompt_token_ids) - 1) // self.receiver.config.block_size
        ]
        self.source.core.apply(Lookup("f", tuple(hashes)))
        [found] = self.source.outbox.take()
        assert isinstance(found, Found)
        return found.num_blocks

    def offer(self, num_blocks: int | None = None) -> int:
        num_found = self.look_up() if num_blocks is None else num_blocks
        self.receiver.core.apply(Offered("r", num_found))
        return num_found

    def room(self) -> ReceiveInto:
        """What the receiver has reserved."""
        self.receiver.step()
        [room] = self.receiver.outbox.take()
        assert isinstance(room, ReceiveInto)
        return room

    def move(self, room: ReceiveInto, count: int | None = None) -> Settled:
        """The source publishes, and `count` blocks arrive; None: all."""
        self.source.core.apply(Want("f", room.first_index))
        [settled] = self.source.outbox.take()
        assert isinstance(settled, Settled)
        assert (settled.first_index, len(settled.hold)) == (room.first_index, len(room.hold))
        if num_copied := copy_blocks(self.source, settled.hold, self.receiver, room.hold, count):
            self.receiver.core.apply(Landed("r", num_copied))
        return settled

    def end(self, room: ReceiveInto, settled: Settled, num_tokens: int) -> None:
        self.receiver.core.apply(SourceFinished("r", num_tokens, ()))
        self.receiver.core.apply(HoldReturned("r", room.hold))
        self.source.core.apply(HoldReturned("f", settled.hold))
        self.source.core.apply(Revoke("f"))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("length", [5, 8, 9, 16, 17, 24, 25, 31, 32, 33, 47])
def test_i1_what_comes_from_another_cache_is_not_computed(make_engine: MakeEngine, window: Window, length: int) -> None:
    source, receiver = (make_engine(sliding_window=window) for _ in range(2))
    prompt = prompt_of(60)[:length]
    source.ask(prompt)
    fetch = Fetch(receiver, source, prompt)
    num_found = fetch.offer()
    assert num_found == (length - 1) // 4
    room = fetch.room()
    assert receiver.scheduler.requests["r"].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    fetch.end(room, fetch.move(room), 4 * num_found)
    answer = receiver.run()["r"]
    assert answer.token_ids == greedy_answer(prompt, 6, window)
    assert receiver.model.num_tokens == length - 4 * num_found + 5
    assert answer.num_cached_tokens == 4 * num_found


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_part_is_here_and_a_part_comes(make_engine: MakeEngine, window: Window) -> None:
    """The beginning is in the receiver's pool, the middle at the source, and the end nowhere."""
    source, receiver = (make_engine(sliding_window=window) for _ in range(2))
    prompt = prompt_of(50)
    receiver.ask(prompt[:13])
    source.ask(prompt[:33])
    fetch = Fetch(receiver, source, prompt)
    assert fetch.offer() == 8
    room = fetch.room()
    fetch.end(room, fetch.move(room), 32)
    before = receiver.model.num_tokens
    assert receiver.run()["r"].token_ids == greedy_answer(prompt, 6, window)
    assert receiver.model.num_tokens - before == 50 - 32 + 5


@pytest.mark.parametrize("num_landed", [0, 1, 4])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_i3_a_fetch_that_fails_costs_a_computation_and_nothing_else(
    make_engine: MakeEngine, window: Window, num_landed: int
) -> None:
    source, receiver = (make_engine(sliding_window=window) for _ in range(2))
    prompt = prompt_of(40)
    source.ask(prompt)
    fetch = Fetch(receiver, source, prompt)
    fetch.offer()
    room = fetch.room()
    settled = fetch.move(room, num_landed)
    receiver.core.apply(ReceiveFailed("r", TransferFailed("the source is gone")))
    assert [type(message) for message in receiver.outbox.take()] == [StopReceiving]
    for _ in range(3):
        receiver.step()  # before the blocks come back
    receiver.core.apply(HoldReturned("r", room.hold))
    source.core.apply(HoldReturned("f", settled.hold))
    assert receiver.run()["r"].token_ids == greedy_answer(prompt, 6, window)


def test_a_source_that_has_nothing_or_fails_first_delays_nothing(make_engine: MakeEngine) -> None:
    for event in (Offered("r", 0), ReceiveFailed("r", TransferFailed("refused"))):
        receiver = make_engine()
        Fetch(receiver, make_engine(), prompt_of(20))
        request = receiver.scheduler.requests["r"]
        assert request.waits_for == {Wait.OFFER}
        receiver.step()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        receiver.core.apply(event)
        assert receiver.run()["r"].token_ids == greedy_answer(prompt_of(20), 6)
        assert [type(message) for message in receiver.outbox.take()] == [StopReceiving]


def test_an_offer_that_brings_nothing_is_declined(make_engine: MakeEngine) -> None:
    """The receiver has as much by then, or the source says that it has more than it was asked for."""
    for num_blocks in (4, 99):
        receiver, source = make_engine(), make_engine()
        if num_blocks == 4:
            receiver.ask(prompt_of(20))
        fetch = Fetch(receiver, source, prompt_of(20))
        fetch.offer(num_blocks)
        assert receiver.run()["r"].token_ids == greedy_answer(prompt_of(20), 6)
        assert [type(message) for message in receiver.outbox.take()] == [StopReceiving]


def test_a_second_request_of_the_same_prompt_waits_for_the_first(make_engine: MakeEngine) -> None:
    source, receiver = make_engine(), make_engine()
    prompt = prompt_of(30)
    source.ask(prompt)
    fetch = Fetch(receiver, source, prompt)
    fetch.offer()
    receiver.add(prompt, "second", block_source=SOURCE, params={"max_tokens": 6})
    receiver.core.apply(Offered("second", 7))
    room = fetch.room()
    receiver.step()
    assert not receiver.outbox.take()
    assert receiver.scheduler.requests["second"].status is RequestStatus.WAITING
    fetch.end(room, fetch.move(room), 28)
    answers = receiver.run()
    assert answers["r"].token_ids == answers["second"].token_ids == greedy_answer(prompt, 6)
    assert [message.request_id for message in receiver.outbox.take()] == ["second"]
    assert receiver.model.num_tokens == 2 * (2 + 5)


def test_blocks_that_were_given_up_after_the_lookup_are_missed(make_engine: MakeEngine) -> None:
    source, receiver = make_engine(num_blocks=16), make_engine()
    prompt = prompt_of(30)
    source.ask(prompt)
    fetch = Fetch(receiver, source, prompt)
    fetch.offer()
    room = fetch.room()
    source.ask([59] * 60)
    source.core.apply(Want("f", room.first_index))
    assert source.outbox.take() == [Missed("f")]
    receiver.core.apply(ReceiveFailed("r", TransferFailed("given up")))
    receiver.core.apply(HoldReturned("r", room.hold))
    assert receiver.run()["r"].token_ids == greedy_answer(prompt, 6)


def test_who_only_looks_up_pins_nothing_and_leaves_nothing(make_engine: MakeEngine) -> None:
    source, receiver = make_engine(), make_engine()
    source.ask(prompt_of(30))
    fetch = Fetch(receiver, source, prompt_of(30))
    assert fetch.look_up() == 7
    assert source.scheduler.pool.num_in_use == 0
    source.core.apply(Revoke("f"))
    tracker: KvSendTracker = source.scheduler.sources
    assert not tracker._resting
    source.core.apply(Want("f", 0))
    assert not source.outbox.take()
    receiver.core.abort_request("r")


@pytest.mark.parametrize("moment", ["unasked", "offered", "receiving", "landed"])
def test_i7_an_abort_at_any_moment_returns_all(make_engine: MakeEngine, moment: str) -> None:
    source, receiver = make_engine(), make_engine()
    source.ask(prompt_of(30))
    fetch = Fetch(receiver, source, prompt_of(30))
    room = None
    if moment != "unasked":
        fetch.offer()
    if moment in ("receiving", "landed"):
        room = fetch.room()
        settled = fetch.move(room)
        source.core.apply(HoldReturned("f", settled.hold))
    if room is not None and moment == "landed":
        receiver.core.apply(SourceFinished("r", 28, ()))
        receiver.core.apply(HoldReturned("r", room.hold))
    receiver.core.abort_request("r")
    if moment == "receiving":
        assert room is not None
        receiver.core.apply(HoldReturned("r", room.hold))
    stopped = [message for message in receiver.outbox.take() if isinstance(message, StopReceiving)]
    assert len(stopped) == (moment != "landed")


def test_a_running_sequence_takes_the_blocks_of_one_that_fetches(make_engine: MakeEngine) -> None:
    source, receiver = make_engine(), make_engine(num_blocks=16)
    prompt = prompt_of(30)
    source.ask(prompt)
    other = [50, 51, 52]
    receiver.add(other, "other", params={"max_tokens": 52})
    for _ in range(3):
        receiver.step()
    fetch = Fetch(receiver, source, prompt)
    fetch.offer()
    room = fetch.room()
    while not receiver.outbox.messages:
        receiver.step()
    [stopped] = receiver.outbox.take()
    assert isinstance(stopped, StopReceiving)
    receiver.core.apply(HoldReturned("r", room.hold))
    answers = receiver.run()
    assert answers["r"].token_ids == greedy_answer(prompt, 6)
    assert answers["other"].token_ids == greedy_answer(other, 52)


def test_a_prefill_worker_fetches_and_sends(make_engine: MakeEngine) -> None:
    """The blocks that came count as computed: they are published to the receiver of the whole prompt."""
    source, prefill = make_engine(), make_engine()
    prompt = prompt_of(30)
    source.ask(prompt[:21])
    fetch = Fetch(prefill, source, prompt, transfer_source=True)
    fetch.offer()
    room = fetch.room()
    prefill.core.apply(Want("r", 2))
    fetch.end(room, fetch.move(room), 20)
    assert prefill.run()["r"].token_ids == greedy_answer(prompt, 1)
    settled = [message for message in prefill.outbox.take() if isinstance(message, Settled)]
    assert [message.first_index for message in settled] == [2, 5]
    assert sum(len(message.hold) for message in settled) == 6
    for message in settled:
        prefill.core.apply(HoldReturned("r", message.hold))
    prefill.core.apply(Revoke("r"))


def test_what_cannot_be_fetched_is_refused_by_name(make_engine: MakeEngine) -> None:
    refused: list[dict[str, Any]] = [{"remote_prefill": True}, {"resumable": True}]
    for fields in refused:
        with pytest.raises(InvalidRequest, match="block_source"):
            make_engine().request(prompt_of(9), block_source=SOURCE, **fields)
    with pytest.raises(InvalidRequest, match="block_source"):
        make_engine(has_transfers=False).request(prompt_of(9), block_source=SOURCE)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("num_here", [0, 13])
def test_a_request_that_only_fetches_ends_when_the_blocks_are_here(
    make_engine: MakeEngine, window: Window, num_here: int
) -> None:
    source, receiver = (make_engine(sliding_window=window) for _ in range(2))
    prompt = prompt_of(40)
    source.ask(prompt)
    if num_here:
        receiver.ask(prompt[:num_here])
    before = receiver.model.num_tokens
    fetch = Fetch(receiver, source, prompt, fetches_only=True)
    assert fetch.offer() == 9
    room = fetch.room()
    fetch.end(room, fetch.move(room), 36)
    answer = receiver.run()["r"]
    assert (answer.finish_reason, answer.error_code, answer.num_cached_tokens) == (FinishReason.STOP, "", 36)
    assert receiver.model.num_tokens == before
    assert receiver.ask(prompt).token_ids == greedy_answer(prompt, 4, window)
    assert receiver.model.num_tokens - before == 40 - 36 + 3


def test_a_request_that_only_fetches_ends_when_nothing_comes(make_engine: MakeEngine) -> None:
    failed = ReceiveFailed("r", TransferFailed("refused"))
    events: tuple[IntoEngine, ...] = (Offered("r", 0), failed, Offered("r", 4))
    for number, event in enumerate(events):
        receiver, source = make_engine(), make_engine()
        if number == 2:
            receiver.ask(prompt_of(20))
        before = receiver.model.num_tokens
        Fetch(receiver, source, prompt_of(20), fetches_only=True)
        receiver.core.apply(event)
        answer = receiver.run()["r"]
        assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.STOP)
        assert receiver.model.num_tokens == before
        assert [type(message) for message in receiver.outbox.take()] == [StopReceiving]


def test_a_fetch_whose_source_fails_ends_with_its_error(make_engine: MakeEngine) -> None:
    source, receiver = make_engine(), make_engine()
    source.ask(prompt_of(40))
    fetch = Fetch(receiver, source, prompt_of(40), fetches_only=True)
    fetch.offer()
    room = fetch.room()
    settled = fetch.move(room, 3)
    receiver.core.apply(ReceiveFailed("r", TransferFailed("the source is gone")))
    receiver.core.apply(HoldReturned("r", room.hold))
    source.core.apply(HoldReturned("f", settled.hold))
    assert receiver.run()["r"].error_code == "transfer_failed"
    before = receiver.model.num_tokens
    receiver.ask(prompt_of(40))
    assert receiver.model.num_tokens - before == 40 - 12 + 3, "what has landed is cached"


def test_a_fetch_without_a_source_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequest, match="block_source"):
        make_engine().request(prompt_of(20), fetches_only=True)


def test_a_repeated_lookup_has_the_first_answer(make_engine: MakeEngine) -> None:
    """What is published belongs to it, also when the cache has lost blocks meanwhile."""
    source = make_engine(num_blocks=8)
    prompt = prompt_of(13)
    source.ask(prompt)
    hashes = tuple(source.request(prompt).block_hashes)
    found = []
    for _ in range(2):
        source.core.apply(Lookup("f", hashes))
        found += source.outbox.take()
        source.ask(prompt_of(27))  # takes every block
    assert found == [Found("f", 3)] * 2
    source.core.apply(Want("f", 0))
    assert source.outbox.take() == [Missed("f")]
