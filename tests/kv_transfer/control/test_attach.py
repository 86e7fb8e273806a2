"""The control stream over real gRPC: the happy path, every refusal, every way to break, and coming back."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec
import pytest

from pdserve.common.errors import LayoutMismatch, TransferFailed
from pdserve.common.kv_layout import FORMAT, KvLayout
from pdserve.common.request.wire.messages import layout_to_wire
from pdserve.common.security.block_digest import GMAC, XXH3_64
from pdserve.kv_transfer.control import attach_servicer
from pdserve.kv_transfer.control.source_transfer import PeerId, PublishedRange, SourceResult
from pdserve.kv_transfer.control.transfer_state import ReceiverState, SourceState
from pdserve.v1 import kv_source_pb2, kv_source_pb2_grpc, prefill_pb2
from tests.support.models.kv_layouts import make_layout, with_head
from tests.support.run.waiting import HANG_S
from tests.support.transfers.transfer_fakes import DIGEST, RECEIVER, TRANSFER_ID

from .conftest import GRACE_S, LAYOUT, NUM_BLOCKS, SOURCE_EPOCH, TICK_STALLED_S

BREAK_LIMIT_S = 2 * TICK_STALLED_S + 1.0
"""Two times the stall, and a second for a busy machine."""


async def test_blocks_land_while_later_ones_are_computed(rig: Any, until: Any) -> None:
    source = rig.expect()
    transfer = rig.receive()
    await until(lambda: transfer.state is ReceiverState.ATTACHED)
    transfer.room(1, [10, 11, 12], [0, 0, 0])
    await until(lambda: source.is_wanted)
    assert rig.source_owner.heard == [("wanted", 1)]
    rig.settle(source, 1, 5)
    await until(lambda: transfer.num_landed == 1)
    await until(lambda: source.num_landed == 1)
    rig.settle(source, 2, 3, 9)
    rig.compute(source)
    assert await asyncio.wait_for(asyncio.shield(source.over), HANG_S) is SourceState.RELEASED
    await until(lambda: rig.tasks[0].done())
    assert transfer.state is ReceiverState.LANDED
    assert rig.same(5, 10)
    assert rig.same(3, 11)
    assert rig.same(9, 12)
    assert [words[0] for words in rig.source_owner.heard] == ["wanted", "ended"]
    assert rig.owner.words.count("fenced") == 1
    assert ("source_finished", 22, (5,)) in rig.owner.heard
    assert rig.num_streams == 1


@pytest.mark.parametrize("waits", [True, False], ids=["blocks wait to be sent", "blocks were sent"])
async def test_the_end_goes_with_the_last_blocks_while_they_wait_to_be_sent(waits: bool) -> None:
    stream = attach_servicer._EventQueue()
    stream.published(PublishedRange(0, ((7,),), (3,)))
    stream.published(PublishedRange(1, ((8,), (9,)), (4, 5)))
    heard: list[Any] = [] if waits else [stream.messages.get_nowait() for _ in range(2)]
    stream.finished(SourceResult(22, (5, 6)), DIGEST)
    heard += [stream.messages.get_nowait() for _ in range(stream.messages.qsize())]
    assert [event.WhichOneof("event") for event in heard] == [
        "published",
        "published",
        *([] if waits else ["finished"]),
    ]
    assert [event.published.HasField("finished") for event in heard] == ([False, True] if waits else [False] * 3)
    end = heard[-1].published.finished if waits else heard[-1].finished
    assert (end.num_tokens, end.request_digest) == (22, DIGEST)
    assert [list(outputs.token_ids) for outputs in end.first_outputs] == [[5], [6]]


async def test_the_stream_may_be_there_before_the_prefill_call_and_outlast_a_stall(rig: Any, until: Any) -> None:
    transfer = rig.receive()
    transfer.room(0, [10], [0])
    await asyncio.sleep(TICK_STALLED_S + 0.3)
    source = rig.expect()
    await until(lambda: source.is_wanted)
    rig.settle(source, 0, 1)
    rig.compute(source)
    await until(lambda: transfer.state is ReceiverState.LANDED)
    assert rig.num_streams == 1


async def test_i6_a_prefill_call_that_never_comes_fails_the_receiver_in_time(rig: Any, until: Any) -> None:
    started = time.monotonic()
    rig.transfers._limits = type(rig.limits)(attach_timeout_s=0.3, grace_s=GRACE_S, max_s=20.0)
    transfer = rig.receive(attach_timeout_s=0.3)
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "no such transfer" in rig.owner.cause.message
    assert time.monotonic() - started < 2


async def test_unequal_layouts_are_refused_at_once_and_printed_field_by_field(rig: Any, until: Any) -> None:
    rig.expect()

    layout = make_layout(num_kv_heads=2, head_dim=2, block_size=8, model_fingerprint="g" * 32)
    transfer = rig.receive(layout=layout)
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert type(rig.owner.cause) is LayoutMismatch
    for line in ("num_kv_heads: 1 != 2", "block_size: 4 != 8", f"model_fingerprint: {'f' * 32} != {'g' * 32}"):
        assert line in rig.owner.cause.message
    assert "head_dim" not in rig.owner.cause.message
    assert rig.num_streams == 1


async def test_a_receiver_with_blocks_of_another_format_is_refused_by_name(rig: Any) -> None:
    """The dimensions are equal, and only the order of the bytes differs."""
    rig.expect()
    opening = kv_source_pb2.Open(
        transfer_id=TRANSFER_ID, source_epoch=SOURCE_EPOCH, request_digest=DIGEST,
        receiver=prefill_pb2.Receiver(worker_id=RECEIVER.worker_id, epoch=RECEIVER.epoch), digest_algorithms=["xxh3_64"],
        layout=layout_to_wire(msgspec.structs.replace(LAYOUT, format=FORMAT + 1)), connectors=["tcp"],
    )  # fmt: skip
    asked = kv_source_pb2.AttachRequest(open=opening)
    [answer] = [event async for event in kv_source_pb2_grpc.KvSourceServiceStub(rig.channel).Attach(iter([asked]))]
    assert answer.failed.error.code == "layout_mismatch"
    assert answer.failed.error.message.endswith(f": format: {FORMAT} != {FORMAT + 1}")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"epoch": 8}, "another epoch"),
        ({"request_digest": b"x" * 16}, "another request"),
        ({"identity": PeerId("decode-1", 12)}, "another receiver"),
        ({"identity": PeerId("decode-9", 11)}, "another receiver"),
        ({"connectors": ("nixl",)}, "no common connector"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_i8_a_wrong_reference_is_refused_and_leaves_the_right_one_alone(
    rig: Any, until: Any, changes: dict[str, Any], why: str
) -> None:
    source = rig.expect()
    transfer = rig.receive(**changes)
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert type(rig.owner.cause) is TransferFailed
    assert why in rig.owner.cause.message
    assert not source.has_ended
    right = rig.receive()
    await until(lambda: right.state is ReceiverState.ATTACHED)


HEAD = with_head(LAYOUT)
OTHER_HEAD = with_head(LAYOUT, "other")
THREE_RANKS = msgspec.structs.replace(with_head(LAYOUT, num_layers=2), tp_size=3)


@pytest.mark.parametrize(
    ("source", "expected", "receiver", "said"),
    [
        (HEAD, "", HEAD, "none here, mtp there"),
        (HEAD, "mtp", LAYOUT, "mtp here, none there"),
        (HEAD, "", OTHER_HEAD, "none here, other there"),
        (LAYOUT, "", HEAD, "none here, mtp there"),
        (LAYOUT, "", THREE_RANKS, "none here, mtp there"),
        (THREE_RANKS, "mtp", LAYOUT, "mtp here, none there"),
    ],
    ids=["moved", "not moved", "another", "the source has none", "ranks", "ranks at the source"],
)
async def test_i14_a_receiver_that_expects_the_blocks_of_another_draft_head_is_refused(
    rig: Any, until: Any, source: KvLayout, expected: str, receiver: KvLayout, said: str
) -> None:
    """Than the prefill call said: blocks would have other numbers at both ends."""
    rig.servicer._layout = source
    right = source.moved(without_draft_head=not expected)
    transfer = rig.expect(expected)
    wrong = rig.receive(layout=receiver)
    await until(lambda: wrong.state is ReceiverState.FAILED)
    assert type(rig.owner.cause) is TransferFailed
    assert rig.owner.cause.message.endswith(f"of another draft head: {said}")
    assert not transfer.has_ended
    if right.tp_size == 1:
        welcome = rig.receive(layout=right)
        await until(lambda: welcome.state is ReceiverState.ATTACHED)


async def test_i14_a_receiver_leaves_out_the_draft_head_of_which_the_decode_call_says_so(rig: Any, until: Any) -> None:
    source = rig.expect()
    transfer = rig.receive(layout=HEAD, without_draft_head=True)
    transfer.room(0, [10], [0])
    await until(lambda: source.is_wanted)
    rig.settle(source, 0, 1)
    rig.compute(source)
    await until(lambda: transfer.state is ReceiverState.LANDED)


async def test_i14_a_layout_whose_only_group_is_a_draft_head_is_refused_by_name(rig: Any, until: Any) -> None:
    rig.expect()
    transfer = rig.receive(layout=msgspec.structs.replace(LAYOUT, draft_head="mtp"))
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert type(rig.owner.cause) is LayoutMismatch
    assert "group_shapes: (0,) != ()" in rig.owner.cause.message


async def test_i8_a_released_transfer_is_never_served_again(
    rig: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = rig.expect()
    transfer = rig.receive()
    transfer.room(0, [10], [0])
    await until(lambda: source.is_wanted)
    rig.settle(source, 0, 1)
    rig.compute(source)
    await until(lambda: transfer.state is ReceiverState.LANDED)
    await until(lambda: source.has_ended)
    replayed = rig.receive()
    rig.owner.heard.clear()
    replayed.room(0, [11], [0])
    await until(lambda: replayed.state is ReceiverState.FAILED)
    assert "ended" in rig.owner.cause.message
    assert not rig.same(1, 11)
    assert not caplog.records, "whoever comes too late, as when its client left, is no fault"


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (kv_source_pb2.AttachRequest(), "not Open"),
        (kv_source_pb2.AttachRequest(want=kv_source_pb2.Want(first_index=1)), "not Open"),
        (kv_source_pb2.AttachRequest(open=kv_source_pb2.Open()), "another epoch"),
        (None, "no Open"),
    ],
)
async def test_i9_a_stream_that_does_not_open_is_told_so(rig: Any, first: Any, why: str) -> None:
    stub = kv_source_pb2_grpc.KvSourceServiceStub(rig.channel)
    call = stub.Attach(iter([first] if first is not None else []))
    answer = await call.read()
    assert why in answer.failed.error.message
    assert answer.failed.error.code == "transfer_failed"


async def test_a_transfer_that_ends_at_the_source_ends_at_the_receiver(rig: Any, until: Any) -> None:
    from pdserve.common.errors import Draining

    source = rig.expect()
    transfer = rig.receive()
    await until(lambda: transfer.state is ReceiverState.ATTACHED)
    source.revoke(Draining("the source is draining"))
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "draining" in rig.owner.cause.message
    await until(lambda: rig.tasks[0].done())


@pytest.mark.slow
async def test_a_busy_stream_is_alive_however_much_there_is_to_say(rig: Any, until: Any) -> None:
    source = rig.expect()
    transfer = rig.receive()
    transfer.room(0, list(range(NUM_BLOCKS)), [0] * NUM_BLOCKS)
    await until(lambda: source.is_wanted)
    for number in range(NUM_BLOCKS):
        rig.settle(source, number, number)
        await asyncio.sleep(0.1)
    rig.compute(source)
    await until(lambda: transfer.state is ReceiverState.LANDED)
    assert rig.num_streams == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_stopped_engine_at_the_source_breaks_the_stream_and_fails_it_unless_it_comes_back(
    rig: Any, until: Any, comes_back: bool
) -> None:
    rig.expect()
    transfer = rig.receive()
    await until(lambda: transfer.state is ReceiverState.ATTACHED)
    rig.tick_runs["source"] = False
    started = time.monotonic()
    await until(lambda: rig.num_streams > 1, BREAK_LIMIT_S)
    assert time.monotonic() - started > TICK_STALLED_S / 2
    if comes_back:
        rig.tick_runs["source"] = True
        await asyncio.sleep(GRACE_S + 3 * TICK_STALLED_S)
        assert not transfer.has_ended
    else:
        await until(lambda: transfer.state is ReceiverState.FAILED, GRACE_S + 2 * BREAK_LIMIT_S)
        assert "prefill-1 is lost" in rig.owner.cause.message


async def test_an_alive_is_put_before_messages_that_wait_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_servicer, "ALIVE_EVERY_S", 0.05)
    heartbeat, messages = attach_servicer.AliveMessages(lambda: "alive"), asyncio.Queue[str]()
    heard: list[str] = []
    while heard.count("alive") < 3:
        messages.put_nowait("more")
        heard.append(await asyncio.wait_for(heartbeat.next(messages), HANG_S))
        await asyncio.sleep(0.01)
    assert 3 < len(heard) < 40
    assert messages.qsize() == 3


@pytest.mark.slow
async def test_a_stopped_engine_at_the_receiver_ends_the_lease(rig: Any, until: Any) -> None:
    source = rig.expect()
    transfer = rig.receive()
    await until(lambda: transfer.state is ReceiverState.ATTACHED)
    rig.tick_runs["receiver"] = False
    state = await asyncio.wait_for(asyncio.shield(source.over), 2 * BREAK_LIMIT_S + 2 * GRACE_S)
    assert state is SourceState.EXPIRED


async def test_a_source_that_dies_fails_the_receiver_after_the_grace(rig: Any, until: Any) -> None:
    forgotten: list[bytes] = []
    rig.receiver_connector.forget = forgotten.append
    source = rig.expect()
    transfer = rig.receive()
    transfer.room(0, [10], [0])
    await until(lambda: source.is_wanted)
    started = time.monotonic()
    await rig.server.stop(None)
    await until(lambda: transfer.state is ReceiverState.FAILED, GRACE_S + BREAK_LIMIT_S + 1)
    assert time.monotonic() - started >= GRACE_S
    assert "prefill-1 is lost" in rig.owner.cause.message
    assert rig.owner.words == ["failed", "fenced"]
    assert forgotten == [rig.source_connector.metadata], "nothing is kept for a source that does not answer"
    await asyncio.wait_for(asyncio.shield(source.over), HANG_S)
    rig.server = None


@pytest.mark.slow
async def test_every_break_has_a_grace_of_its_own(rig: Any, until: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = rig.expect()
    transfer = rig.receive(grace_s=1.2)
    transfer.room(0, [10, 11], [0, 0])
    await until(lambda: source.is_wanted)
    rig.settle(source, 0, 1)
    with caplog.at_level(logging.ERROR):
        for count in (2, 3, 4):
            source._stream.messages.put_nowait(None)
            await until(lambda count=count: rig.num_streams == count)
            await asyncio.sleep(0.5)
    rig.settle(source, 1, 2)
    rig.compute(source)
    await until(lambda: transfer.state is ReceiverState.LANDED)
    assert rig.same(1, 10)
    assert rig.same(2, 11)
    await until(lambda: source.state is SourceState.RELEASED)


async def test_a_stream_that_an_older_one_replaces_attaches_again(rig: Any, until: Any) -> None:
    source = rig.expect()
    transfer = rig.receive()
    transfer.room(0, [10], [0])
    await until(lambda: source.is_wanted)
    late = kv_source_pb2.Open(
        transfer_id=TRANSFER_ID,
        source_epoch=SOURCE_EPOCH,
        receiver=prefill_pb2.Receiver(worker_id=RECEIVER.worker_id, epoch=RECEIVER.epoch),
        request_digest=DIGEST,
        layout=layout_to_wire(LAYOUT),
        digest_algorithms=[XXH3_64, GMAC],
        connectors=["local"],
    )
    call = kv_source_pb2_grpc.KvSourceServiceStub(rig.channel).Attach(iter([kv_source_pb2.AttachRequest(open=late)]))
    await until(lambda: rig.num_streams == 3)
    call.cancel()
    rig.settle(source, 0, 1)
    rig.compute(source)
    await until(lambda: transfer.state is ReceiverState.LANDED)
    assert rig.owner.cause is None
    await until(lambda: source.state is SourceState.RELEASED)


async def test_a_receiver_that_leaves_ends_the_lease_after_the_grace(rig: Any, until: Any) -> None:
    source = rig.expect()
    transfer = rig.receive()
    await until(lambda: transfer.state is ReceiverState.ATTACHED)
    rig.tasks[0].cancel()
    left = time.monotonic()
    assert await asyncio.wait_for(asyncio.shield(source.over), HANG_S) is SourceState.EXPIRED
    assert time.monotonic() - left >= GRACE_S - 0.1


@pytest.mark.slow
async def test_many_streams_that_leave_at_any_moment_leave_no_lease_behind(rig: Any, until: Any) -> None:
    made = []
    for number in range(40):
        from pdserve.kv_transfer.control.source_transfer import ExpectedTransfer

        transfer_id = bytes([number]) * 16
        made.append(
            rig.transfers.expect(ExpectedTransfer(transfer_id, f"r{number}", RECEIVER, DIGEST, 2.0, NUM_BLOCKS))
        )
        rig.receive(transfer_id=transfer_id)
    for number, task in enumerate(rig.tasks):
        await asyncio.sleep(0.002 * (number % 3))
        task.cancel()
    await until(lambda: all(transfer.has_ended for transfer in made))
    assert {transfer.state for transfer in made} == {SourceState.EXPIRED}
    assert TRANSFER_ID not in rig.transfers._tombstones
