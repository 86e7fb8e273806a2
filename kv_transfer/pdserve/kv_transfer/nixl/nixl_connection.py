"""The reader's side of one NIXL agent: reads blocks from the source's memory straight into the pool.

A posted read cannot be cancelled. `interrupt` therefore only sets a deadline, and a read that exceeds a deadline ends the agent:
`fetch` raises ConnectionBroken, the reader closes the connection, and closing destroys the agent before the reader reports the end
of any read. After the reported end of a read, nothing writes its blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.common import clock
from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import BlockToRead
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.kv_transfer.nixl.nixl_agent import AgentRead, ReadStatus
from pdserve.kv_transfer.nixl.nixl_peer import NixlPeer, PollBackoff
from pdserve.kv_transfer.nixl.nixl_settings import NixlAddress, NixlSettings
from pdserve.kv_transfer.pull.connection import ConnectionBroken

_PIECE_BYTES = 512 << 10
"""Bytes of one NIXL read into memory of the host; it is digested while the next ones transfer."""
_DEVICE_PIECE_BYTES = 16 << 20
"""The same of a device, where digesting a piece takes some launches and a wait, whatever its size, and copying it into the pool
another wait."""
_WHOLE_WINDOW = 1 << 16


class NixlConnection:
    """A `Connection`. Construction raises TransferFailed if the source cannot be read."""

    def __init__(
        self,
        source: NixlAddress,
        pool: PoolMemory,
        settings: NixlSettings,
        take_peer: Callable[[], NixlPeer],
        closing: threading.Event,
        on_condemned: Callable[[], None],
    ) -> None:
        self._source = source
        self._settings = settings
        self._block_bytes = pool.block_bytes
        piece_bytes = _PIECE_BYTES if pool.device_id is None else _DEVICE_PIECE_BYTES
        self._piece_blocks = max(1, piece_bytes // pool.block_bytes)
        # A CPU may copy within `status`, so that a piece seems to be moved by hardware: in memory of the host, more than one
        # piece ahead displaces the bytes to digest from the cache.
        self._most_posted = 2 if pool.device_id is None else _WHOLE_WINDOW
        self._closing = closing
        self._on_condemned = on_condemned
        self._drain_until: float | None = None
        self._peer = take_peer()
        try:
            self._peer.connect(source, settings.connect_timeout_s, pool.block_bytes)
        except TransferFailed:
            self.close()
            raise

    def fetch(self, token: bytes, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        """As `Connection.fetch`. The token has no effect, since the source does not take part in a read."""
        self._drain_until = None
        return self._read(blocks)

    def _read(self, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        num_blocks = self._source.pool.num_bytes // self._block_bytes
        for block in blocks:
            if not 0 <= block.location < num_blocks:
                raise TransferFailed(
                    f"{self._source} published block {block.index} at {block.location}, "
                    f"outside its pool of {num_blocks} blocks"
                )
        waiting = deque(
            blocks[first : first + self._piece_blocks] for first in range(0, len(blocks), self._piece_blocks)
        )
        posted: deque[_Posted] = deque()
        num_received = 0
        while waiting or posted:
            # Further pieces are posted if hardware transfers them: the first is still under way then. If a CPU copies, it is
            # this one, and the next copy would displace the bytes to digest from its cache.
            while waiting and (not posted or (len(posted) < self._most_posted and posted[-1].is_under_way)):
                posted.append(_Posted(self._post(waiting[0]), waiting.popleft()))
            num_received += self._take(posted)
            yield num_received

    def _take(self, posted: deque[_Posted]) -> int:
        """Wait for the oldest posted piece; remove it and those after it that are done, too. Returns their blocks' number."""
        self._wait(posted[0])
        num_blocks = 0
        while posted and not posted[0].is_under_way:
            piece = posted.popleft()
            self._finish(piece)
            num_blocks += len(piece.blocks)
        return num_blocks

    def interrupt(self) -> bool:
        """As `Connection.interrupt`. The active read has `cancel_drain_s` to end by itself; the connection then stays usable."""
        self._drain_until = clock.monotonic() + self._settings.cancel_drain_s
        return False

    def close(self) -> None:
        """Destroy the agent; returns after it is destroyed."""
        self._peer.destroy(self._closing, self._settings.close_wait_s)

    def _post(self, piece: Sequence[BlockToRead]) -> AgentRead:
        try:
            return self._peer.read([block.local_block for block in piece], [block.location for block in piece])
        except TransferFailed as error:
            raise ConnectionBroken(error.message) from error

    def _wait(self, posted: _Posted) -> None:
        """Wait until the piece is under way no more. Raises: ConnectionBroken."""
        stalled_at = clock.monotonic() + self._settings.read_stall_s
        backoff = PollBackoff()
        while posted.is_under_way:
            now, drain_until = clock.monotonic(), self._drain_until
            if now > stalled_at:
                self._on_condemned()
                raise ConnectionBroken(f"reading {self._shown(posted)}: nothing for {self._settings.read_stall_s:g} s")
            if drain_until is not None and now > drain_until:
                self._on_condemned()
                raise ConnectionBroken(f"reading {self._shown(posted)}: cancelled, and not ended in time")
            backoff.wait()

    def _finish(self, posted: _Posted) -> None:
        """Free the handle of a piece that is done. Raises: ConnectionBroken if it failed."""
        if posted.read.status() is ReadStatus.FAILED:
            self._on_condemned()
            raise ConnectionBroken(f"reading {self._shown(posted)} failed")
        posted.read.release()

    def _shown(self, posted: _Posted) -> str:
        return f"blocks {posted.blocks[0].index} to {posted.blocks[-1].index} from {self._source}"


@dataclass(frozen=True, slots=True)
class _Posted:
    """A posted read and its blocks."""

    read: AgentRead
    blocks: Sequence[BlockToRead]

    @property
    def is_under_way(self) -> bool:
        return self.read.status() is ReadStatus.UNDER_WAY
