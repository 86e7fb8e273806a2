"""The contract of connectors between two processes, whose pools are on the pretended device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.tcp.tcp import TcpConnector
from pdserve.kv_transfer.tcp.tcp_settings import TcpAddress
from tests.support.engine.pretend_pool import reachable_by_nixl

from .connector_contract import ConnectorContract, TokenContract
from .contract_link import Link
from .device_ring import NUM_SLOTS, device_ring
from .fault_link import FaultLink
from .recorded_read import BLOCK_BYTES
from .remote_source import ContractProcess, RemoteSource
from .tcp_link import small_settings

pytestmark = [pytest.mark.process, pytest.mark.slow]


class TcpProcessLink:
    """A source in another process, over TCP."""

    def __init__(
        self, process: ContractProcess, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float
    ) -> None:
        self.source = RemoteSource(process, "tcp", source_pool, read_stall_s)
        self._inner = TcpConnector(small_settings(read_stall_s=read_stall_s))
        self._end = device_ring("tcp", self._inner, receiver_pool)
        self._end.serve()
        self.receiver = self._end.connector
        self._faults = FaultLink(TcpAddress.from_metadata(self.source.metadata).port)

    @property
    def faulty_metadata(self) -> bytes:
        return TcpAddress("127.0.0.1", self._faults.port).to_metadata()

    @property
    def num_reread(self) -> int:
        return self._inner.read_counters["blocks_reread"]

    def serve_only(self, num_blocks: int) -> None:
        self._faults.serve_only(num_blocks * BLOCK_BYTES)

    def resume(self) -> None:
        self._faults.serve_only(None)

    def flip_one_bit(self) -> None:
        self._faults.flip_one_bit()

    def close(self) -> None:
        self.receiver.close()
        self.source.close()
        self._faults.close()
        assert self.receiver.num_free == NUM_SLOTS, "slots are still out of use"


@pytest.fixture(scope="module")
def process() -> Iterator[ContractProcess]:
    """Serves the sources of all tests: a process per test would take most of their time."""
    started = ContractProcess()
    yield started
    started.end()


class InAnotherProcess:
    process: ContractProcess

    @pytest.fixture(autouse=True)
    def _in_process(self, process: ContractProcess) -> None:
        self.process = process


class TestOverTcp(InAnotherProcess, ConnectorContract, TokenContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        return cast(Link, TcpProcessLink(self.process, source_pool, receiver_pool, read_stall_s))


class TestOverNixl(InAnotherProcess, ConnectorContract):
    def make_link(self, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float) -> Link:
        pytest.importorskip("nixl", reason="there is no NIXL wheel for this platform", exc_type=ImportError)
        from .nixl_process_link import NixlProcessLink

        return cast(Link, NixlProcessLink(self.process, source_pool, receiver_pool, read_stall_s))

    @pytest.fixture(autouse=True)
    def _reachable(self) -> Iterator[None]:
        with reachable_by_nixl():
            yield
