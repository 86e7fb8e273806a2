"""The TCP connector keeps the contract."""

from __future__ import annotations

from pdserve.kv_transfer.connector import PoolMemory

from .connector_contract import ConnectorContract, TokenContract
from .contract_link import Link
from .tcp_link import TcpLink


class TestTcpConnector(ConnectorContract, TokenContract):
    def make_link(self, source_pool: PoolMemory, receiver_pool: PoolMemory, read_stall_s: float) -> Link:
        return TcpLink(source_pool, receiver_pool, read_stall_s)
