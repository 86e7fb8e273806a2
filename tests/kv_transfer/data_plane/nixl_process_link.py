"""A source in another process, over NIXL, whose receiver's agents can be made to fail (`nixl_link.py`)."""

from __future__ import annotations

from pdserve.kv_transfer.memory.pool_memory import HostPool
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_settings import NixlAddress

from .device_ring import NUM_SLOTS, device_ring
from .nixl_link import Gate, GatedAgent, nixl_settings
from .remote_source import ContractProcess, RemoteSource


class _Source(RemoteSource):
    """A source whose agent is gone for the gate once it is closed: its memory is still there, and could be read."""

    gate: Gate

    def close(self) -> None:
        super().close()
        with self.gate.lock:
            self.gate.gone.add(NixlAddress.from_metadata(self.metadata).agent)


class NixlProcessLink:
    """A `Link` whose receiver's ring is on the pretended device."""

    def __init__(
        self, process: ContractProcess, source_pool: HostPool, receiver_pool: HostPool, read_stall_s: float
    ) -> None:
        self.source = _Source(process, "nixl", source_pool, read_stall_s)
        self._inner = NixlConnector(nixl_settings(read_stall_s), self._make_agent)
        self._end = device_ring("nixl", self._inner, receiver_pool)
        self._gate = self.source.gate = Gate(self._end.held)
        self._end.serve()
        self.receiver = self._end.connector

    def _make_agent(self, name: str) -> GatedAgent:
        return GatedAgent(name, self._gate)

    @property
    def faulty_metadata(self) -> bytes:
        return self.source.metadata

    @property
    def num_reread(self) -> int:
        return self._inner.read_counters["blocks_reread"]

    def serve_only(self, num_blocks: int) -> None:
        self._gate.open(num_blocks)

    def resume(self) -> None:
        self._gate.open(None)

    def flip_one_bit(self) -> None:
        with self._gate.lock:
            self._gate.flips = 1

    def close(self) -> None:
        self.receiver.close()
        self.source.close()
        assert self.receiver.num_free == NUM_SLOTS, "slots are still out of use"
