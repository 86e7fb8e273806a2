"""Requested blocks arrive, many reads go side by side, and each can be cancelled at any point."""

from __future__ import annotations

import random
import threading
import time

import pytest

from pdserve.kv_transfer.connector import BlockConnector, BlockToRead, ReadOrder, ReadOutcome
from tests.support.run.waiting import HANG_S

from .contract_link import WINDOW_BLOCKS, LinkContract, Setup
from .recorded_read import NUM_BLOCKS, RecordedRead, Transfer, same_bytes, start_read


class ReadContract(LinkContract):
    # What is asked for arrives.

    def test_whole_transfer_lands(self, setup: Setup) -> None:
        transfer = setup.transfer()
        blocks = transfer.blocks(range(NUM_BLOCKS), range(NUM_BLOCKS))
        read = setup.read(transfer, blocks)
        assert read.wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, setup.receiver_pool, blocks)
        assert len(read.ranges) <= NUM_BLOCKS // WINDOW_BLOCKS, "landed is told in ranges, not block by block"

    def test_scattered_destination(self, setup: Setup) -> None:
        transfer = setup.transfer(100)
        local_blocks = random.Random(3).sample(range(NUM_BLOCKS), 100)
        blocks = transfer.blocks(range(100), local_blocks)
        assert setup.read(transfer, blocks).wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, setup.receiver_pool, blocks)
        untouched = set(range(NUM_BLOCKS)) - set(local_blocks)
        assert not any(any(setup.receiver_pool.block(number)) for number in untouched)

    @pytest.mark.parametrize("first", [1, 7, 8, 9, 99])
    def test_cached_prefix_is_skipped(self, setup: Setup, first: int) -> None:
        transfer = setup.transfer(100)
        blocks = transfer.blocks(range(first, 100), range(100 - first))
        assert setup.read(transfer, blocks).wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, setup.receiver_pool, blocks)

    def test_several_ranges_in_one_read(self, setup: Setup) -> None:
        transfer = setup.transfer(100)
        indexes = [*range(40, 60), 3, 5, 4, *range(90, 100), 0]
        blocks = transfer.blocks(indexes, range(len(indexes)))
        assert setup.read(transfer, blocks).wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, setup.receiver_pool, blocks)

    def test_blocks_published_later_are_read_later(self, setup: Setup) -> None:
        transfer = setup.transfer(60, publish=False)
        for first in range(0, 60, 20):
            transfer.grant.publish(first, transfer.source_blocks[first : first + 20])
            blocks = transfer.blocks(range(first, first + 20), range(first, first + 20))
            assert setup.read(transfer, blocks).wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, setup.receiver_pool, transfer.blocks(range(60), range(60)))

    def test_empty_read_is_done(self, setup: Setup) -> None:
        read = setup.read(setup.transfer(1), [])
        assert read.wait_ended() is ReadOutcome.DONE
        assert read.ranges == []

    def test_source_may_read_from_its_receiver(self, setup: Setup) -> None:
        back = Transfer(setup.link.receiver, setup.receiver_pool, [4, 5])
        read = start_read(setup.link.source, setup.link.receiver.metadata, back.token, back.blocks([0, 1], [0, 1]))
        assert read.wait_ended() is ReadOutcome.DONE
        assert not any(setup.source_pool.block(0))

    # Many at once.

    def test_many_reads_at_once(self, setup: Setup) -> None:
        transfers = [setup.transfer(12, seed=seed) for seed in range(NUM_BLOCKS // 12)]
        wanted = [
            transfer.blocks(range(12), range(12 * number, 12 * number + 12))
            for number, transfer in enumerate(transfers)
        ]
        reads = [setup.read(transfer, blocks) for transfer, blocks in zip(transfers, wanted, strict=True)]
        for transfer, read, blocks in zip(transfers, reads, wanted, strict=True):
            assert read.wait_ended() is ReadOutcome.DONE
            assert same_bytes(transfer, setup.receiver_pool, blocks)

    def test_short_read_does_not_wait_behind_long_one(self, setup: Setup) -> None:
        setup.link.serve_only(0)
        transfer = setup.transfer()
        long = setup.read(transfer, transfer.blocks(range(240), range(240)), faulty=True)
        short = setup.read(transfer, transfer.blocks(range(240, 244), range(240, 244)), faulty=True)
        # Two windows of the long read began before, and a few may overtake. The source serves one window per step, and each step
        # leaves the readers' threads more time: in one step, a thread with the short read could sleep while the other reads all.
        for step in range(15):
            setup.link.serve_only(WINDOW_BLOCKS)
            if short.ends_within(0.02 * 1.5**step):
                break
        assert short.outcome is not None, "the short read waits behind the long one"
        assert short.wait_ended() is ReadOutcome.DONE
        assert long.outcome is None
        setup.link.resume()
        assert long.wait_ended() is ReadOutcome.DONE

    # Cancelling (I7, I13).

    def test_cancel_before_anything_began(self, setup: Setup) -> None:
        setup.link.serve_only(0)
        transfer = setup.transfer()
        first = setup.read(transfer, transfer.blocks(range(64), range(64)), faulty=True)
        second = setup.read(transfer, transfer.blocks(range(64, 128), range(64, 128)), faulty=True)
        second.cancel()
        assert second.wait_ended() is ReadOutcome.CANCELLED
        first.cancel()
        assert first.wait_ended() is ReadOutcome.CANCELLED
        assert first.ranges == second.ranges == []
        setup.link.resume()
        time.sleep(0.1)
        assert not any(setup.snapshot())

    def test_i13_cancelled_read_writes_no_more(self, setup: Setup) -> None:
        setup.link.serve_only(3 * WINDOW_BLOCKS)
        transfer = setup.transfer()
        blocks = transfer.blocks(range(NUM_BLOCKS), range(NUM_BLOCKS))
        read = setup.read(transfer, blocks, faulty=True)
        read.wait_landed(1)
        read.cancel()
        read.cancel()
        assert read.wait_ended() is ReadOutcome.CANCELLED
        after = setup.snapshot()
        setup.link.resume()
        time.sleep(0.1)
        assert setup.snapshot() == after
        assert setup.has_bytes(transfer, read, blocks)
        assert read.broken_rules == []

    def test_cancel_after_the_end_does_nothing(self, setup: Setup) -> None:
        transfer = setup.transfer(10)
        read = setup.read(transfer, transfer.blocks(range(10), range(10)))
        assert read.wait_ended() is ReadOutcome.DONE
        read.cancel()
        again = setup.read(transfer, transfer.blocks(range(10), range(10, 20)))
        assert again.wait_ended() is ReadOutcome.DONE
        assert read.broken_rules == []
        assert read.outcome is ReadOutcome.DONE

    def test_cancel_from_a_listener(self, setup: Setup) -> None:
        transfer = setup.transfer()
        blocks = transfer.blocks(range(NUM_BLOCKS), range(NUM_BLOCKS))
        other = setup.read(transfer, blocks)
        quitter = _Quitter(setup.link.receiver, setup.link.source.metadata, transfer.token, blocks)
        assert quitter.wait_ended() in (ReadOutcome.CANCELLED, ReadOutcome.DONE)
        assert other.wait_ended() is ReadOutcome.DONE

    def test_cancelled_read_does_not_disturb_others(self, setup: Setup) -> None:
        transfer = setup.transfer()
        setup.link.serve_only(2 * WINDOW_BLOCKS + 2)
        doomed = setup.read(transfer, transfer.blocks(range(100), range(100)), faulty=True)
        blocks = transfer.blocks(range(100, 200), range(100, 200))
        other = setup.read(transfer, blocks, faulty=True)
        doomed.cancel()
        setup.link.resume()
        assert doomed.wait_ended() is ReadOutcome.CANCELLED
        assert other.wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, setup.receiver_pool, blocks)


class _Quitter(RecordedRead):
    """Cancels its read as soon as something lands."""

    def __init__(self, receiver: BlockConnector, metadata: bytes, token: bytes, blocks: list[BlockToRead]) -> None:
        super().__init__(len(blocks))
        self._begun = threading.Event()
        self.read = receiver.read(ReadOrder(metadata, token, blocks), self)
        self._begun.set()

    def landed(self, first: int, count: int) -> None:
        super().landed(first, count)
        self._begun.wait(HANG_S)
        self.cancel()
