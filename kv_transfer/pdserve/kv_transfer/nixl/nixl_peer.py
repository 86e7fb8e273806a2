"""`NixlPeer`: one agent of the receiver, with its registered pool and its one source."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence

import numpy as np

from pdserve.common import clock
from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.kv_transfer.nixl.nixl_agent import (
    Agent,
    AgentMaker,
    AgentRead,
    MemoryKind,
    ReadStatus,
    Region,
    enter_device,
)
from pdserve.kv_transfer.nixl.nixl_settings import HELLO_BYTES, NixlAddress

log = logging.getLogger(__name__)

_QUICK_LOOKS = 8
"""Looks between which a thread only gives others the processor: a piece may arrive before the shortest sleep is over."""
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


def pool_region(pool: PoolMemory) -> Region:
    """The pool as a region with one piece per block."""
    if pool.device_id is None:
        return Region(pool.address, pool.block_bytes, pool.num_blocks)
    return Region(pool.address, pool.block_bytes, pool.num_blocks, MemoryKind.VRAM, pool.device_id)


def buffer_address(buffer: memoryview | bytearray) -> int:
    """Address of a buffer's bytes in this process."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


def new_name() -> str:
    """A unique name, by which peers distinguish agents."""
    return f"pdserve-{secrets.token_hex(8)}"


class PollBackoff:
    """Waits between two polls of a read: briefly at first, longer while nothing happens; never spins."""

    def __init__(self) -> None:
        self._sleep_s = _FIRST_SLEEP_S
        self._num_looks = 0

    def wait(self) -> None:
        self._num_looks += 1
        if self._num_looks <= _QUICK_LOOKS:
            time.sleep(0)
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)


class NixlPeer:
    """An agent for one source. Made before its source is known, because the first agent of a process takes 0.5 s; then `connect`.

    Construction raises TransferFailed. Used by one thread at a time.
    """

    def __init__(self, pool: PoolMemory, make_agent: AgentMaker) -> None:
        self._region = pool_region(pool)
        enter_device(self._region)
        self._agent: Agent = make_agent(new_name())
        self._hello = bytearray(HELLO_BYTES)
        self._hello_region = Region(buffer_address(self._hello), HELLO_BYTES, 1)
        self._blocks = -1
        try:
            self._agent.register(self._region)
            self._agent.register(self._hello_region)
        except TransferFailed:
            self._agent.destroy()
            raise

    def connect(self, source: NixlAddress, timeout_s: float, piece_bytes: int) -> None:
        """Load the source's metadata and read a test value from it. Called in the thread that reads. piece_bytes: of the blocks, or
        parts of blocks, that `read` reads.

        Raises: TransferFailed; `destroy` must follow.
        """
        enter_device(self._region)
        agent = self._agent
        agent.load(source.agent, source.agent_metadata)
        hello = agent.pair(self._hello_region, source.hello_region)
        self._blocks = agent.pair(self._region.divided(piece_bytes), source.pool.divided(piece_bytes))
        read = agent.read(hello, [0], [0])
        backoff = PollBackoff()
        deadline = clock.monotonic() + timeout_s
        while (status := read.status()) is ReadStatus.UNDER_WAY:
            if clock.monotonic() > deadline:
                raise TransferFailed(f"no connection to {source}: nothing arrived within {timeout_s:g} s")
            backoff.wait()
        if status is ReadStatus.FAILED:
            raise TransferFailed(f"no connection to {source}: its memory cannot be read")
        read.release()
        if bytes(self._hello) != source.hello:
            raise TransferFailed(f"no connection to {source}: another epoch of it is there")

    def read(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> AgentRead:
        """Post a read; the caller has checked the block numbers. Raises: TransferFailed."""
        return self._agent.read(self._blocks, local_blocks, remote_blocks)

    def destroy(self, give_up: threading.Event, give_up_after_s: float) -> None:
        """The fence: no read of this agent writes after this returns.

        If the agent cannot be destroyed, returns `give_up_after_s` after `give_up` was set, at the end of the process.
        """
        gone = threading.Event()

        def end() -> None:
            enter_device(self._region)
            self._agent.destroy()
            gone.set()

        # in a separate thread, so that a hanging agent does not prevent the connector from closing
        threading.Thread(target=end, name="nixl-destroy", daemon=True).start()
        while not gone.wait(give_up_after_s):
            if give_up.is_set():
                log.error("an agent could not be destroyed within %g s; it ends with the process", give_up_after_s)
                return
            log.error("an agent could not be destroyed for %g s: its blocks remain unused", give_up_after_s)
