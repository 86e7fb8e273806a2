"""Two NIXL connectors in one process whose real agents can be made to fail as a stopped source does.

A read that passes the gate is a real UCX read. One that the gate holds is under way for ever; when the gate opens it is
posted after all, however long nobody has wanted it, unless its agent was destroyed before: what NIXL itself does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.memory.pool_memory import HostPool, PoolMemory
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_agent import Agent, AgentRead, ReadStatus, Region, UcxAgent
from pdserve.kv_transfer.nixl.nixl_settings import NixlSettings
from tests.support.run.waiting import HANG_S

from .contract_link import WINDOW_BLOCKS
from .recorded_read import BLOCK_BYTES

_BLOCKS = 1
"""The pair of a `NixlPeer` that reads blocks; 0 is its hello."""


class Gate:
    """State that all agents of a link share. `lock` guards it."""

    def __init__(self, receiver_pool: HostPool) -> None:
        self.lock = threading.Lock()
        self.pool = receiver_pool
        self.blocks_to_serve: int | None = None
        self.flips = 0
        self.gone: set[str] = set()
        """Names of agents that were destroyed."""
        self.held: list[_GatedRead] = []
        self.num_made = 0
        """Agents."""
        self._changed = threading.Condition(self.lock)

    def open(self, num_blocks: int | None) -> None:
        with self.lock:
            self.blocks_to_serve = num_blocks
            held, self.held = self.held, []
            for read in held:
                read.try_to_post()

    def hold(self, read: _GatedRead) -> None:
        """Under the lock."""
        self.held.append(read)
        self._changed.notify_all()

    def wait_held(self) -> None:
        """Until a read is held."""
        with self.lock:
            assert self._changed.wait_for(lambda: self.held, HANG_S), "no read is held"

    def let_others_pass(self) -> None:
        """Hold no further reads; those that are held remain so."""
        with self.lock:
            self.blocks_to_serve = None

    def flip(self, block: int) -> None:
        """Turn a bit over in a block that has just come, if that is due."""
        if self.flips:
            self.flips -= 1
            self.pool.view[block * self.pool.block_bytes] ^= 1


class GatedAgent:
    """An `Agent` around a real one."""

    def __init__(self, name: str, gate: Gate) -> None:
        self.name, self.gate = name, gate
        self.agent: Agent = UcxAgent(name)
        self.source = ""

    def register(self, region: Region) -> None:
        self.agent.register(region)

    @property
    def metadata(self) -> bytes:
        return self.agent.metadata

    def load(self, name: str, metadata: bytes) -> None:
        with self.gate.lock:
            if name in self.gate.gone:
                raise TransferFailed(f"the agent {name} cannot be reached")
        self.source = name
        self.agent.load(name, metadata)

    def pair(self, local: Region, remote: Region) -> int:
        return self.agent.pair(local, remote)

    def read(self, pair: int, local_pieces: Sequence[int], remote_pieces: Sequence[int]) -> AgentRead:
        if pair != _BLOCKS:
            return self.agent.read(pair, local_pieces, remote_pieces)
        return _GatedRead(self, local_pieces, remote_pieces)

    def destroy(self) -> None:
        with self.gate.lock:
            self.gate.gone.add(self.name)
            self.gate.held = [read for read in self.gate.held if read.agent is not self]
            self.agent.destroy()


class _GatedRead:
    def __init__(self, agent: GatedAgent, local: Sequence[int], remote: Sequence[int]) -> None:
        self.agent, self.local, self.remote = agent, list(local), list(remote)
        self._read: AgentRead | None = None
        self._failed = False
        self._is_flipped = False
        with agent.gate.lock:
            self.try_to_post()

    def try_to_post(self) -> None:
        """Under the gate's lock."""
        gate = self.agent.gate
        if self.agent.source in gate.gone:
            self._failed = True
        elif gate.blocks_to_serve is not None and gate.blocks_to_serve < len(self.local):
            gate.blocks_to_serve = 0
            gate.hold(self)
        else:
            if gate.blocks_to_serve is not None:
                gate.blocks_to_serve -= len(self.local)
            self._read = self.agent.agent.read(_BLOCKS, self.local, self.remote)

    def status(self) -> ReadStatus:
        with self.agent.gate.lock:
            if self._failed:
                return ReadStatus.FAILED
            if self._read is None:
                return ReadStatus.UNDER_WAY
            status = self._read.status()
            if status is ReadStatus.DONE and not self._is_flipped:
                self._is_flipped = True
                self.agent.gate.flip(self.local[0])
            return status

    def release(self) -> None:
        assert self._read is not None, "released before it was terminal"
        assert self._read.status() is ReadStatus.DONE, "released before it was terminal"
        self._read.release()


def nixl_settings(read_stall_s: float) -> NixlSettings:
    """Windows of `WINDOW_BLOCKS` blocks, and short time-outs."""
    return NixlSettings(
        read_stall_s=read_stall_s,
        cancel_drain_s=0.1,
        request_bytes=WINDOW_BLOCKS * BLOCK_BYTES,
        longest_request_bytes=WINDOW_BLOCKS * BLOCK_BYTES,
        read_window_bytes=WINDOW_BLOCKS * BLOCK_BYTES,
    )


class NixlLink:
    def __init__(
        self,
        source_pool: PoolMemory,
        receiver_pool: HostPool,
        read_stall_s: float,
        landings: tuple[HostPool, HostPool] | None = None,
    ) -> None:
        settings = nixl_settings(read_stall_s)
        self.gate = Gate(landings[1] if landings else receiver_pool)
        self.source = NixlConnector(settings, self._make_agent)
        self.receiver = NixlConnector(settings, self._make_agent)
        self.source.serve(source_pool, landings and landings[0])
        self.receiver.serve(receiver_pool, landings and landings[1])

    def _make_agent(self, name: str) -> Agent:
        agent = GatedAgent(name, self.gate)
        with self.gate.lock:
            self.gate.num_made += 1
        return agent

    @property
    def faulty_metadata(self) -> bytes:
        return self.source.metadata

    @property
    def num_reread(self) -> int:
        return self.receiver.read_counters["blocks_reread"]

    def serve_only(self, num_blocks: int) -> None:
        self.gate.open(num_blocks)

    def resume(self) -> None:
        self.gate.open(None)

    def flip_one_bit(self) -> None:
        with self.gate.lock:
            self.gate.flips = 1

    def close(self) -> None:
        self.receiver.close()
        self.source.close()
