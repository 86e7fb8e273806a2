"""A source with the deployment key that says each field of each message wrong: its own transfer fails, in time, or is right."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from pdserve.common.errors import BY_CODE, TransferFailed
from pdserve.common.security.block_digest import GMAC
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control import attach_client
from pdserve.kv_transfer.control.transfer_state import ReceiverState
from pdserve.v1 import kv_source_pb2, request_pb2
from tests.support.inputs.wrong_fields import FEW, PARTS, Wrong, one_of_each, part_of, wrong_messages
from tests.support.run.loop_watch import LOOP_S, LoopWatch
from tests.support.transfers.transfer_fakes import DIGEST, FakeConnector

from .conftest import HearingCauses

EVENTS: dict[str, kv_source_pb2.AttachEvent] = {
    "accepted": kv_source_pb2.AttachEvent(
        accepted=kv_source_pb2.Accepted(
            connector="fake", metadata=b"where", token=b"k" * 16, digest_algorithm=GMAC, proof=bytes(32)
        )
    ),
    "published": kv_source_pb2.AttachEvent(
        published=kv_source_pb2.Published(first_index=0, digests=[1, 2], locations=[0, 1])
    ),
    "finished": kv_source_pb2.AttachEvent(
        finished=kv_source_pb2.Finished(
            num_tokens=22, request_digest=DIGEST, first_outputs=[request_pb2.Outputs(token_ids=[5])]
        )
    ),
    "alive": kv_source_pb2.AttachEvent(alive=kv_source_pb2.Alive(engine_tick=1)),
    "revoked": kv_source_pb2.AttachEvent(revoked=kv_source_pb2.Revoked(cause="drains")),
    "failed": kv_source_pb2.AttachEvent(
        failed=kv_source_pb2.Failed(error=request_pb2.Error(code="transfer_failed", message="x"))
    ),
}


def test_every_event_is_in_the_table() -> None:
    assert set(EVENTS) == {field.name for field in kv_source_pb2.AttachEvent.DESCRIPTOR.fields}


def cases(event: str) -> Iterator[Wrong]:
    # of more fields none is decoded: `tests/worker/test_peer_messages.py`
    yield from wrong_messages(EVENTS[event], many=FEW)
    for other, message in EVENTS.items():
        if other != event:
            yield Wrong(f"{other} in its place", [message.SerializeToString()])
            yield Wrong(f"{other} before it", [message.SerializeToString(), EVENTS[event].SerializeToString()])
            yield Wrong(f"{other} after it", [EVENTS[event].SerializeToString(), message.SerializeToString()])


class Reading(FakeConnector):
    """A connector whose reads land when they begin."""

    def read(self, *args: Any, **kwargs: Any) -> Any:
        read = super().read(*args, **kwargs)
        asyncio.get_running_loop().call_soon(read.land)
        asyncio.get_running_loop().call_soon(read.end)
        return read


def parsed(raw: bytes) -> kv_source_pb2.AttachEvent:
    try:
        return kv_source_pb2.AttachEvent.FromString(raw)
    except DecodeError:
        # `rig.play` sends messages: what cannot be decoded is that of `test_unproved_workers`
        return kv_source_pb2.AttachEvent()


@pytest.mark.slow
@pytest.mark.parametrize("event", EVENTS)
async def test_a_wrong_message_ends_its_transfer_alone(
    rig: Any, until: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    monkeypatch.setattr(attach_client, "TICK_STALLED_S", 0.2)
    await deceive(rig, until, caplog, ((event, case) for case in cases(event)))


@pytest.mark.few(1)
@pytest.mark.parametrize("part", PARTS)
async def test_one_wrong_value_of_each_field_ends_its_transfer_alone(
    rig: Any, until: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(attach_client, "TICK_STALLED_S", 0.2)
    await deceive(
        rig, until, caplog, ((event, case) for event in EVENTS for case in part_of(one_of_each(cases(event)), part))
    )


async def deceive(rig: Any, until: Any, caplog: Any, lies: Iterable[tuple[str, Wrong]]) -> None:
    """Begin a transfer for each, from a source that says it in place of its event of that name."""
    caplog.set_level(logging.INFO)
    event, case = "", Wrong("", [])

    async def source(number: int, requests: Any) -> AsyncIterator[Any]:
        say = {name: [parsed(message.SerializeToString())] for name, message in EVENTS.items()}
        say[event] = [parsed(raw) for raw in case.messages]
        for one in say["accepted"]:
            yield one
        async for request in requests:
            if request.WhichOneof("message") == "want":
                break
        order = ["alive", "published", "finished"]
        for name in order if event in (*order, "accepted") else ["alive", event]:
            for one in say[name]:
                yield one
        async for _ in requests:
            pass

    await rig.play(source)
    for event, case in lies:  # noqa: B007
        connector, rig.owner = Reading(), HearingCauses()
        transfer = rig.receive(
            connector_set=ConnectorSet([connector]), connectors=("fake",), attach_timeout_s=0.1, grace_s=0.0
        )
        transfer.room(0, [10, 11], [0, 0])
        with LoopWatch() as watch:
            await until(lambda transfer=transfer: transfer.has_ended, 20.0)
        assert watch.longest_s < LOOP_S, (case.name, watch.longest_s, watch.callback)
        if transfer.state is ReceiverState.FAILED:
            assert isinstance(transfer.cause, TransferFailed) or transfer.cause.code in (
                "layout_mismatch",
                "permission_denied",
            ), (case.name, transfer.cause)
        else:
            assert transfer.state is ReceiverState.LANDED, case.name
            assert transfer.num_landed == 2
    for record in caplog.records:
        assert record.levelno < logging.ERROR, record.getMessage()[:2000]
        assert len(record.getMessage()) < 4096


@pytest.mark.parametrize("first_index", [3, 4, 2**31, 2**32 - 1])
async def test_blocks_beyond_those_that_are_wanted_fail_the_transfer(rig: Any, until: Any, first_index: int) -> None:
    async def source(number: int, requests: Any) -> AsyncIterator[Any]:
        yield parsed(EVENTS["accepted"].SerializeToString())
        async for request in requests:
            if request.WhichOneof("message") == "want":
                break
        yield kv_source_pb2.AttachEvent(
            published=kv_source_pb2.Published(first_index=first_index, digests=[1], locations=[0])
        )
        async for _ in requests:
            pass

    await rig.play(source)
    transfer = rig.receive(connector_set=ConnectorSet([FakeConnector()]), connectors=("fake",))
    transfer.room(0, [10, 11], [0, 0])
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert f"first_index {first_index} on, where those below 2 were wanted" in rig.owner.cause.message


async def test_blocks_before_any_are_wanted_fail_the_transfer(rig: Any, until: Any) -> None:
    async def source(number: int, requests: Any) -> AsyncIterator[Any]:
        yield parsed(EVENTS["accepted"].SerializeToString())
        yield EVENTS["published"]
        async for _ in requests:
            pass

    await rig.play(source)
    transfer = rig.receive(connector_set=ConnectorSet([FakeConnector()]), connectors=("fake",))
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "before they were wanted" in rig.owner.cause.message


@pytest.mark.parametrize("code", sorted(BY_CODE))
async def test_an_error_of_a_source_is_an_error_of_the_transfer(rig: Any, until: Any, code: str) -> None:
    """The code of a request's or of a client's error in `failed` would reach the client through the decode worker."""

    async def source(number: int, requests: Any) -> AsyncIterator[Any]:
        yield kv_source_pb2.AttachEvent(failed=kv_source_pb2.Failed(error=request_pb2.Error(code=code, message="x")))
        async for _ in requests:
            pass

    await rig.play(source)
    rig.owner = HearingCauses()
    transfer = rig.receive(connector_set=ConnectorSet([FakeConnector()]), connectors=("fake",))
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert rig.owner.cause.code in ("transfer_failed", "digest_mismatch", "layout_mismatch", "permission_denied")
