"""`ReceiverTransfer`: what it pulls, what it drops, and that its blocks come back once and only when no read writes."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.common.errors import TransferFailed, WorkerLost
from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import ReadOutcome
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control import receiver_transfer
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer
from pdserve.kv_transfer.control.transfer_state import ReceiverState
from tests.support.transfers.transfer_fakes import DIGEST, WHERE, FakeConnector, ReceiverEnd, ReceiverOwner, source_ref


class Bench:
    """A transfer of blocks 2 to 5 into local blocks 40 to 43."""

    def __init__(self) -> None:
        self.connector, self.owner, self.stream = FakeConnector(), ReceiverOwner(), ReceiverEnd()
        self.transfer = ReceiverTransfer("r", source_ref(), ConnectorSet([self.connector]), self.owner)

    def attach(self) -> None:
        self.transfer.attached(self.stream, "fake", WHERE, XXH3)

    def room(self) -> None:
        self.transfer.room(2, [40, 41, 42, 43], [0] * 4)

    def receiving(self) -> None:
        self.attach()
        self.room()

    def publish(self, first: int, count: int) -> None:
        self.transfer.published(first, [100 + first + i for i in range(count)], [7 * (first + i) for i in range(count)])

    def finish(self) -> None:
        self.transfer.finished(22, DIGEST, (5,))


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("room_first", [True, False])
async def test_want_goes_out_when_there_is_both_stream_and_room(room_first: bool) -> None:
    bench = Bench()
    first, second = (bench.room, bench.attach) if room_first else (bench.attach, bench.room)
    first()
    assert bench.stream.heard == []
    second()
    assert bench.stream.heard == [("want", 2, 4)]
    assert bench.transfer.state is ReceiverState.RECEIVING


async def test_everything_landed_and_finished_releases_and_gives_back() -> None:
    bench = Bench()
    bench.receiving()
    bench.publish(2, 3)
    bench.publish(5, 1)
    one, two = bench.connector.reads
    assert [(b.index, b.digest, b.local_block, b.location) for b in one.blocks] == [
        (2, 102, 40, 14),
        (3, 103, 41, 21),
        (4, 104, 42, 28),
    ]
    assert (two.indexes, two.token) == ([5], b"k" * 16)
    two.land()
    two.end()
    one.land(1, 2)
    await turn()
    assert bench.owner.heard == []
    one.land(0, 1)
    await turn()
    assert bench.owner.heard == [("landed", 4)]
    bench.finish()
    assert bench.transfer.state is ReceiverState.RECEIVING, "the last read may still write"
    one.end()
    await turn()
    assert bench.owner.heard == [("landed", 4), ("source_finished", 22, (5,)), ("fenced",)]
    assert bench.stream.heard == [("want", 2, 4), ("landed", 4), ("release",)]
    assert bench.transfer.state is ReceiverState.LANDED


async def test_blocks_are_pulled_once_and_only_those_that_are_wanted() -> None:
    bench = Bench()
    bench.receiving()
    for first, count in ((0, 2), (6, 3), (2**32 - 1, 1), (0, 4), (3, 1), (2, 2), (1, 9), (2, 4), (0, 0)):
        bench.publish(first, count)
    assert [read.indexes for read in bench.connector.reads] == [[2, 3], [4, 5]]


async def test_nothing_is_pulled_before_there_is_room() -> None:
    bench = Bench()
    bench.attach()
    bench.publish(0, 9)
    assert bench.connector.reads == []


async def test_digests_without_their_locations_fail_it() -> None:
    bench = Bench()
    bench.receiving()
    bench.transfer.published(2, [1, 2, 3], [1, 2])
    assert bench.owner.words == ["failed", "fenced"]
    whole = Bench()
    whole.receiving()
    whole.transfer.published(2, [1, 2], [])
    assert whole.connector.reads[0].indexes == [2, 3]


async def test_nothing_to_fetch_lands_with_finished() -> None:
    bench = Bench()
    bench.attach()
    bench.transfer.room(6, [], [])
    assert bench.transfer.state is ReceiverState.ATTACHED
    bench.finish()
    assert bench.transfer.state is ReceiverState.LANDED
    assert bench.owner.words == ["source_finished", "fenced"]
    assert bench.stream.heard == [("want", 6, 0), ("release",)]


async def test_i8_another_digest_at_finished_fails_it_for_good() -> None:
    bench = Bench()
    bench.receiving()
    bench.publish(2, 4)
    bench.transfer.finished(22, b"x" * 16, (5,))
    assert bench.owner.heard == [("failed", "DigestMismatch")]
    assert bench.transfer.state is ReceiverState.DRAINING
    bench.connector.reads[0].end(ReadOutcome.CANCELLED)
    await turn()
    assert bench.transfer.state is ReceiverState.FAILED
    assert bench.owner.words == ["failed", "fenced"]


async def test_a_source_that_finishes_before_it_was_wanted_fails_it() -> None:
    bench = Bench()
    bench.attach()
    bench.finish()
    assert bench.owner.heard == [("failed", "TransferFailed")]


async def test_finished_counts_once() -> None:
    bench = Bench()
    bench.receiving()
    bench.publish(2, 4)
    bench.finish()
    bench.transfer.finished(9, DIGEST, (6,))
    assert bench.owner.heard == [("source_finished", 22, (5,))]


async def test_i14_an_end_before_all_blocks_are_published_fails_the_transfer() -> None:
    bench = Bench()
    bench.receiving()
    bench.publish(2, 3)
    bench.finish()
    assert bench.owner.heard[0] == ("failed", "TransferFailed")
    assert "the source finished after 3 of 4 wanted blocks" in str(bench.transfer.cause)


async def test_a_reattach_says_want_again_changes_no_state_and_reads_go_on() -> None:
    bench = Bench()
    bench.receiving()
    bench.publish(2, 2)
    bench.transfer.detached(bench.stream)
    bench.connector.reads[0].land()
    await turn()
    assert (bench.owner.heard, bench.transfer.num_landed) == ([("landed", 2)], 2)
    assert bench.transfer.state is ReceiverState.RECEIVING
    again = ReceiverEnd()
    bench.transfer.attached(again, "fake", WHERE, XXH3)
    assert again.heard == [("want", 2, 4)]
    bench.transfer.detached(bench.stream)
    bench.publish(2, 4)
    assert [read.indexes for read in bench.connector.reads] == [[2, 3], [4, 5]]
    bench.connector.reads[1].land()
    for read in bench.connector.reads:
        read.end()
    bench.finish()
    await turn()
    assert again.heard == [("want", 2, 4), ("release",)]


async def test_landed_is_told_at_first_when_due_and_before_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_transfer, "NOTIFY_EVERY_S", 600.0)
    bench = Bench()
    bench.receiving()
    for index in (2, 3, 4):
        bench.publish(index, 1)
    for read in bench.connector.reads:
        read.land()
    await turn()
    assert (bench.owner.heard, bench.transfer.num_landed) == ([("landed", 1)], 3)
    monkeypatch.setattr(receiver_transfer, "NOTIFY_EVERY_S", 0.0)
    bench.publish(5, 1)
    bench.connector.reads[3].land()
    await turn()
    assert bench.owner.heard == [("landed", 1), ("landed", 4)]
    assert bench.stream.heard[1:] == [("landed", 1), ("landed", 4)]

    monkeypatch.setattr(receiver_transfer, "NOTIFY_EVERY_S", 600.0)
    bench = Bench()
    bench.receiving()
    for index in (2, 3, 4):
        bench.publish(index, 1)
        bench.connector.reads[-1].land()
    await turn()
    bench.connector.reads[0].end(ReadOutcome.FAILED, TransferFailed("no"))
    await turn()
    assert bench.owner.heard == [("landed", 1), ("landed", 3), ("failed", "TransferFailed")]


async def test_a_failed_read_fails_it_and_cancels_the_others() -> None:
    bench = Bench()
    bench.receiving()
    bench.publish(2, 1)
    bench.publish(3, 3)
    one, two = bench.connector.reads
    one.end(ReadOutcome.FAILED, TransferFailed("no"))
    await turn()
    assert bench.owner.heard == [("failed", "TransferFailed")]
    assert (one.num_cancels, two.num_cancels) == (0, 1)
    two.land(0, 2)
    await turn()
    assert bench.owner.words == ["failed"], "what lands while it drains is nobody's news"
    two.end(ReadOutcome.DONE)
    await turn()
    assert bench.owner.words == ["failed", "fenced"]
    assert bench.transfer.state is ReceiverState.FAILED
    assert bench.stream.heard[-1] == ("close",)


@pytest.mark.parametrize("stage", ["new", "attached", "room", "receiving", "reading", "all landed", "detached"])
@pytest.mark.parametrize("how", ["stop", "fail"])
async def test_i13_every_end_at_every_stage_gives_back_once_and_after_the_last_read(stage: str, how: str) -> None:
    bench = Bench()
    transfer = bench.transfer
    if stage == "attached":
        bench.attach()
    elif stage == "room":
        bench.room()
    elif stage != "new":
        bench.receiving()
    if stage in ("reading", "all landed", "detached"):
        bench.publish(2, 3)
        bench.publish(5, 1)
        bench.connector.reads[0].land(0, 2)
        await turn()
    if stage == "all landed":
        bench.connector.reads[0].land(2, 1)
        bench.connector.reads[1].land()
        await turn()
    if stage == "detached":
        transfer.detached(bench.stream)
    transfer.stop() if how == "stop" else transfer.fail(WorkerLost("gone"))
    transfer.stop()
    transfer.fail(WorkerLost("again"))
    bench.publish(2, 4)
    bench.finish()
    assert bench.owner.words.count("failed") == (how == "fail")
    reads = bench.connector.reads
    if reads:
        assert transfer.state is ReceiverState.DRAINING
        reads[0].end(ReadOutcome.CANCELLED)
        await turn()
        assert "fenced" not in bench.owner.words
        reads[1].end(ReadOutcome.DONE)
        await turn()
    assert transfer.state is (ReceiverState.CANCELLED if how == "stop" else ReceiverState.FAILED)
    had_room = stage not in ("new", "attached")
    assert bench.owner.words.count("fenced") == had_room
    if not had_room:  # room that was on its way comes straight back
        bench.room()
        assert bench.owner.words.count("fenced") == 1
    late = ReceiverEnd()
    transfer.attached(late, "fake", WHERE, XXH3)
    assert late.heard == [("close",)]


class TwoWays:
    """A transfer of blocks 2 to 5 for which there are a fast and a slow connector."""

    def __init__(self) -> None:
        self.fast, self.slow = FakeConnector(), FakeConnector()
        self.fast.name, self.slow.name = "fast", "slow"
        self.owner, self.stream = ReceiverOwner(), ReceiverEnd()
        self.connectors = ConnectorSet([self.fast, self.slow])
        self.transfer = ReceiverTransfer("r", source_ref(), self.connectors, self.owner)
        self.transfer.attached(self.stream, "fast", WHERE, XXH3)
        self.transfer.room(2, [40, 41, 42, 43], [0] * 4)

    def publish(self, first: int, count: int) -> None:
        self.transfer.published(first, list(range(count)), list(range(count)))

    async def fail_first_of_two_reads(self) -> None:
        self.publish(2, 2)
        self.publish(4, 2)
        one, two = self.fast.reads
        one.land(0, 1)
        one.end(ReadOutcome.FAILED, TransferFailed("it stalls"))
        await turn()
        assert two.num_cancels == 1

    async def end_second(self) -> None:
        self.fast.reads[1].land(1, 1)
        self.fast.reads[1].end(ReadOutcome.CANCELLED)
        await turn()


async def test_i13_a_failed_connector_is_left_only_when_all_its_reads_have_ended() -> None:
    ways = TwoWays()
    await ways.fail_first_of_two_reads()
    assert (ways.transfer.wants_attach, ways.transfer.given_up) == (False, {"fast"})
    ways.publish(2, 4)
    assert (len(ways.slow.reads), len(ways.fast.reads)) == (0, 2), "the second read may still write"
    await ways.end_second()
    assert ways.transfer.wants_attach
    assert ways.stream.heard[-1] == ("close",)
    ways.transfer.detached(ways.stream)
    ways.transfer.attached(ReceiverEnd(), "slow", WHERE, XXH3)
    assert not ways.transfer.wants_attach
    ways.publish(2, 4)
    assert ways.slow.reads[0].indexes == [3, 4], "blocks 2 and 5 have landed"
    ways.slow.reads[0].land()
    ways.slow.reads[0].end()
    await turn()
    ways.transfer.finished(22, DIGEST, (5,))
    assert ways.transfer.state is ReceiverState.LANDED
    assert ways.transfer.connector_name == "slow"
    assert "failed" not in ways.owner.words


async def test_i13_a_stream_that_breaks_meanwhile_does_not_hurry_the_change() -> None:
    ways = TwoWays()
    await ways.fail_first_of_two_reads()
    ways.transfer.detached(ways.stream)
    again = ReceiverEnd()
    ways.transfer.attached(again, "slow", WHERE, XXH3)
    ways.publish(2, 4)
    assert ways.slow.reads == []
    await ways.end_second()
    assert ways.transfer.wants_attach
    assert again.heard[-1] == ("close",)
    ways.transfer.attached(ReceiverEnd(), "slow", WHERE, XXH3)
    ways.publish(2, 4)
    assert ways.slow.reads[0].indexes == [3, 4]


async def test_a_connector_that_was_given_up_or_is_not_here_is_refused() -> None:
    bench = Bench()
    bench.transfer.attached(bench.stream, "carrier pigeon", WHERE, XXH3)
    assert (bench.owner.heard, bench.stream.heard) == ([("failed", "TransferFailed")], [("close",)])
    ways = TwoWays()
    await ways.fail_first_of_two_reads()
    await ways.end_second()
    ways.transfer.attached(ReceiverEnd(), "slow", WHERE, XXH3)
    ways.transfer.attached(ReceiverEnd(), "fast", WHERE, XXH3)
    assert ("failed", "TransferFailed") in ways.owner.heard
    assert ways.transfer.state is ReceiverState.FAILED


@pytest.mark.parametrize("drained", [False, True])
async def test_i13_the_failed_connector_chosen_before_it_failed_is_not_read_over(drained: bool) -> None:
    ways = TwoWays()
    ways.transfer.detached(ways.stream)
    await ways.fail_first_of_two_reads()
    if drained:
        await ways.end_second()
    late = ReceiverEnd()
    ways.transfer.attached(late, "fast", WHERE, XXH3)
    ways.publish(2, 4)
    if not drained:
        assert late.heard == [], "it is needed as long as reads drain"
        await ways.end_second()
    assert late.heard[-1] == ("close",)
    assert ways.transfer.wants_attach
    ways.transfer.detached(late)
    ways.transfer.attached(ReceiverEnd(), "slow", WHERE, XXH3)
    ways.publish(2, 4)
    assert (len(ways.fast.reads), ways.slow.reads[0].indexes) == (2, [3, 4])
    assert "failed" not in ways.owner.words


async def test_i7_a_request_that_ends_during_the_change_gets_its_blocks_back_once() -> None:
    ways = TwoWays()
    await ways.fail_first_of_two_reads()
    ways.transfer.stop()
    assert "fenced" not in ways.owner.words
    await ways.end_second()
    assert ways.owner.words.count("fenced") == 1
    assert not ways.transfer.wants_attach


async def test_i13_blocks_in_quarantine_are_counted_until_the_last_read_has_ended() -> None:
    ways = TwoWays()
    ways.publish(2, 4)
    assert ways.transfer.num_quarantined == 0, "a read that is wanted quarantines nothing"
    ways = TwoWays()
    await ways.fail_first_of_two_reads()
    assert (ways.transfer.num_quarantined, ways.transfer.fell_back_from) == (3, ["fast"]), "block 2 has landed"
    await ways.end_second()
    assert ways.transfer.num_quarantined == 0
    ways = TwoWays()
    await ways.fail_first_of_two_reads()
    ways.transfer.fail(cause := TransferFailed("the source is lost"))
    assert (ways.transfer.num_quarantined, ways.transfer.cause) == (4, cause), "no block goes back before all may"
    await ways.end_second()
    assert ways.transfer.num_quarantined == 0
