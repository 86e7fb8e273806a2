"""Contract of connectors whose source answers each read: a token opens its own published blocks and nothing else."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from pdserve.kv_transfer.connector import ReadOutcome
from tests.support.run.waiting import HANG_S

from .contract_link import LinkContract, Setup
from .recorded_read import Transfer, same_bytes, start_read


class TokenContract(LinkContract):
    # What may not be read (I8).

    def test_i8_forged_token(self, setup: Setup) -> None:
        transfer = setup.transfer(8)
        blocks = transfer.blocks(range(8), range(8))
        read = start_read(setup.link.receiver, setup.link.source.metadata, secrets.token_bytes(16), blocks)
        assert "token" in read.wait_failed()
        assert not any(setup.snapshot())

    def test_i8_closed_grant(self, setup: Setup) -> None:
        transfer = setup.transfer(8)
        blocks = transfer.blocks(range(8), range(8))
        assert setup.read(transfer, blocks).wait_ended() is ReadOutcome.DONE
        assert transfer.close().wait(HANG_S)
        setup.receiver_pool.view[:] = bytes(len(setup.receiver_pool.view))
        # The same source blocks are granted to somebody else by now; the old reference still opens nothing.
        Transfer(setup.link.source, setup.source_pool, transfer.source_blocks)
        assert "token" in setup.read(transfer, blocks).wait_failed()
        assert not any(setup.snapshot())

    def test_i8_reference_of_another_life(self, setup: Setup, make_setup: Callable[..., Setup]) -> None:
        transfer = setup.transfer(8)
        other = make_setup()
        read = start_read(
            other.link.receiver, other.link.source.metadata, transfer.token, transfer.blocks(range(8), range(8))
        )
        assert "token" in read.wait_failed()
        assert not any(other.snapshot())

    def test_unpublished_index(self, setup: Setup) -> None:
        transfer = setup.transfer(16, publish=False)
        transfer.grant.publish(0, transfer.source_blocks[:10])
        read = setup.read(transfer, transfer.blocks(range(8, 16), range(8)))
        assert "not published" in read.wait_failed()
        assert not any(setup.snapshot())
        # A refusal costs that read alone.
        blocks = transfer.blocks(range(10), range(10))
        assert setup.read(transfer, blocks).wait_ended() is ReadOutcome.DONE
        assert same_bytes(transfer, setup.receiver_pool, blocks)

    def test_publish_after_close_is_nothing(self, setup: Setup) -> None:
        transfer = setup.transfer(8, publish=False)
        assert transfer.close().wait(HANG_S)
        transfer.grant.publish(0, transfer.source_blocks)
        assert setup.read(transfer, transfer.blocks(range(8), range(8))).wait_failed()
