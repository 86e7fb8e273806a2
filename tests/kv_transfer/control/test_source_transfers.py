"""`SourceTransfers`: which attach finds which transfer, and that a reference is good for one use only (I8)."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pdserve.common.errors import Draining, TransferFailed
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control import source_transfers
from pdserve.kv_transfer.control.source_transfer import LeaseLimits, PeerId
from pdserve.kv_transfer.control.source_transfers import SourceTransfers
from pdserve.kv_transfer.control.transfer_state import SourceState
from tests.support.run.waiting import HANG_S
from tests.support.transfers.transfer_fakes import (
    DIGEST,
    LIMITS,
    RECEIVER,
    TRANSFER_ID,
    FakeConnector,
    SourceEnd,
    SourceOwner,
    expected,
    turns,
)


def make(limits: LeaseLimits = LIMITS) -> tuple[SourceTransfers, SourceOwner]:
    owner = SourceOwner()
    return SourceTransfers(ConnectorSet([FakeConnector()]), limits, owner), owner


async def test_attach_may_come_after_the_prefill_call() -> None:
    transfers, _ = make()
    transfer = transfers.expect(expected())
    assert await transfers.attach(TRANSFER_ID, RECEIVER, DIGEST, SourceEnd(), 0) is transfer
    transfer.cancel()


async def test_attach_may_come_before_the_prefill_call() -> None:
    transfers, _ = make()
    attaching = asyncio.create_task(transfers.attach(TRANSFER_ID, RECEIVER, DIGEST, SourceEnd(), 0))
    await turns()
    transfer = transfers.expect(expected())
    assert await attaching is transfer
    await asyncio.sleep(LIMITS.attach_timeout_s + 0.05)
    assert not transfer.has_ended
    transfer.cancel()


async def test_i6_an_attach_without_a_prefill_call_ends_in_time_and_leaves_nothing() -> None:
    transfers, _ = make()
    with pytest.raises(TransferFailed, match="no such transfer"):
        await asyncio.wait_for(transfers.attach(TRANSFER_ID, RECEIVER, DIGEST, SourceEnd(), 0), HANG_S)
    assert transfers._awaited == {}
    assert len(transfers) == 0


async def test_an_attach_that_is_cancelled_does_not_take_a_newer_one_along() -> None:
    transfers, _ = make()
    older = asyncio.create_task(transfers.attach(TRANSFER_ID, RECEIVER, DIGEST, SourceEnd(), 0))
    await turns()
    newer = asyncio.create_task(transfers.attach(TRANSFER_ID, RECEIVER, DIGEST, SourceEnd(), 0))
    await turns()
    older.cancel()
    await turns()
    transfer = transfers.expect(expected())
    assert await asyncio.wait_for(newer, HANG_S) is transfer
    assert transfers._awaited == {}
    transfer.cancel()


async def test_of_many_streams_that_wait_the_newest_stays() -> None:
    transfers, _ = make()
    streams = [SourceEnd() for _ in range(16)]
    waiting = [asyncio.create_task(transfers.attach(TRANSFER_ID, RECEIVER, DIGEST, stream, 0)) for stream in streams]
    await asyncio.sleep(0)
    transfer = transfers.expect(expected())
    await asyncio.wait_for(asyncio.gather(*waiting), HANG_S)
    assert [stream.heard for stream in streams] == [[("replaced",)]] * 15 + [[]]
    transfer.cancel()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("receiver", "digest"),
    [
        (PeerId(RECEIVER.worker_id, RECEIVER.epoch + 1), DIGEST),
        (PeerId("decode-2", RECEIVER.epoch), DIGEST),
        (RECEIVER, b"x" * 16),
        (RECEIVER, b""),
    ],
)
async def test_i8_another_receiver_epoch_or_request_is_refused(before: bool, receiver: PeerId, digest: bytes) -> None:
    transfers, owner = make()
    if not before:
        transfers.expect(expected())
    attaching = asyncio.create_task(transfers.attach(TRANSFER_ID, receiver, digest, SourceEnd(), 0))
    await turns()
    if before:
        transfers.expect(expected())
    with pytest.raises(TransferFailed, match="another"):
        await attaching
    # the right one is still welcome
    transfer = await transfers.attach(TRANSFER_ID, RECEIVER, DIGEST, SourceEnd(), 0)
    assert owner.heard == []
    transfer.cancel()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [("", "mtp"), ("mtp", ""), ("mtp", "other")])
async def test_i14_a_receiver_that_expects_another_draft_head_is_refused(before: bool, ours: str, theirs: str) -> None:
    transfers, owner = make()
    there = msgspec.structs.replace(expected(), draft_head=ours)
    if not before:
        transfers.expect(there)
    attaching = asyncio.create_task(transfers.attach(TRANSFER_ID, RECEIVER, DIGEST, SourceEnd(), 0, draft_head=theirs))
    await turns()
    if before:
        transfers.expect(there)
    with pytest.raises(TransferFailed, match=f"{ours or 'none'} here, {theirs or 'none'} there"):
        await attaching
    transfer = await transfers.attach(TRANSFER_ID, RECEIVER, DIGEST, SourceEnd(), 0, draft_head=ours)
    assert owner.heard == []
    transfer.cancel()


async def test_i8_an_id_is_used_once_even_after_its_end() -> None:
    transfers, _ = make()
    transfer = transfers.expect(expected())
    with pytest.raises(TransferFailed, match="used before"):
        transfers.expect(expected())
    transfer.cancel()
    for _ in range(3):  # at once, and when the end has been booked
        with pytest.raises(TransferFailed, match="ended"):
            await transfers.attach(TRANSFER_ID, RECEIVER, DIGEST, SourceEnd(), 0)
        with pytest.raises(TransferFailed, match="used before"):
            transfers.expect(expected())
        await turns()
    assert len(transfers) == 0


async def test_tombstones_go_after_every_attach_that_may_still_come() -> None:
    transfers, _ = make(LeaseLimits(attach_timeout_s=0.05, grace_s=0.05, max_s=0.05))
    transfers.expect(expected()).cancel()
    await turns()
    assert len(transfers._tombstones) == 1
    await asyncio.sleep(0.15)
    other = transfers.expect(expected(b"o" * 16))
    assert list(transfers._tombstones) == []
    other.cancel()


async def test_a_leaving_source_revokes_them_all() -> None:
    transfers, _ = make()
    made = [transfers.expect(expected(bytes([number]) * 16)) for number in range(3)]
    stream = SourceEnd()
    await transfers.attach(bytes(16), RECEIVER, DIGEST, stream, 0)
    transfers.revoke_all(Draining("the source is leaving"))
    assert [await transfer.over for transfer in made] == [SourceState.REVOKED] * 3
    assert stream.heard == [("ended", SourceState.REVOKED, "the source is leaving")]
    await turns()
    assert len(transfers) == 0


@pytest.mark.parametrize("transfer_id", [b"", b"x" * 15, b"x" * 17, b"x" * 100_000])
async def test_a_transfer_id_of_another_length_is_refused_at_once(transfer_id: bytes) -> None:
    transfers, _ = make()
    with pytest.raises(TransferFailed, match=f"{len(transfer_id)} bytes, 16 are needed"):
        await transfers.attach(transfer_id, RECEIVER, DIGEST, SourceEnd(), 0)
    assert transfers._awaited == {}


async def test_attaches_that_wait_are_bounded_for_each_peer_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_transfers, "MAX_WAITING", 8)
    monkeypatch.setattr(source_transfers, "MAX_WAITING_PER_PEER", 5)
    transfers, _ = make()
    numbers = iter(range(100))

    def attach(worker_id: str) -> asyncio.Task[object]:
        transfer_id = next(numbers).to_bytes(16, "big")
        return asyncio.create_task(transfers.attach(transfer_id, PeerId(worker_id, 1), DIGEST, SourceEnd(), 0))

    greedy = [attach("greedy") for _ in range(7)]
    await turns()
    assert [task.done() for task in greedy] == [False] * 5 + [True] * 2
    with pytest.raises(TransferFailed, match="5 attaches of greedy"):
        await greedy[-1]
    others = [attach(f"other-{number}") for number in range(4)]
    await turns()
    assert [task.done() for task in others] == [False] * 3 + [True]
    for task in (*greedy, *others):
        task.cancel()
    await asyncio.gather(*greedy, *others, return_exceptions=True)
    assert transfers._num_waiting == {}
    assert transfers._num_waiting_in_all == 0
    # places are free again
    again = attach("greedy")
    await turns()
    assert not again.done()
    again.cancel()


async def test_ids_of_ended_transfers_are_bounded_and_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_transfers, "MAX_TOMBSTONES", 10)
    transfers, _ = make()
    for number in range(30):
        transfers.expect(expected(transfer_id=number.to_bytes(16, "big"))).cancel()
        await asyncio.sleep(0)
    assert len(transfers._tombstones) <= 11
    with pytest.raises(TransferFailed, match="used before"):
        transfers.expect(expected(transfer_id=(29).to_bytes(16, "big")))
