"""`RemoteRank`: the transfers of a rank above 0, as rank 0 uses them."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import PeerError, TransferFailed, WorkerLost
from pdserve.common.ipc.calls import Calls
from pdserve.common.ipc.frames import receive_frame, send_frame
from pdserve.common.security.block_digest import BlockDigest
from pdserve.kv_transfer.connector import BlockRead, Grant, ReadListener, ReadOrder, ReadOutcome
from pdserve.worker.ranks.transfer_messages import (
    BeginRead,
    BlockValues,
    CancelRead,
    CloseGrant,
    DigestBlocks,
    DigestsFound,
    DigestValues,
    ForgetPeer,
    FromRank,
    GrantFenced,
    GrantReads,
    MeetPeer,
    PublishBlocks,
    RankServes,
    ReadEnded,
    ReadLanded,
    ToRank,
    decode_from_rank,
    encode,
)

_T = TypeVar("_T")


class RemoteRank:
    """A rank's transfers. A thread writes the socket, so that no caller waits for the rank, and another reads it.

    At the end of the rank's process its reads end with FAILED, its grants are fenced, and its digests fail: nothing of it reads or
    writes any more.
    """

    def __init__(self, peer: socket.socket, rank: int) -> None:
        """peer: this end of the rank's transfer socket."""
        self._peer = peer
        self._rank = rank
        self._serves: Future[Sequence[Mapping[str, bytes]]] = Future()
        self._unsent: queue.SimpleQueue[tuple[ToRank, DeviceEvent | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_ended = False
        self._is_closed = False
        self._call_ids = itertools.count()
        self._reads: dict[int, ReadListener] = {}
        self._fences: dict[int, Callable[[], None]] = {}
        self._calls = Calls()
        """Digests that were asked for."""
        self._threads = [
            threading.Thread(target=run, name=f"rank-{rank}-{name}", daemon=True)
            for name, run in (("reader", self._read), ("writer", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def wait_until_served(self) -> Sequence[Mapping[str, bytes]]:
        """Per shape of blocks, connector -> endpoint of the rank's pool, when it serves. Raises: ConnectionError when it ended
        before."""
        return self._serves.result()

    def pools(self) -> list[RemotePool]:
        """Per shape of blocks. The rank serves."""
        return [RemotePool(self, shape, metadata) for shape, metadata in enumerate(self._serves.result(0))]

    def read(self, order: ReadOrder, connector: str, shape: int, listener: ReadListener) -> BlockRead:
        """As `RankTransfers.read`, of blocks of a shape."""
        values = [BlockValues.of(block) for block in order.blocks]
        of = DigestValues.of(order.digest)
        with self._lock:
            read_id = next(self._call_ids)
            has_ended = self._has_ended
            if not has_ended:
                self._reads[read_id] = listener
        if has_ended:
            listener.ended(ReadOutcome.FAILED, self._failure())
        else:
            begin = BeginRead(
                read_id, connector, order.metadata, order.token, values, of, order.parts, order.source_parts, shape
            )
            self.send(begin, after=order.unused)
        return _RemoteRead(self, read_id)

    def digests(
        self, blocks: Sequence[int], indexes: Sequence[int], digest: BlockDigest, parts: int, shape: int
    ) -> Future[list[int]]:
        """As `RankTransfers.digests`, of blocks of a shape."""
        call_id, found = self._calls.open()
        if not found.done():
            self.send(DigestBlocks(call_id, list(blocks), list(indexes), DigestValues.of(digest), parts, shape))
        return found

    def close(self) -> None:
        """End the rank's reads and grants; its process ends with its step socket. May be called again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._unsent.put(None)
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._peer.close()

    # ---- grants and reads

    def send(self, message: ToRank, after: DeviceEvent | None = None) -> None:
        """Queue a message, which waits for an event of rank 0."""
        self._unsent.put((message, after))

    def close_grant(self, token: bytes, on_fenced: Callable[[], None]) -> None:
        with self._lock:
            call_id = next(self._call_ids)
            has_ended = self._has_ended
            if not has_ended:
                self._fences[call_id] = on_fenced
        if has_ended:
            on_fenced()
        else:
            self.send(CloseGrant(call_id, token))

    # ---- threads

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader notices the end
            while (unsent := self._unsent.get()) is not None:
                message, after = unsent
                if after is not None:
                    after.synchronize()
                send_frame(self._peer, encode(message))

    def _read(self) -> None:
        with contextlib.suppress(OSError, PeerError, msgspec.DecodeError):
            while (payload := receive_frame(self._peer)) is not None:
                self._handle(decode_from_rank(payload))
        self._end()

    def _handle(self, message: FromRank) -> None:
        match message:
            case RankServes(metadata):
                self._serves.set_result(metadata)
            case ReadLanded(read_id, first, count):
                if (listener := self._reads.get(read_id)) is not None:
                    listener.landed(first, count)
            case ReadEnded(read_id, outcome, cause):
                if (listener := self._taken(self._reads, read_id)) is not None:
                    listener.ended(outcome, None if cause is None else TransferFailed(cause))
            case GrantFenced(call_id):
                if (on_fenced := self._taken(self._fences, call_id)) is not None:
                    on_fenced()
            case DigestsFound(call_id, digests, error):
                failure = None if error is None else TransferFailed(f"rank {self._rank}: {error}")
                self._calls.answer(call_id, digests, failure)

    def _taken(self, waiting: dict[int, _T], call_id: int) -> _T | None:
        with self._lock:
            return waiting.pop(call_id, None)

    def _end(self) -> None:
        """The rank has ended, or `close` was called: all that waits for it ends."""
        with self._lock:
            self._has_ended = True
            reads, self._reads = self._reads, {}
            fences, self._fences = self._fences, {}
        outcome, cause = ReadOutcome.FAILED, self._failure()
        if self._is_closed:
            outcome = ReadOutcome.CANCELLED
        for listener in reads.values():
            listener.ended(outcome, None if self._is_closed else cause)
        for on_fenced in fences.values():
            on_fenced()
        self._calls.end(WorkerLost(cause.message))
        if not self._serves.done():
            self._serves.set_exception(ConnectionError(cause.message))

    def _failure(self) -> TransferFailed:
        return TransferFailed(f"rank {self._rank} of this worker has ended")


@dataclass(frozen=True, slots=True)
class RemotePool:
    """Implements `RankTransfers`: the blocks of one shape on a rank."""

    _rank: RemoteRank
    _shape: int
    _metadata: Mapping[str, bytes]

    def metadata(self, connector: str) -> bytes:
        return self._metadata[connector]

    def grant(self, token: bytes, parts: int = 1) -> Grant:
        self._rank.send(GrantReads(token, parts, self._shape))
        return _RemoteGrant(self._rank, token)

    def read(self, connector: str, order: ReadOrder, listener: ReadListener) -> BlockRead:
        """As `RankTransfers.read`. `ReadOrder.unused` is that of rank 0, whose step ends after every other rank has written its
        part."""
        return self._rank.read(order, connector, self._shape, listener)

    def digests(
        self, blocks: Sequence[int], indexes: Sequence[int], digest: BlockDigest, parts: int
    ) -> Future[list[int]]:
        return self._rank.digests(blocks, indexes, digest, parts, self._shape)

    def meet(self, worker_id: str, epoch: int) -> None:
        if self._shape == 0:  # the rank's pools meet the peer together
            self._rank.send(MeetPeer(worker_id, epoch))

    def forget(self, connector: str, metadata: bytes) -> None:
        self._rank.send(ForgetPeer(connector, metadata, self._shape))

    def close(self) -> None:
        """End the rank's reads and grants, of all its pools."""
        self._rank.close()


@dataclass(frozen=True, slots=True)
class _RemoteGrant:
    rank: RemoteRank
    token: bytes

    def publish(self, first_index: int, blocks: Sequence[int]) -> None:
        self.rank.send(PublishBlocks(self.token, first_index, list(blocks)))

    def close(self, on_fenced: Callable[[], None]) -> None:
        self.rank.close_grant(self.token, on_fenced)


@dataclass(frozen=True, slots=True)
class _RemoteRead:
    rank: RemoteRank
    read_id: int

    def cancel(self) -> None:
        self.rank.send(CancelRead(self.read_id))
