"""The reader's side of one NIXL agent: reads blocks from the source's memory straight into the pool.

A posted read cannot be cancelled. `interrupt` therefore only sets a deadline, and a read that exceeds a deadline ends the agent:
`fetch` raises ConnectionBroken, the reader closes the connection, and closing destroys the agent before the reader reports the end
of any read. After the reported end of a read, nothing writes its blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from pdserve.common.errors import TransferFailed
from pdserve.kv_transfer.connector import BlockToRead
from pdserve.kv_transfer.memory.pool_memory import PoolMemory
from pdserve.kv_transfer.nixl.nixl_agent import AgentRead, ReadStatus
from pdserve.kv_transfer.nixl.nixl_peer import NixlPeer, PollBackoff
from pdserve.kv_transfer.nixl.nixl_settings import NixlAddress, NixlSettings
from pdserve.kv_transfer.pull.connection import ConnectionBroken

_PIECE_BYTES = 512 << 10
"""Bytes of one NIXL read; it is digested while the next one transfers."""


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
        self._piece_blocks = max(1, _PIECE_BYTES // pool.block_bytes)
        self._closing = closing
        self._on_condemned = on_condemned
        self._drain_until: float | None = None
        self._peer = take_peer()
        try:
            self._peer.connect(source, settings.connect_timeout_s)
        except TransferFailed:
            self.close()
            raise

    def fetch(self, token: bytes, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        """As `Connection.fetch`. The token has no effect, since the source does not take part in a read."""
        self._drain_until = None
        return self._read(blocks)

    def _read(self, blocks: Sequence[BlockToRead]) -> Iterator[int]:
        for block in blocks:
            if not 0 <= block.location < self._source.num_blocks:
                raise TransferFailed(
                    f"{self._source} published block {block.index} at {block.location}, "
                    f"outside its pool of {self._source.num_blocks} blocks"
                )
        pieces = [blocks[first : first + self._piece_blocks] for first in range(0, len(blocks), self._piece_blocks)]
        num_received = 0
        read: AgentRead | None = None
        for number, piece in enumerate(pieces):
            travels = self._wait(read or self._post(piece), piece)
            num_received += len(piece)
            # Post the next read early only if hardware transfers it. If a processor copies, it is this one, and the copy would #
            # displace the bytes to digest from its cache.
            read = self._post(pieces[number + 1]) if travels and number + 1 < len(pieces) else None
            yield num_received

    def interrupt(self) -> bool:
        """As `Connection.interrupt`. The active read has `cancel_drain_s` to end by itself; the connection then stays usable."""
        self._drain_until = time.monotonic() + self._settings.cancel_drain_s
        return False

    def close(self) -> None:
        """Destroy the agent; returns after it is destroyed."""
        self._peer.destroy(self._closing, self._settings.close_wait_s)

    def _post(self, piece: Sequence[BlockToRead]) -> AgentRead:
        # One read at a time, the next one posted before this one is digested, so that a hanging read affects the fewest blocks.
        try:
            return self._peer.read([block.local_block for block in piece], [block.location for block in piece])
        except TransferFailed as error:
            raise ConnectionBroken(error.message) from error

    def _wait(self, read: AgentRead, blocks: Sequence[BlockToRead]) -> bool:
        """Wait until the read is done; True if it was still active at first. Raises: ConnectionBroken."""
        status = read.status()
        travels = status is ReadStatus.UNDER_WAY
        stalled_at = time.monotonic() + self._settings.read_stall_s
        backoff = PollBackoff()
        where = f"blocks {blocks[0].index} to {blocks[-1].index} from {self._source}"
        while status is ReadStatus.UNDER_WAY:
            now, drain_until = time.monotonic(), self._drain_until
            if now > stalled_at:
                self._on_condemned()
                raise ConnectionBroken(f"reading {where}: nothing for {self._settings.read_stall_s:g} s")
            if drain_until is not None and now > drain_until:
                self._on_condemned()
                raise ConnectionBroken(f"reading {where}: cancelled, and not ended in time")
            backoff.wait()
            status = read.status()
        if status is ReadStatus.FAILED:
            self._on_condemned()
            raise ConnectionBroken(f"reading {where} failed")
        read.release()
        return travels
