"""`SourceTransfers`: all transfers of one source, and the ids of ended ones."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdserve.common import clock
from pdserve.common.errors import PdServeError, TransferFailed
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.source_transfer import (
    ExpectedTransfer,
    LeaseLimits,
    PeerId,
    SourceEvents,
    SourceStream,
    SourceTransfer,
)
from pdserve.kv_transfer.heads.head_groups import HeadGroup

TRANSFER_ID_BYTES = 16
MAX_WAITING = 4096
"""Limit of attaches that wait for their prefill calls, or for what their receiver looks up."""
MAX_WAITING_PER_PEER = 1024
MAX_TOMBSTONES = 1 << 16
"""Limit of remembered ids of ended transfers; then the oldest is forgotten. Ids are random, and call proofs prevent replays."""


class AttachedTooLate(TransferFailed):
    """The transfer has ended already. Logged at a low level: the client left, or the end was reported elsewhere."""


class NothingCached(TransferFailed):
    """None of the blocks that a receiver asks for is cached. Logged at a low level: they may have been a moment ago."""


class SourceTransfers:
    """All transfers of one source. Runs in the asyncio thread. Attach and prefill call may arrive in either order."""

    def __init__(self, connectors: ConnectorSet, limits: LeaseLimits, events: SourceEvents) -> None:
        self._connectors = connectors
        self._limits = limits
        self._events = events
        self._transfers: dict[bytes, SourceTransfer] = {}
        self._awaited: dict[bytes, dict[asyncio.Future[SourceTransfer], None]] = {}
        """Transfer id -> attaches that wait for the prefill call, in order of arrival; the newest is kept."""
        self._num_waiting: Counter[str] = Counter()
        """Receiver's id -> number of its attaches that wait, for prefill calls or lookups."""
        self._num_waiting_in_all = 0
        # an id is used once; it is remembered longer than any attach for it can take
        self._tombstones: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._transfers)

    def expect(self, expected: ExpectedTransfer) -> SourceTransfer:
        """Register the transfer of a prefill call. Raises: TransferFailed if the id was used before."""
        self._drop_old_tombstones()
        if expected.transfer_id in self._transfers or expected.transfer_id in self._tombstones:
            raise TransferFailed("the transfer id was used before")
        transfer = SourceTransfer(expected, self._connectors, self._limits, self._events)
        self._transfers[expected.transfer_id] = transfer
        transfer.over.add_done_callback(lambda _: self._ended(expected.transfer_id))
        for awaited in self._awaited.pop(expected.transfer_id, ()):
            if not awaited.done():
                awaited.set_result(transfer)
        return transfer

    async def look_up(
        self,
        transfer_id: bytes,
        receiver: PeerId,
        request_digest: bytes,
        block_hashes: tuple[bytes, ...],
        num_wantable: Callable[[int], int],
        draft_head: str = "",
    ) -> None:
        """Begin the transfer of blocks that the prefix cache has; no effect if it has begun. `attach` follows.

        num_wantable: of so many cached places -> `ExpectedTransfer.num_blocks`. Raises: TransferFailed for an id that was used
        before, and if nothing is cached.
        """
        self._verify_id(transfer_id)
        if transfer_id in self._transfers:
            return
        request_id = f"blocks {transfer_id.hex()}"
        try:
            async with self._waiting(receiver.worker_id):
                num_cached = await self._events.look_up(request_id, block_hashes)
        except TimeoutError:
            raise TransferFailed("the engine did not look the blocks up in time") from None
        if not num_cached:
            raise NothingCached(f"none of the {len(block_hashes)} blocks is cached here")
        limits, num_blocks = self._limits, num_wantable(num_cached)
        expected = ExpectedTransfer(
            transfer_id, request_id, receiver, request_digest, limits.max_s, num_blocks, draft_head, num_cached
        )
        self._events.began(self.expect(expected))

    def _verify_id(self, transfer_id: bytes) -> None:
        """Raises: TransferFailed for an id that cannot be one, or of a transfer that has ended."""
        self._drop_old_tombstones()
        if len(transfer_id) != TRANSFER_ID_BYTES:
            raise TransferFailed(f"transfer_id has {len(transfer_id)} bytes, {TRANSFER_ID_BYTES} are needed")
        if transfer_id in self._tombstones:
            raise AttachedTooLate("the transfer has ended")

    async def attach(
        self,
        transfer_id: bytes,
        receiver: PeerId,
        request_digest: bytes,
        stream: SourceStream,
        have: int,
        groups: tuple[HeadGroup, ...] = (),
        draft_head: str = "",
    ) -> SourceTransfer:
        """Attach a receiver's control stream; waits for the prefill call if necessary. groups: empty for whole blocks of rank 0.
        draft_head: whose blocks the receiver expects, too; empty: none.

        Raises: TransferFailed if the reference is stale, forged, of another receiver or another request (I8), or if no prefill call
        arrives within `attach_timeout_s`.
        """
        self._verify_id(transfer_id)
        transfer = self._transfers.get(transfer_id) or await self._wait_for(transfer_id, receiver.worker_id)
        if receiver != transfer.expected.receiver:
            raise TransferFailed(f"the transfer is for another receiver, not for {receiver}")
        if request_digest != transfer.expected.request_digest:
            raise TransferFailed("the transfer is of another request: the digests differ")
        if draft_head != transfer.expected.draft_head:
            # blocks would have other numbers at both ends
            here, there = transfer.expected.draft_head or "none", draft_head[:64] or "none"
            raise TransferFailed(f"the transfer moves the blocks of another draft head: {here} here, {there} there")
        if transfer.has_ended:
            raise AttachedTooLate("the transfer has ended")
        transfer.divide(groups)
        transfer.attach(stream, have)
        return transfer

    @asynccontextmanager
    async def _waiting(self, worker_id: str) -> AsyncIterator[None]:
        """Count an attach that waits. Raises: TransferFailed if too many do."""
        if self._num_waiting[worker_id] >= MAX_WAITING_PER_PEER or self._num_waiting_in_all >= MAX_WAITING:
            raise TransferFailed(
                f"{self._num_waiting[worker_id]} attaches of {worker_id} and {self._num_waiting_in_all} in all wait for "
                f"their prefill calls, {MAX_WAITING_PER_PEER} and {MAX_WAITING} may"
            )
        self._num_waiting[worker_id] += 1
        self._num_waiting_in_all += 1
        try:
            async with asyncio.timeout(self._limits.attach_timeout_s):
                yield
        finally:
            self._num_waiting_in_all -= 1
            self._num_waiting[worker_id] -= 1
            if not self._num_waiting[worker_id]:
                del self._num_waiting[worker_id]

    async def _wait_for(self, transfer_id: bytes, worker_id: str) -> SourceTransfer:
        awaited: asyncio.Future[SourceTransfer] = asyncio.get_running_loop().create_future()
        # several streams of one receiver may wait; the end of an older one must not end the wait of a newer one
        together = self._awaited.setdefault(transfer_id, {})
        together[awaited] = None
        try:
            async with self._waiting(worker_id):
                return await awaited
        except TimeoutError:
            raise TransferFailed("no such transfer") from None
        finally:
            del together[awaited]
            if not together and self._awaited.get(transfer_id) is together:
                del self._awaited[transfer_id]

    def revoke_all(self, cause: PdServeError) -> None:
        """End all transfers, because the source shuts down."""
        for transfer in list(self._transfers.values()):
            transfer.revoke(cause)

    def _ended(self, transfer_id: bytes) -> None:
        self._transfers.pop(transfer_id, None)
        self._tombstones[transfer_id] = clock.monotonic() + self._limits.attach_timeout_s + self._limits.max_s

    def _drop_old_tombstones(self) -> None:
        now = clock.monotonic()
        while self._tombstones and (
            next(iter(self._tombstones.values())) < now or len(self._tombstones) > MAX_TOMBSTONES
        ):
            self._tombstones.popitem(last=False)
