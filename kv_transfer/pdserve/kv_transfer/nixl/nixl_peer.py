"""`NixlPeer`: one agent of the receiver, its pool registered, and the one source that it reads from."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence

import numpy as np

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import PoolMemory
from pdserve.kv_transfer.nixl.nixl_agent import Agent, AgentMaker, AgentRead, ReadStatus, Region
from pdserve.kv_transfer.nixl.nixl_settings import HELLO_BYTES, NixlAddress

log = logging.getLogger(__name__)

_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


def pool_region(pool: PoolMemory) -> Region:
    """The pool as NIXL sees it: one piece per block."""
    return Region(buffer_address(pool.view), pool.block_bytes, pool.num_blocks)


def buffer_address(buffer: memoryview | bytearray) -> int:
    """Address of a buffer's bytes in this process."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


def new_name() -> str:
    """A name that no other agent has: peers distinguish agents by it."""
    return f"pdserve-{secrets.token_hex(8)}"


class PollBackoff:
    """Waits between two looks at a read: briefly at first, longer while nothing happens; never spins."""

    def __init__(self) -> None:
        self._sleep_s = _FIRST_SLEEP_S

    def wait(self) -> None:
        time.sleep(self._sleep_s)
        self._sleep_s = min(2 * self._sleep_s, _LONGEST_SLEEP_S)


class NixlPeer:
    """Made without a source, ahead of time, since the first agent of a process takes half a second; then `connect`ed.

    Raises TransferFailed from construction. Used by one thread at a time.
    """

    def __init__(self, pool: PoolMemory, make_agent: AgentMaker) -> None:
        self._pool = pool
        self._agent: Agent = make_agent(new_name())
        self._hello = bytearray(HELLO_BYTES)
        self._hello_region = Region(buffer_address(self._hello), HELLO_BYTES, 1)
        self._blocks = -1
        try:
            self._agent.register(pool_region(pool))
            self._agent.register(self._hello_region)
        except TransferFailed:
            self._agent.destroy()
            raise

    def connect(self, source: NixlAddress, timeout_s: float) -> None:
        """Load the source and read its first bytes, into no block. Raises TransferFailed; then destroy this."""
        agent = self._agent
        agent.load(source.agent, source.agent_metadata)
        hello = agent.pair(self._hello_region, source.hello_region)
        self._blocks = agent.pair(pool_region(self._pool), source.pool)
        read = agent.read(hello, [0], [0])
        backoff = PollBackoff()
        deadline = time.monotonic() + timeout_s
        while (status := read.status()) is ReadStatus.UNDER_WAY:
            if time.monotonic() > deadline:
                raise TransferFailed(f"no connection to {source}: nothing came for {timeout_s:g} s")
            backoff.wait()
        if status is ReadStatus.FAILED:
            raise TransferFailed(f"no connection to {source}: its memory cannot be read")
        read.release()
        if bytes(self._hello) != source.hello:
            raise TransferFailed(f"no connection to {source}: another life of it is there")

    def read(self, local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> AgentRead:
        """Post a read; the caller has checked every number. Raises TransferFailed."""
        return self._agent.read(self._blocks, local_blocks, remote_blocks)

    def destroy(self, give_up: threading.Event, give_up_after_s: float) -> None:
        """The fence: when this returns, no read of this agent writes any more.

        If destroying never ends it returns only when `give_up` was set `give_up_after_s` ago: the process is leaving.
        """
        gone = threading.Event()

        def end() -> None:
            self._agent.destroy()
            gone.set()

        # in a thread of its own: what hangs in there must not keep a connector from closing
        threading.Thread(target=end, name="nixl-destroy", daemon=True).start()
        while not gone.wait(give_up_after_s):
            if give_up.is_set():
                log.error("an agent could not be destroyed within %g s; it ends with the process", give_up_after_s)
                return
            log.error("an agent has not let itself be destroyed for %g s: its blocks stay unused", give_up_after_s)
