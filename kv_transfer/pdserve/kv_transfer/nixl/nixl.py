"""Blocks over NIXL: one-sided reads of the source's memory by RDMA, shared memory or another transport of UCX.

nixl.py             NixlConnector: one agent that serves, two for each peer that is read from
nixl_connection.py  reads windows, condemns agents     nixl_peer.py   an agent and its source; the fence
agent_pool.py       agents made ahead of time          nixl_agent.py  NIXL with types
nixl_settings.py    settings, metadata                 pull/          block reader, peer connections and read queue, as with TCP

A source does not take part in a read and cannot refuse it: a token grants nothing, and a closed grant stops no read. The digest of
each block, sent on the control stream, protects the receiver. Nothing protects the source: NIXL registers memory for writing as
well, and a peer keeps the metadata for that (docs/protocol.md).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from dataclasses import dataclass
from functools import partial

from pdserve.common.errors import ConfigError, TransferFailed
from pdserve.kv_transfer.connector import BlockRead, Grant, ReadListener, ReadOrder
from pdserve.kv_transfer.event_thread import EventThread
from pdserve.kv_transfer.memory.pool_memory import PoolMemory, part_bytes
from pdserve.kv_transfer.nixl.agent_pool import AgentPool
from pdserve.kv_transfer.nixl.nixl_agent import Agent, AgentMaker, Region, UcxAgent, enter_device, prepare_device_memory
from pdserve.kv_transfer.nixl.nixl_connection import NixlConnection
from pdserve.kv_transfer.nixl.nixl_peer import NixlPeer, buffer_address, new_name, pool_region
from pdserve.kv_transfer.nixl.nixl_settings import HELLO_BYTES, NixlAddress, NixlSettings
from pdserve.kv_transfer.pull.block_reader import BlockReader
from pdserve.kv_transfer.pull.connection import Connection
from pdserve.kv_transfer.pull.read_grants import ReadGrants
from pdserve.kv_transfer.totals import Totals


@dataclass(frozen=True, slots=True)
class _Started:
    agent: Agent
    hello: bytearray
    """Registered memory, which must live as long as the agent."""
    address: NixlAddress
    grants: ReadGrants
    spares: AgentPool
    reads: BlockReader[NixlAddress]


class NixlConnector:
    """A `BlockConnector` over NIXL. `NixlSettings` has all limits.

    make_agent: makes agents; tests inject faults with it.
    """

    name = "nixl"

    def __init__(self, settings: NixlSettings | None = None, make_agent: AgentMaker = UcxAgent) -> None:
        self._settings = settings or NixlSettings()
        self._make_agent = make_agent
        self._events = EventThread("nixl-events")
        self._closing = threading.Event()
        self._started: _Started | None = None
        self.agent_counters = Totals()

    def serve(self, pool: PoolMemory, landing: PoolMemory | None = None) -> None:
        """As `BlockConnector.serve`."""
        if self._started is not None:
            raise RuntimeError("a connector serves once")
        settings, into = self._settings, landing or pool
        hello = bytearray(secrets.token_bytes(HELLO_BYTES))
        region, hello_address, name = pool_region(pool), buffer_address(hello), new_name()
        try:
            if pool.device_id is not None or into.device_id is not None:
                prepare_device_memory()
            enter_device(region)
            agent = self._make_agent(name)
            agent.register(region)
            agent.register(Region(hello_address, HELLO_BYTES, 1))
        except TransferFailed as error:
            raise ConfigError(error.message) from error
        address = NixlAddress(
            agent=name,
            agent_metadata=agent.metadata,
            address=region.address,
            block_bytes=pool.block_bytes,
            num_blocks=pool.num_blocks,
            hello_address=hello_address,
            hello=bytes(hello),
            memory=region.kind,
            device_id=region.device_id,
        )
        # one agent per connection, which reads one window at a time: destroying the agent of a hanging read ends no other read
        limits = settings.limits(pool.block_bytes, settings.agents_per_peer)
        spares = AgentPool(lambda: NixlPeer(into, self._make_agent), self._closing, settings.close_wait_s)

        def connect(source: NixlAddress, parts: int) -> Connection:
            condemned = partial(self.agent_counters.add, condemned=1)
            return NixlConnection(source, into.divided(parts), settings, spares.take, self._closing, condemned)

        reads = BlockReader[NixlAddress]("nixl-read", into, limits, self._events, connect, settings.max_resting_peers)
        self._started = _Started(agent, hello, address, ReadGrants(pool.num_blocks, self._events, 0.0), spares, reads)

    @property
    def metadata(self) -> bytes:
        """A `NixlAddress` as msgpack."""
        return self._require_started().address.to_metadata()

    @property
    def read_counters(self) -> Totals:
        return self._require_started().reads.counters

    def meet(self, worker_id: str, epoch: int) -> None:
        """Prepare an agent for a peer that has started. Returns at once; may be repeated."""
        self._require_started().spares.expect((worker_id, epoch))

    def forget(self, metadata: bytes) -> None:
        """As `SupportsPeerEviction.forget`; destroys the peer's agents after their reads have ended."""
        started = self._require_started()
        with contextlib.suppress(TransferFailed):
            started.reads.close_idle(NixlAddress.from_metadata(metadata))

    def grant(self, token: bytes, parts: int = 1) -> Grant:
        """As `BlockConnector.grant`; fenced as soon as it is closed, see the module's docstring."""
        return self._require_started().grants.open(token, parts)

    def read(self, order: ReadOrder, listener: ReadListener) -> BlockRead:
        """As `BlockConnector.read`."""
        started = self._require_started()

        def find_address() -> NixlAddress:
            address = NixlAddress.from_metadata(order.metadata)
            address.verify_block(part_bytes(started.address.block_bytes, order.parts), order.source_parts)
            return address

        return started.reads.read(find_address, order, listener)

    def close(self) -> None:
        """As `BlockConnector.close`. Takes up to `connect_timeout_s` while a connection is being made."""
        self._closing.set()
        if self._started is not None:
            self._started.reads.close()
            self._started.spares.close()
            self._started.grants.close()
            self._started.agent.destroy()
        self._events.close()

    def _require_started(self) -> _Started:
        if self._started is None:
            raise RuntimeError("serve() comes first")
        return self._started
