"""A source has one endpoint per connector and epoch: each would cost connections, and a share of a ring."""

from __future__ import annotations

import asyncio

from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import ReadOutcome
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.receiver_transfer import ReceiverTransfer
from pdserve.kv_transfer.control.transfer_state import ReceiverState
from pdserve.kv_transfer.heads.head_groups import GroupSource
from tests.support.transfers.transfer_fakes import FakeConnector, ReceiverEnd, ReceiverOwner, source_ref


async def test_a_source_that_has_delivered_and_names_another_endpoint_is_not_read_there() -> None:
    connector, stream = FakeConnector(), ReceiverEnd()
    transfer = ReceiverTransfer("r", source_ref(), ConnectorSet([connector]), ReceiverOwner())
    transfer.attached(stream, "fake", [GroupSource(b"where", b"k" * 16)], XXH3)
    transfer.room(0, [40, 41], [0, 0])
    transfer.published(0, [100], [7])
    connector.reads[0].land(0, 1)
    await asyncio.sleep(0)
    transfer.attached(stream, "fake", [GroupSource(b"elsewhere", b"k" * 16)], XXH3)
    assert transfer.cause is not None
    assert "another endpoint of its connector fake" in transfer.cause.message
    transfer.published(1, [101], [8])
    assert [read.indexes for read in connector.reads] == [[0]], "blocks are read at the other endpoint"
    connector.reads[0].end(ReadOutcome.CANCELLED)
    for _ in range(3):
        await asyncio.sleep(0)
    assert transfer.state is ReceiverState.FAILED
