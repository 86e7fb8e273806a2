"""Sources that go or fall silent, references that open nothing, bytes that are wrong on their way."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pdserve.kv_transfer.connector import BlockToRead, ReadOutcome

from .contract_link import WINDOW_BLOCKS, LinkContract, Setup
from .recorded_read import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    make_pool,
    same_bytes,
    start_read,
)


class FaultContract(LinkContract):
    # The source goes, or falls silent.

    def test_source_dies_during_a_read(self, setup: Setup) -> None:
        setup.link.serve_only(3 * WINDOW_BLOCKS)
        transfer = setup.transfer()
        blocks = transfer.blocks(range(NUM_BLOCKS), range(NUM_BLOCKS))
        read = setup.read(transfer, blocks, faulty=True)
        read.wait_landed(1)
        setup.link.source.close()
        setup.link.resume()
        assert read.wait_failed()
        assert 0 < read.num_landed < NUM_BLOCKS
        assert setup.has_bytes(transfer, read, blocks)

    def test_nobody_there(self, setup: Setup) -> None:
        transfer = setup.transfer(4)
        blocks = transfer.blocks(range(4), range(4))
        metadata = setup.link.source.metadata
        setup.link.source.close()
        reads = [start_read(setup.link.receiver, metadata, transfer.token, blocks) for _ in range(5)]
        assert all(read.wait_failed() for read in reads)

    def test_i13_stalled_source_that_goes_on_changes_no_byte(self, make_setup: Callable[..., Setup]) -> None:
        read_stall_s = 0.5
        setup = make_setup(read_stall_s=read_stall_s)
        setup.link.serve_only(3 * WINDOW_BLOCKS + 3)
        transfer = setup.transfer()
        blocks = transfer.blocks(range(NUM_BLOCKS), range(NUM_BLOCKS))
        read = setup.read(transfer, blocks, faulty=True)
        read.wait_landed(1)
        began = time.monotonic()
        assert read.wait_failed()
        assert time.monotonic() - began < 2 * read_stall_s + 1.0  # a second for a busy machine
        after = setup.snapshot()
        setup.link.resume()
        time.sleep(0.2)
        assert setup.snapshot() == after
        assert setup.has_bytes(transfer, read, blocks)
        assert read.broken_rules == []
        # And the way is open again, into blocks that nobody else writes.
        again = setup.read(transfer, blocks, faulty=True)
        assert again.wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, setup.receiver_pool, blocks)

    # What may not be read (I8).

    @pytest.mark.parametrize("token", [b"", b"short", bytes(17)])
    def test_i8_token_of_wrong_length(self, setup: Setup, token: bytes) -> None:
        blocks = setup.transfer(1).blocks([0], [0])
        assert start_read(setup.link.receiver, setup.link.source.metadata, token, blocks).wait_failed()

    def test_blocks_of_another_size(self, make_setup: Callable[..., Setup]) -> None:
        setup = make_setup(source_pool=make_pool(seed=7, block_bytes=2 * BLOCK_BYTES))
        transfer = setup.transfer(4)
        assert "size" in setup.read(transfer, transfer.blocks(range(4), range(4))).wait_failed()
        assert not any(setup.snapshot())

    @pytest.mark.parametrize(("index", "local_block"), [(0, NUM_BLOCKS), (0, -1), (-1, 0), (1 << 32, 0)])
    def test_block_that_cannot_be(self, setup: Setup, index: int, local_block: int) -> None:
        transfer = setup.transfer(4)
        blocks = [*transfer.blocks(range(4), range(4)), BlockToRead(index, 0, local_block)]
        assert setup.read(transfer, blocks).wait_failed()
        assert not any(setup.snapshot())

    @pytest.mark.parametrize(
        "metadata",
        [
            b"",
            b"{}",
            b"\xff\xfe",
            b"null",
            b"[1, 2]",
            b"local:999",
            bytes(70_000),
            b'{"host":1,"port":"x"}',
            b'{"x":' + b"[" * 1000,
            b"\x81\xa1x" + b"\x91" * 60_000,
        ],
        ids=lambda metadata: repr(metadata[:12]),
    )
    def test_i11_malformed_metadata(self, setup: Setup, metadata: bytes) -> None:
        transfer = setup.transfer(1)
        assert start_read(setup.link.receiver, metadata, transfer.token, transfer.blocks([0], [0])).wait_failed()

    # What is wrong on its way (I3).

    def test_i3_flipped_bit_is_read_again(self, setup: Setup) -> None:
        setup.link.flip_one_bit()
        transfer = setup.transfer(64)
        blocks = transfer.blocks(range(64), range(64))
        read = setup.read(transfer, blocks, faulty=True)
        assert read.wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, setup.receiver_pool, blocks)
        assert setup.link.num_reread == 1

    def test_i3_lasting_mismatch_fails_and_never_lands(self, setup: Setup) -> None:
        transfer = setup.transfer(64)
        blocks = transfer.blocks(range(64), range(64))
        wrong = blocks[35]
        blocks[35] = BlockToRead(wrong.index, wrong.digest ^ 1, wrong.local_block, wrong.location)
        read = setup.read(transfer, blocks)
        message = read.wait_failed()
        assert "block 35 " in message
        assert "digest" in message
        assert 35 not in read.landed_blocks
        assert setup.link.num_reread == 1
        assert setup.has_bytes(transfer, read, blocks)
