"""The control stream at the receiver, against sources that are slow, late, silent or hostile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import pytest

from pdserve.common.errors import InternalError, TransferFailed
from pdserve.common.security.block_digest import GMAC
from pdserve.kv_transfer.connector import ReadListener, ReadOrder, ReadOutcome
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.attach_servicer import AttachServicer
from pdserve.kv_transfer.control.transfer_state import ReceiverState
from pdserve.v1 import kv_source_pb2, request_pb2
from tests.support.run.loop_watch import LOOP_S, LoopWatch
from tests.support.run.waiting import HANG_S
from tests.support.transfers.transfer_fakes import DIGEST, FakeConnector, FakeRead

from .conftest import GRACE_S, REATTACH_EVERY_S, TICK_STALLED_S


def accepted(connector: str = "fake", digest_algorithm: str = GMAC) -> kv_source_pb2.AttachEvent:
    return kv_source_pb2.AttachEvent(
        accepted=kv_source_pb2.Accepted(
            connector=connector, metadata=b"where", token=b"k" * 16, digest_algorithm=digest_algorithm
        )
    )


@pytest.mark.parametrize("proof", [b"", bytes(32), b"x" * 31])
async def test_a_stranger_at_the_sources_address_gives_no_blocks(rig: Any, until: Any, proof: bytes) -> None:
    """The source died, and somebody else listens where it did."""

    async def stranger(number: int, requests: Any) -> AsyncIterator[kv_source_pb2.AttachEvent]:
        answer = accepted("local")
        answer.accepted.proof = proof
        yield answer
        yield published(0, 2)
        yield finished()
        async for _ in requests:
            pass

    await rig.play(stranger, signs=False)
    transfer = rig.receive()
    transfer.room(0, [10, 11], [0, 0])
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "does not have the deployment key" in rig.owner.cause.message
    assert transfer.num_landed == 0


@pytest.mark.parametrize("field", ["connector", "digest_algorithm", "metadata", "token"])
async def test_an_answer_that_was_changed_on_its_way_is_no_answer(rig: Any, until: Any, field: str) -> None:
    source = rig.expect()
    honest = AttachServicer._accepted

    def changed(self: Any, *args: Any) -> kv_source_pb2.AttachEvent:
        answer = honest(self, *args)
        value = getattr(answer.accepted, field)
        if isinstance(value, str):
            setattr(answer.accepted, field, {"connector": "fake", "digest_algorithm": "xxh3_64"}[field])
        else:
            setattr(answer.accepted, field, value + b"x")
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttachServicer, "_accepted", changed)
        transfer = rig.receive()
        await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "does not have the deployment key" in rig.owner.cause.message
    assert not source.is_wanted


def alive(engine_tick: int = 1) -> kv_source_pb2.AttachEvent:
    return kv_source_pb2.AttachEvent(alive=kv_source_pb2.Alive(engine_tick=engine_tick))


def published(first_index: int, count: int) -> kv_source_pb2.AttachEvent:
    blocks = kv_source_pb2.Published(first_index=first_index, digests=range(count), locations=range(count))
    return kv_source_pb2.AttachEvent(published=blocks)


def finished() -> kv_source_pb2.AttachEvent:
    first = [request_pb2.Outputs(token_ids=[5])]
    return kv_source_pb2.AttachEvent(
        finished=kv_source_pb2.Finished(num_tokens=22, request_digest=DIGEST, first_outputs=first)
    )


def failed(code: str, message: str) -> kv_source_pb2.AttachEvent:
    return kv_source_pb2.AttachEvent(failed=kv_source_pb2.Failed(error=request_pb2.Error(code=code, message=message)))


class Ways:
    """Two connectors at the receiver, of which the first is better."""

    def __init__(self) -> None:
        self.fast, self.slow = FakeConnector(), FakeConnector()
        self.fast.name, self.slow.name = "fast", "slow"
        self.connectors = ConnectorSet([self.fast, self.slow])

    def receive(self, rig: Any) -> Any:
        return rig.receive(connector_set=self.connectors, connectors=self.connectors.names)


async def _until_closed(requests: AsyncIterable[Any]) -> None:
    async for _ in requests:
        pass


async def test_a_choice_that_was_made_before_the_fallback_does_not_end_the_transfer(rig: Any, until: Any) -> None:
    ways, fell_back, opened = Ways(), asyncio.Event(), []

    async def source(number: int, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        opened.append(list((await anext(aiter(requests))).open.connectors))
        if number == 2:
            await fell_back.wait()
        yield accepted(opened[-1][0])
        if number == 2:
            await _until_closed(requests)
            return
        yield published(0, 2)
        if number == 3:
            yield finished()
            await _until_closed(requests)

    await rig.play(source)
    transfer = ways.receive(rig)
    transfer.room(0, [10, 11], [0, 0])
    await until(lambda: len(opened) == 2)
    assert [read.indexes for read in ways.fast.reads] == [[0, 1]]
    ways.fast.reads[0].end(ReadOutcome.FAILED, TransferFailed("it stalls"))
    await until(lambda: transfer.given_up)
    fell_back.set()
    await until(lambda: ways.slow.reads)
    assert opened == [["fast", "slow"], ["fast", "slow"], ["slow"]]
    ways.slow.reads[0].land()
    ways.slow.reads[0].end()
    await until(lambda: transfer.state is ReceiverState.LANDED)
    assert rig.owner.cause is None


async def test_i6_a_source_that_hangs_up_after_a_fallback_has_the_grace_and_no_more(
    rig: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ways = Ways()

    async def source(number: int, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        if number == 1:
            yield accepted("fast")
            yield published(0, 1)
            await _until_closed(requests)

    await rig.play(source)
    transfer = ways.receive(rig)
    transfer.room(0, [10], [0])
    await until(lambda: ways.fast.reads)
    ways.fast.reads[0].end(ReadOutcome.FAILED, TransferFailed("it stalls"))
    await until(lambda: transfer.state is ReceiverState.FAILED, 3.0)
    assert "is lost" in rig.owner.cause.message
    assert rig.num_streams <= 3 + GRACE_S / REATTACH_EVERY_S
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("broke" in warning for warning in warnings) == 1, "one fault is one warning"


async def test_i6_a_source_that_takes_streams_and_says_nothing_is_lost_after_the_grace(rig: Any, until: Any) -> None:
    async def source(number: int, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        if transfer.state is ReceiverState.ATTACHING:
            yield accepted("local")
        else:
            await _until_closed(requests)

    await rig.play(source)
    transfer = rig.receive()
    await until(lambda: transfer.state is not ReceiverState.ATTACHING)
    since = time.monotonic()
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert time.monotonic() - since < HANG_S / 2, "nobody waits for a prefill call any more"


async def test_i6_a_source_that_is_alive_and_never_accepts_is_lost_in_time(rig: Any, until: Any) -> None:
    async def source(number: int, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        while True:
            yield alive()
            await asyncio.sleep(0.05)

    await rig.play(source)
    transfer = rig.receive(attach_timeout_s=0.1, grace_s=0.0)
    await until(lambda: transfer.state is ReceiverState.FAILED, 3.0)


async def test_i6_a_stream_that_the_source_does_not_end_ends_soon_after_the_release(rig: Any, until: Any) -> None:
    async def source(number: int, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        yield accepted("local")
        async for request in requests:
            if request.WhichOneof("message") == "want":
                break
        yield finished()
        for tick in range(10_000):
            yield alive(tick)
            await asyncio.sleep(0.02)

    await rig.play(source)
    transfer = rig.receive()
    transfer.room(0, [], [])
    await until(lambda: transfer.state is ReceiverState.LANDED)
    await until(lambda: rig.tasks[0].done(), TICK_STALLED_S + 2.0)


async def test_i8_a_connector_that_was_not_asked_for_is_refused(rig: Any, until: Any) -> None:
    ways = Ways()

    async def source(number: int, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        yield accepted("slow")
        await _until_closed(requests)

    await rig.play(source)
    transfer = rig.receive(connector_set=ways.connectors, connectors=("fast",))
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "'slow', which was not asked for" in rig.owner.cause.message


@pytest.mark.parametrize("code", ["needs_prefill", "evicted"])
async def test_i9_a_source_cannot_speak_for_the_receivers_engine(rig: Any, until: Any, code: str) -> None:
    async def source(number: int, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        yield failed(code, "many")

    await rig.play(source)
    transfer = rig.receive()
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert type(rig.owner.cause) is TransferFailed


async def test_what_a_source_has_to_say_of_its_failure_is_cut(rig: Any, until: Any) -> None:
    async def source(number: int, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        yield failed("transfer_failed", "x" * (1 << 20))

    await rig.play(source)
    transfer = rig.receive()
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert rig.owner.cause.message == "x" * 2000


async def test_i6_a_connector_that_breaks_its_promise_fails_the_transfer(rig: Any, until: Any) -> None:
    class Raising(FakeConnector):
        def read(self, order: ReadOrder, listener: ReadListener) -> FakeRead:
            raise RuntimeError("a bug")

    async def source(number: int, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        yield accepted()
        yield published(0, 1)
        await _until_closed(requests)

    await rig.play(source)
    transfer = rig.receive(connector_set=ConnectorSet([Raising()]), connectors=("fake",))
    transfer.room(0, [10], [0])
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert type(rig.owner.cause) is InternalError


@pytest.mark.parametrize("num_tokens", [[1] * 257, [1, 2], [0], [100_000]], ids=["257", "two", "none", "many"])
async def test_a_source_that_finishes_with_other_than_a_token_a_sequence_is_refused(
    rig: Any, until: Any, num_tokens: list[int]
) -> None:
    async def wordy(number: int, requests: Any) -> AsyncIterator[kv_source_pb2.AttachEvent]:
        yield accepted("local")
        outputs = [request_pb2.Outputs(token_ids=[1] * num) for num in num_tokens]
        yield kv_source_pb2.AttachEvent(
            finished=kv_source_pb2.Finished(num_tokens=8, request_digest=DIGEST, first_outputs=outputs)
        )
        async for _ in requests:
            pass

    await rig.play(wordy)
    transfer = rig.receive()
    transfer.room(0, [10, 11], [0, 0])
    await until(lambda: transfer.state is ReceiverState.FAILED)
    assert "one token of each is needed, for at most 256" in rig.owner.cause.message


async def test_blocks_that_nobody_wants_cost_nothing(rig: Any, until: Any) -> None:
    """Digests of 200,000 blocks for one that is wanted."""
    count = 200_000

    async def wordy(number: int, requests: Any) -> AsyncIterator[kv_source_pb2.AttachEvent]:
        yield accepted("local")
        yield kv_source_pb2.AttachEvent(
            published=kv_source_pb2.Published(first_index=0, digests=[1] * count, locations=[0] * count)
        )
        async for _ in requests:
            pass

    connector = FakeConnector()
    connector.name = "local"
    await rig.play(wordy)
    transfer = rig.receive(connector_set=ConnectorSet([connector]))
    with LoopWatch() as watch:
        transfer.room(3, [10], [0])
        await until(lambda: connector.reads)
    [read] = connector.reads
    assert read.indexes == [3]
    assert watch.longest_s < LOOP_S, watch.callback
    transfer.stop()
