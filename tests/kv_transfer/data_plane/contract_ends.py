"""Grants are fenced, connectors close, and any order of events keeps the rules."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from pdserve.kv_transfer.connector import BlockToRead, ReadOrder, ReadOutcome
from tests.support.run.waiting import HANG_S

from .contract_link import WINDOW_BLOCKS, LinkContract, Setup
from .recorded_read import BLOCK_BYTES, NUM_BLOCKS, RecordedRead, Transfer


class EndContract(LinkContract):
    # Grants.

    def test_closed_grant_is_fenced_at_once_when_nothing_is_sent(self, setup: Setup) -> None:
        assert setup.transfer(8).close().wait(HANG_S)

    def test_grant_closed_during_a_read_is_fenced(self, setup: Setup) -> None:
        setup.link.serve_only(2 * WINDOW_BLOCKS + 2)
        transfer = setup.transfer()
        blocks = transfer.blocks(range(NUM_BLOCKS), range(NUM_BLOCKS))
        read = setup.read(transfer, blocks, faulty=True)
        read.wait_landed(1)
        fenced = transfer.close()
        assert fenced.wait(HANG_S)
        # What the source writes into its blocks from now on reaches nobody.
        for number in transfer.source_blocks:
            setup.source_pool.block(number)[:] = bytes(BLOCK_BYTES)
        setup.link.resume()
        assert read.wait_failed()
        assert all(any(setup.receiver_pool.block(blocks[position].local_block)) for position in read.landed_blocks)

    def test_closing_twice_calls_each_back_once(self, setup: Setup) -> None:
        transfer = setup.transfer(8)
        assert transfer.close().wait(HANG_S)
        assert transfer.close().wait(HANG_S)

    def test_what_the_source_itself_does_wrong_raises(self, setup: Setup) -> None:
        transfer = setup.transfer(8)
        with pytest.raises(ValueError, match="token"):
            setup.link.source.grant(transfer.token)
        with pytest.raises(ValueError, match="16 bytes"):
            setup.link.source.grant(b"short")
        with pytest.raises(IndexError):
            transfer.grant.publish(8, [NUM_BLOCKS])
        with pytest.raises(ValueError, match="index 3"):
            transfer.grant.publish(3, [transfer.source_blocks[4]])
        transfer.grant.publish(3, [transfer.source_blocks[3]])

    # Ending.

    def test_close_ends_reads(self, setup: Setup) -> None:
        setup.link.serve_only(2 * WINDOW_BLOCKS + 2)
        transfer = setup.transfer()
        reads = [
            setup.read(transfer, transfer.blocks(range(n, 256, 4), range(n, 256, 4)), faulty=True) for n in range(4)
        ]
        setup.link.receiver.close()
        assert [read.outcome for read in reads] == [ReadOutcome.CANCELLED] * 4, "closed means that all have heard"
        after = setup.snapshot()
        setup.link.resume()
        time.sleep(0.05)
        assert setup.snapshot() == after

    def test_close_twice_and_read_after(self, setup: Setup) -> None:
        transfer = setup.transfer(4)
        setup.link.receiver.close()
        setup.link.receiver.close()
        read = setup.read(transfer, transfer.blocks(range(4), range(4)))
        assert read.wait_ended() is ReadOutcome.CANCELLED

    def test_close_of_the_source_fences(self, setup: Setup) -> None:
        transfer = setup.transfer(4)
        setup.link.source.close()
        assert transfer.close().wait(HANG_S)

    def test_close_from_a_listener(self, setup: Setup) -> None:
        transfer = setup.transfer(4)
        read = RecordedRead(4)
        read.when_ended = setup.link.receiver.close
        blocks = transfer.blocks(range(4), range(4))
        setup.link.receiver.read(ReadOrder(setup.link.source.metadata, transfer.token, blocks), read)
        assert read.wait_ended() is ReadOutcome.DONE

    def test_listener_that_raises_is_survived(self, setup: Setup) -> None:
        transfer = setup.transfer(64)
        raising = _Raising(64)
        blocks = transfer.blocks(range(64), range(64))
        setup.link.receiver.read(ReadOrder(setup.link.source.metadata, transfer.token, blocks), raising)
        assert raising.wait_ended() is ReadOutcome.DONE
        assert setup.read(transfer, blocks).wait_ended() is ReadOutcome.DONE

    # Everything at once.

    @pytest.mark.few(3)
    @pytest.mark.parametrize("seed", range(12))
    def test_i13_any_order_of_events(self, make_setup: Callable[..., Setup], seed: int) -> None:
        rng = random.Random(seed)
        setup = make_setup(read_stall_s=0.2)
        reads: list[tuple[Transfer, list[BlockToRead], RecordedRead]] = []
        free = list(range(NUM_BLOCKS))
        rng.shuffle(free)
        fences: list[threading.Event] = []
        for _ in range(60):
            action = rng.choice(["read", "read", "read", "cancel", "silence", "resume", "flip", "close", "wait"])
            if action == "read" and len(free) >= 40:
                count = rng.randint(1, 40)
                transfer = setup.transfer(count, seed=rng.randrange(1 << 30))
                blocks = transfer.blocks(range(count), [free.pop() for _ in range(count)])
                reads.append((transfer, blocks, setup.read(transfer, blocks, faulty=True)))
            elif action == "cancel" and reads:
                rng.choice(reads)[2].cancel()
            elif action == "silence":
                setup.link.serve_only(rng.randint(0, 40))
            elif action == "resume":
                setup.link.resume()
            elif action == "flip":
                setup.link.flip_one_bit()
            elif action == "close" and reads:
                fences.append(rng.choice(reads)[0].close())
            elif action == "wait":
                time.sleep(rng.random() * 0.01)
        if rng.random() < 0.3:
            setup.link.source.close()
        setup.link.resume()
        for transfer, blocks, read in reads:
            read.wait_ended()
            assert setup.has_bytes(transfer, read, blocks)
        assert all(fence.wait(HANG_S) for fence in fences)
        after = setup.snapshot()
        setup.link.close()
        assert setup.snapshot() == after
        assert all(read.broken_rules == [] for _, _, read in reads)


class _Raising(RecordedRead):
    """A listener with a bug."""

    def landed(self, first: int, count: int) -> None:
        super().landed(first, count)
        raise RuntimeError("a listener with a bug")

    def ended(self, *args: object) -> None:
        super().ended(*args)  # type: ignore[arg-type]
        raise RuntimeError("a listener with a bug")
