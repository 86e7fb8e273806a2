"""The TCP connector keeps the contract, in the clear and over TLS."""

from __future__ import annotations

import pytest

from pdserve.common.security.tls import TlsIdentity
from pdserve.kv_transfer.memory.pool_memory import HostPool
from tests.support.processes.tls_authority import Authority

from .connector_contract import ConnectorContract, TokenContract
from .contract_link import Link
from .tcp_link import TcpLink, TlsLink


class TestTcpConnector(ConnectorContract, TokenContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return TcpLink(source_pool, receiver_pool, read_stall_s)


@pytest.fixture(scope="module")
def identity(authority: Authority) -> TlsIdentity:
    return authority.identity()


class TestTcpConnectorWithTls(ConnectorContract, TokenContract):
    @pytest.fixture(autouse=True)
    def _give_identity(self, identity: TlsIdentity) -> None:
        self.identity = identity

    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return TlsLink(source_pool, receiver_pool, read_stall_s, self.identity)
