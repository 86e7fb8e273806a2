"""`SourceTransfer`: what it tells the receiver, and every way in which its lease ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdserve.common.errors import Draining, InternalError
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.source_transfer import LeaseLimits, SourceResult, SourceTransfer
from pdserve.kv_transfer.control.transfer_state import SourceState
from tests.support.run.waiting import HANG_S
from tests.support.transfers.transfer_fakes import (
    DIGEST,
    LIMITS,
    FakeConnector,
    SourceEnd,
    SourceOwner,
    expected,
    turns,
)

RESULT = SourceResult(22, (5,))
FINISHED = ("finished", 22, (5,), DIGEST)


class Bench:
    """A transfer of 6 blocks, and its surroundings."""

    def __init__(self, limits: LeaseLimits = LIMITS, lease_s: float = 5.0, fence_at_once: bool = True) -> None:
        self.connector, self.owner, self.stream = FakeConnector(fence_at_once), SourceOwner(), SourceEnd()
        self.transfer = SourceTransfer(expected(lease_s=lease_s), ConnectorSet([self.connector]), limits, self.owner)
        self.grant = self.connector.grants[self.transfer.token]

    def complete(self) -> None:
        self.transfer.attach(self.stream, 0)
        self.transfer.want(0, 6)
        self.transfer.settled(0, range(10, 16), each(range(100, 106)))
        self.transfer.computed(RESULT)

    async def end(self) -> None:
        """Cancel the transfer, as a test must that has not ended it."""
        self.transfer.cancel()
        await asyncio.sleep(0)


def each(digests: Sequence[int]) -> list[tuple[int, ...]]:
    """One per block."""
    return [(digest,) for digest in digests]


async def over(bench: Bench) -> SourceState:
    state = await asyncio.wait_for(asyncio.shield(bench.transfer.over), HANG_S)
    await turns()
    return state


async def test_what_is_settled_is_granted_and_published_and_then_finished() -> None:
    bench = Bench()
    bench.transfer.attach(bench.stream, 0)
    bench.transfer.want(2, 4)
    assert bench.owner.heard == [("wanted", 2)]
    bench.transfer.settled(2, [30, 31, 32], each([7, 8, 9]))
    bench.transfer.computed(RESULT)
    assert bench.transfer.state is SourceState.OPEN
    bench.transfer.settled(5, [33], each([10]))
    assert bench.grant.published == {2: 30, 3: 31, 4: 32, 5: 33}
    assert bench.stream.heard == [("published", 2, ((7,), (8,), (9,))), ("published", 5, ((10,),)), FINISHED]
    assert bench.transfer.state is SourceState.COMPLETE
    bench.transfer.release()
    assert await over(bench) is SourceState.RELEASED
    assert bench.stream.heard[-1] == ("ended", SourceState.RELEASED, None)
    assert bench.owner.heard[-1] == ("ended",)


async def test_computed_before_wanted_is_told_when_it_is_wanted() -> None:
    bench = Bench()
    bench.transfer.computed(RESULT)
    bench.transfer.attach(bench.stream, 0)
    assert bench.stream.heard == []
    bench.transfer.want(0, 1)
    bench.transfer.settled(0, [1], each([2]))
    assert bench.stream.heard == [("published", 0, ((2,),)), FINISHED]
    await bench.end()


async def test_nothing_wanted_is_finished_as_soon_as_it_is_computed() -> None:
    bench = Bench()
    bench.transfer.attach(bench.stream, 0)
    bench.transfer.want(6, 0)
    bench.transfer.computed(RESULT)
    assert bench.stream.heard == [FINISHED]
    await bench.end()


async def test_want_counts_once_and_the_first_result_stands() -> None:
    bench = Bench()
    bench.complete()
    bench.transfer.want(3, 3)
    bench.transfer.computed(SourceResult(22, (6,)))
    assert bench.owner.heard == [("wanted", 0)]
    assert bench.stream.heard.count(FINISHED) == 1
    assert len([heard for heard in bench.stream.heard if heard[0] == "finished"]) == 1
    await bench.end()


async def test_nobody_attached_in_time_expires_it() -> None:
    bench = Bench()
    assert await over(bench) is SourceState.EXPIRED
    assert bench.transfer.cause is not None
    assert "no receiver attached" in bench.transfer.cause.message
    assert bench.owner.heard == [("ended",)]


async def test_an_attached_transfer_outlives_the_attach_timeout() -> None:
    bench = Bench()
    bench.transfer.attach(bench.stream, 0)
    await asyncio.sleep(LIMITS.attach_timeout_s + 0.1)
    assert not bench.transfer.has_ended
    await bench.end()


async def test_a_broken_stream_has_the_grace_and_then_expires() -> None:
    bench = Bench(LeaseLimits(attach_timeout_s=5.0, grace_s=1.0, max_s=5.0))
    bench.complete()
    bench.transfer.detach(bench.stream, "it broke")
    await asyncio.sleep(0.02)
    assert not bench.transfer.has_ended
    assert await over(bench) is SourceState.EXPIRED


@pytest.mark.few(4)
@pytest.mark.parametrize(("have", "repeated"), [(0, [2, 4]), (1, [2, 4]), (2, [4]), (3, [4]), (4, [])])
async def test_a_reattach_within_the_grace_goes_on_from_what_has_landed(have: int, repeated: list[int]) -> None:
    bench = Bench()
    bench.transfer.attach(bench.stream, 0)
    bench.transfer.want(2, 4)
    bench.transfer.settled(2, [30, 31], each([7, 8]))
    bench.transfer.detach(bench.stream, "it broke")
    bench.transfer.settled(4, [32, 33], each([9, 10]))
    bench.transfer.computed(RESULT)
    again = SourceEnd()
    bench.transfer.attach(again, have)
    assert [heard[1] for heard in again.heard if heard[0] == "published"] == repeated
    assert again.heard[-1] == FINISHED
    assert ("finished", 22, (5,), DIGEST) not in bench.stream.heard
    await asyncio.sleep(LIMITS.grace_s + 0.05)
    assert not bench.transfer.has_ended
    await bench.end()


async def test_a_newer_stream_replaces_an_older_whose_end_changes_nothing() -> None:
    bench = Bench()
    bench.transfer.attach(bench.stream, 0)
    newer = SourceEnd()
    bench.transfer.attach(newer, 0)
    assert bench.stream.heard == [("replaced",)], "whoever still listens there may come again"
    bench.transfer.detach(bench.stream, "late")
    await asyncio.sleep(LIMITS.grace_s + 0.05)
    assert not bench.transfer.has_ended
    bench.transfer.want(0, 1)
    bench.transfer.settled(0, [1], each([2]))
    assert newer.heard == [("published", 0, ((2,),))]
    await bench.end()


@pytest.mark.parametrize("limits", [LeaseLimits(5, 5, 0.1), LeaseLimits(5, 5, 60)])
async def test_i6_the_lease_ends_with_its_time_however_alive_the_receiver_is(limits: LeaseLimits) -> None:
    bench = Bench(limits, lease_s=0.1 if limits.max_s > 1 else 60)
    bench.complete()
    assert await over(bench) is SourceState.EXPIRED
    assert bench.stream.heard[-1][1] is SourceState.EXPIRED


ENDS = {
    "cancel": (lambda transfer: transfer.cancel(), SourceState.CANCELLED),
    "revoke": (lambda transfer: transfer.revoke(Draining("leaving")), SourceState.REVOKED),
    "fail": (lambda transfer: transfer.fail(InternalError("broken")), SourceState.FAILED),
    "release": (lambda transfer: transfer.release(), SourceState.CANCELLED),
}


@pytest.mark.parametrize("stage", ["expected", "attached", "wanted", "published", "complete", "detached"])
@pytest.mark.parametrize("how", list(ENDS))
async def test_every_end_at_every_stage_fences_once_and_then_gives_back_once(stage: str, how: str) -> None:
    bench = Bench(fence_at_once=False)
    transfer = bench.transfer
    if stage in ("complete", "detached"):
        bench.complete()
    elif stage != "expected":
        transfer.attach(bench.stream, 0)
    if stage in ("wanted", "published"):
        transfer.want(0, 6)
    if stage == "published":
        transfer.settled(0, [1, 2], each([3, 4]))
    if stage == "detached":
        transfer.detach(bench.stream, "it broke")
    end, state = ENDS[how]
    end(transfer)
    if how == "release" and stage in ("complete", "detached"):
        state = SourceState.RELEASED
    assert await over(bench) is state
    assert bench.grant.closed
    assert ("ended",) not in bench.owner.heard, "given back before it was fenced"
    for again, _ in ENDS.values():
        again(transfer)
    transfer.want(0, 1)
    transfer.settled(0, [1], each([3]))
    transfer.computed(RESULT)
    transfer.detach(bench.stream, "late")
    transfer.landed(3)
    bench.grant.fence()
    await turns()
    assert bench.owner.heard.count(("ended",)) == 1
    ended = [heard for heard in bench.stream.heard if heard[0] == "ended"]
    assert len(ended) == (0 if stage in ("expected", "detached") else 1)
    assert transfer.state is state
