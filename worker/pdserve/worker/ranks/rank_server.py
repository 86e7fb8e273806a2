"""`RankServer`: carries out rank 0's orders for transfers, in the process of a rank above 0."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pdserve.common.errors import TransferFailed
from pdserve.common.ipc.frames import receive_frame, send_frame
from pdserve.kv_transfer.connector import BlockRead, Grant, ReadOrder, ReadOutcome
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.heads.head_groups import RankPart
from pdserve.kv_transfer.heads.rank_transfers import RankTransfers
from pdserve.worker.ranks.transfer_messages import (
    BeginRead,
    CancelRead,
    CloseGrant,
    DigestBlocks,
    DigestsFound,
    ForgetPeer,
    FromRank,
    GrantFenced,
    GrantReads,
    MeetPeer,
    PublishBlocks,
    RankServes,
    ReadEnded,
    ReadLanded,
    decode_to_rank,
    encode,
)


class RankServer:
    """Handles messages in the thread that calls `run`, and digests in another thread, so that no read waits for them."""

    def __init__(self, rank_0: socket.socket, connectors: ConnectorSet, num_shapes: int = 1) -> None:
        """connectors: serve this rank's pool, joined with those of its other shapes of blocks."""
        self._rank_0 = rank_0
        self._connectors = connectors
        self._num_shapes = num_shapes
        self._sending = threading.Lock()
        self._grants: dict[bytes, Grant] = {}
        self._reads: dict[int, BlockRead] = {}
        self._ended: set[int] = set()
        """Reads that ended before `_begin` had noted them."""
        self._lock = threading.Lock()
        self._digesting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank-digests")

    def run(self) -> None:
        """Serve until rank 0 closes the socket; then end all reads and grants."""
        names, pools = self._connectors.names, map(self._pool, range(self._num_shapes))
        self.tell(RankServes([{name: pool.metadata(name) for name in names} for pool in pools]))
        try:
            while (payload := self._receive()) is not None:
                self._serve(payload)
        finally:
            self._digesting.shutdown(cancel_futures=True)
            self._connectors.close()

    def _pool(self, shape: int) -> RankTransfers:
        return self._connectors.of_part(RankPart(shape=shape))

    def tell(self, message: FromRank) -> None:
        """Send a message, from any thread; no effect if rank 0 has ended."""
        with self._sending, contextlib.suppress(OSError):
            send_frame(self._rank_0, encode(message))

    def _receive(self) -> bytearray | None:
        with contextlib.suppress(OSError):
            return receive_frame(self._rank_0)
        return None

    def _serve(self, payload: bytearray) -> None:
        match decode_to_rank(payload):
            case GrantReads(token, parts, shape):
                self._grants[token] = self._pool(shape).grant(token, parts)
            case PublishBlocks(token, first_index, blocks):
                if (grant := self._grants.get(token)) is not None:  # the transfer may have ended meanwhile
                    grant.publish(first_index, blocks)
            case CloseGrant(call_id, token):
                self._grants.pop(token).close(lambda: self.tell(GrantFenced(call_id)))
            case BeginRead() as begin:
                self._begin(begin)
            case CancelRead(read_id):
                if (read := self._reads.get(read_id)) is not None:
                    read.cancel()
            case DigestBlocks() as asked:
                self._digesting.submit(self._digest, asked)
            case MeetPeer(worker_id, epoch):
                self._connectors.meet(worker_id, epoch)
            case ForgetPeer(connector, metadata, shape):
                self._pool(shape).forget(connector, metadata)

    def _begin(self, begin: BeginRead) -> None:
        order = ReadOrder(
            begin.metadata,
            begin.token,
            [block.block() for block in begin.blocks],
            begin.digest.digest(),
            parts=begin.parts,
            source_parts=begin.source_parts,
        )
        read = self._pool(begin.shape).read(begin.connector, order, _ToRankZero(self, begin.read_id))
        with self._lock:
            if begin.read_id in self._ended:
                self._ended.remove(begin.read_id)
            else:
                self._reads[begin.read_id] = read

    def read_ended(self, read_id: int, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        with self._lock:
            if self._reads.pop(read_id, None) is None:
                self._ended.add(read_id)
        self.tell(ReadEnded(read_id, outcome, None if cause is None else cause.message))

    def _digest(self, asked: DigestBlocks) -> None:
        pool = self._pool(asked.shape)
        found: Future[list[int]] = pool.digests(asked.blocks, asked.indexes, asked.digest.digest(), asked.parts)
        error = found.exception()
        digests = found.result() if error is None else []
        self.tell(DigestsFound(asked.call_id, digests, None if error is None else str(error)))


@dataclass(frozen=True, slots=True)
class _ToRankZero:
    """A `ReadListener` that reports to rank 0."""

    server: RankServer
    read_id: int

    def landed(self, first: int, count: int) -> None:
        self.server.tell(ReadLanded(self.read_id, first, count))

    def ended(self, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        self.server.read_ended(self.read_id, outcome, cause)
