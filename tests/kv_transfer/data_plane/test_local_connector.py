"""The local connector keeps the contract."""

from __future__ import annotations

import pytest

from pdserve.kv_transfer.memory.pool_memory import HostPool, PoolMemory
from tests.support.transfers.local_connector import LocalConnector, LocalNetwork

from .connector_contract import ConnectorContract, TokenContract
from .contract_link import WINDOW_BLOCKS, Link
from .recorded_read import BLOCK_BYTES, Transfer, make_pool, start_read


class LocalLink:
    def __init__(
        self,
        source_pool: PoolMemory,
        receiver_pool: HostPool,
        read_stall_s: float,
        landings: tuple[HostPool, HostPool] | None = None,
    ) -> None:
        network = LocalNetwork()
        request_bytes = WINDOW_BLOCKS * BLOCK_BYTES
        self.source = LocalConnector(network, read_stall_s=read_stall_s, request_bytes=request_bytes)
        self.receiver = LocalConnector(network, read_stall_s=read_stall_s, request_bytes=request_bytes)
        self.source.serve(source_pool, landings and landings[0])
        self.receiver.serve(receiver_pool, landings and landings[1])

    @property
    def faulty_metadata(self) -> bytes:
        return self.source.metadata

    @property
    def num_reread(self) -> int:
        return self.receiver.read_counters["blocks_reread"]

    def serve_only(self, num_blocks: int) -> None:
        self.source.serve_only(num_blocks)

    def resume(self) -> None:
        self.source.resume()

    def flip_one_bit(self) -> None:
        self.source.flip_bits(1)

    def close(self) -> None:
        self.receiver.close()
        self.source.close()


class TestLocalConnector(ConnectorContract, TokenContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return LocalLink(source_pool, receiver_pool, read_stall_s)


def test_networks_do_not_reach_each_other() -> None:
    source, stranger = LocalConnector(LocalNetwork()), LocalConnector(LocalNetwork())
    pool = make_pool(seed=1)
    source.serve(pool)
    metadata = source.metadata
    transfer = Transfer(source, pool, [0])
    blocks = transfer.blocks([0], [0])
    # The stranger's own address has the same number in its own network.
    stranger.serve(make_pool())
    assert "token" in start_read(stranger, metadata, transfer.token, blocks).wait_failed()
    source.close()
    stranger.close()


def test_serve_comes_first_and_once() -> None:
    connector = LocalConnector(LocalNetwork())
    with pytest.raises(RuntimeError):
        _ = connector.metadata
    connector.serve(make_pool())
    with pytest.raises(RuntimeError):
        connector.serve(make_pool())
    connector.close()
