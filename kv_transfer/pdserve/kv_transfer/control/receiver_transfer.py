"""`ReceiverTransfer`: one transfer at the worker that decodes. Runs in the asyncio thread.

The life of a transfer here:

1. ATTACHING: the control stream opens when the request arrives. `attached`: the source has chosen the connector and the digest
   algorithm, and has named the place of each head group (ATTACHED).
2. `room`: the engine has reserved blocks. With the stream open, `Want` asks for them (RECEIVING).
3. `published`: wanted blocks are read as the source publishes them, while it computes later chunks.
4. A block has landed when it is read and verified. The engine and the source get the number that landed without a gap.
5. `finished`: the source has computed the prompt. Its request digest is compared, and its first tokens go to the engine.
6. After 4 and 5 for all wanted blocks the transfer is LANDED: it sends `Release` and reports `fenced`.

A broken stream is opened again and changes no state; reads continue. After a failed read the transfer attaches again over the next
connector, once all reads over the failed one have ended. Without another connector, after any other error, or when the request
ends, it closes the stream and cancels its reads (DRAINING if it was RECEIVING). After the last of them it is FAILED or CANCELLED,
and `fenced` lets the engine reuse the blocks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Protocol

import msgspec

from pdserve.common import clock
from pdserve.common.block_hash import DIGEST_BYTES
from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import DigestMismatch, PdServeError, TransferFailed
from pdserve.common.security.block_digest import BlockDigest
from pdserve.kv_transfer.connector import ReadOutcome
from pdserve.kv_transfer.connector_set import ConnectorSet
from pdserve.kv_transfer.control.group_reads import GroupReads, Way
from pdserve.kv_transfer.control.source_transfers import TRANSFER_ID_BYTES
from pdserve.kv_transfer.control.transfer_state import RECEIVER_MOVES, ReceiverState, has_ended, move
from pdserve.kv_transfer.heads.head_groups import GroupSource

log = logging.getLogger(__name__)

NOTIFY_EVERY_S = 0.005
"""Seconds between reports to engine and source while blocks land; a report costs more than a block."""


class SourceRef(msgspec.Struct, frozen=True, tag=True):
    """The source of one transfer: one epoch of a worker, and the transfer's id, which is used once.

    The blocks are those of a prefill call, or with `block_hashes` those that the worker has cached of a sequence's first full ones.
    """

    worker_id: str
    epoch: int
    address: str
    transfer_id: bytes
    request_digest: bytes
    without_draft_head: bool = False
    """True: the blocks of a draft head are not moved."""
    block_hashes: tuple[bytes, ...] = ()

    @classmethod
    def of_cache(cls, worker_id: str, epoch: int, address: str, block_hashes: Sequence[bytes]) -> SourceRef:
        """A source of cached blocks, at least one."""
        transfer_id, digest = secrets.token_bytes(TRANSFER_ID_BYTES), block_hashes[-1][:DIGEST_BYTES]
        return cls(worker_id, epoch, address, transfer_id, digest, block_hashes=tuple(block_hashes))


class ReceiverEvents(Protocol):
    """Events for the owner of the blocks, called in the asyncio thread."""

    def offered(self, transfer: ReceiverTransfer, num_blocks: int) -> None:
        """The source's prefix cache has so many of the sequence's first full blocks; called once, for a source of cached blocks."""

    def landed(self, transfer: ReceiverTransfer, num_blocks: int) -> None:
        """The first `num_blocks` wanted blocks are here and verified; the number only grows. Called for all of them before
        `failed`."""

    def source_finished(self, transfer: ReceiverTransfer, num_tokens: int, token_ids: tuple[int, ...]) -> None:
        """The source has computed the whole prompt, and the request digests agree; `num_tokens` is not compared yet."""

    def failed(self, transfer: ReceiverTransfer, cause: PdServeError) -> None:
        """No more blocks will arrive; `fenced` follows."""

    def fenced(self, transfer: ReceiverTransfer) -> None:
        """No read of this transfer will write any more, so all blocks may be returned. Called once, if blocks were reserved."""


class ControlStream(Protocol):
    """The receiver's half of the control stream."""

    def want(self, first_index: int, num_blocks: int) -> None: ...

    def landed(self, num_blocks: int) -> None: ...

    def release(self) -> None:
        """Send `Release`, the last message; before all blocks have landed it gives the transfer up."""

    def close(self) -> None:
        """Close the stream without a message; grace or cancellation ends the transfer at the source."""


class ReceiverTransfer:
    """One transfer, from the request's arrival until no read can write."""

    def __init__(self, request_id: str, source: SourceRef, connectors: ConnectorSet, events: ReceiverEvents) -> None:
        self.request_id = request_id
        self.source = source
        self.state = ReceiverState.ATTACHING
        self.given_up = connectors.avoided(self._peer)
        """Connectors that this transfer does not use, since they failed with this source, now or shortly before."""
        self.fell_back_from: list[str] = []
        """Connectors that failed in this transfer, in order."""
        self.cause: PdServeError | None = None
        """The error that ended it; None if there was none."""
        self.began_at = clock.monotonic()
        self.source_recomputes = False
        """True while the source computes the prompt again, because its blocks had been reused before `Want` arrived."""
        self._falls_back = False
        self._connectors = connectors
        self._events = events
        self._opened: ControlStream | None = None
        """The last stream, until it breaks."""
        self._stream: ControlStream | None = None
        """The same, once the source has accepted."""
        self._first_index = 0
        self._local_blocks: tuple[int, ...] | None = None
        self._reads = GroupReads(connectors, lambda number, places: _AsyncioListener(self, number, places))
        self._num_notified = 0
        self._notified_at = float("-inf")
        self._num_offered = 0
        self._source_finished = False
        self._ends_as: ReceiverState | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def num_landed(self) -> int:
        """Number of landed wanted blocks, without a gap from the first."""
        return self._reads.num_landed

    @property
    def has_ended(self) -> bool:
        return has_ended(RECEIVER_MOVES, self.state)

    @property
    def is_ending(self) -> bool:
        """True if the control stream is not needed any more; reads may still be draining."""
        return self._ends_as is not None or self.has_ended

    @property
    def is_cut_short(self) -> bool:
        """True if it ended, or is ending, before all blocks had landed."""
        return self._ends_as is not None

    @property
    def _peer(self) -> str:
        return f"{self.source.worker_id}:{self.source.epoch:016x}"

    @property
    def wants_attach(self) -> bool:
        """True if all reads over a failed connector have ended and a new stream for another connector is needed."""
        return self._falls_back and not self._reads and not self.is_ending

    @property
    def connector_name(self) -> str:
        """The current connector; empty before the source has accepted."""
        return self._reads.way.connector

    @property
    def num_blocks(self) -> int:
        """Number of wanted blocks; 0 until the engine has reserved blocks."""
        return len(self._local_blocks or ())

    @property
    def wanted_end(self) -> int | None:
        """Index of the prompt's block after the last wanted one; None until blocks are wanted."""
        return None if self._local_blocks is None else self._first_index + len(self._local_blocks)

    @property
    def num_published(self) -> int:
        """Number of wanted blocks that the source has published."""
        return self._reads.num_begun

    @property
    def awaits_source(self) -> bool:
        """True if `Want` was sent over the open control stream, and the source has still to publish blocks or to finish."""
        asked = self._stream is not None and self._local_blocks is not None and not self._falls_back
        missing = self.num_published < self.num_blocks or not self._source_finished
        return asked and missing and not self.source_recomputes and not self.is_ending

    @property
    def num_quarantined(self) -> int:
        """Number of blocks that must not be reused before abandoned reads have ended."""
        if not self._reads:
            return 0
        if self._ends_as is not None:
            return self.num_blocks
        return self._reads.num_asked if self._falls_back else 0

    # ---- the engine side

    def room(
        self,
        first_index: int,
        local_blocks: Sequence[int],
        shapes: Sequence[int],
        unused: DeviceEvent | None = None,
    ) -> None:
        """Receive blocks from `first_index` on into `local_blocks`, which the engine has reserved.

        local_blocks: numbers in the pools of their shapes. unused: as in `BlockConnector.read`.
        """
        if self.is_ending:
            self._events.fenced(self)
            return
        self._first_index = first_index
        self._local_blocks = tuple(local_blocks)
        self._reads.reserve(first_index, local_blocks, shapes, unused)
        self._want()

    def stop(self) -> None:
        """End the transfer, because the request has ended."""
        self._end(ReceiverState.CANCELLED)

    # ---- the control stream

    def opened(self, stream: ControlStream) -> None:
        """A stream is open, and the source has not answered yet."""
        self._opened = stream

    def attached(
        self, stream: ControlStream, connector: str, groups: Sequence[GroupSource], digest: BlockDigest
    ) -> None:
        """Handle `Accepted`, also after a break. groups: where the source has each head group."""
        if self.is_ending:
            self._leave(stream)
            return
        if connector in self.given_up and self._falls_back:
            # this connector has failed since `Open`: use this stream only for messages until the next stream, with another
            # connector
            self._stream = stream
            if self.wants_attach:
                stream.close()
            return
        if self._connectors.get(connector) is None or connector in self.given_up:
            self.fail(TransferFailed(f"the source chose the connector {connector[:64]!r}, which is not used with it"))
            stream.close()
            return
        try:
            for group in groups:
                peer = self.source
                self._connectors.reached(peer.worker_id, peer.epoch, connector, group.metadata, group.source)
        except TransferFailed as error:
            self.fail(error)
            stream.close()
            return
        if not self._falls_back or self.wants_attach:
            self._reads.way, self._falls_back = Way(connector, tuple(groups), digest), False
        self._stream = stream
        if self.state is ReceiverState.ATTACHING:
            self.state = move(RECEIVER_MOVES, self.state, ReceiverState.ATTACHED)
        self._want()

    def offered(self, num_blocks: int) -> None:
        """Handle what the source's prefix cache has; a later stream repeats it."""
        if self.is_ending or self._num_offered:
            return
        if not 0 < num_blocks <= len(self.source.block_hashes):
            asked = len(self.source.block_hashes)
            self.fail(TransferFailed(f"the source has num_blocks {num_blocks} of the {asked} that were asked for"))
            return
        self._num_offered = num_blocks
        self._events.offered(self, num_blocks)

    def detached(self, stream: ControlStream) -> None:
        """Handle a broken stream: active reads continue, and a re-attach changes no state."""
        if self._stream is stream:
            self._stream = None
        if self._opened is stream:
            self._opened = None

    def _want(self) -> None:
        if self._stream is None or self._local_blocks is None:
            return
        self._stream.want(self._first_index, len(self._local_blocks))
        if self.state is ReceiverState.ATTACHED and self._local_blocks:
            self.state = move(RECEIVER_MOVES, self.state, ReceiverState.RECEIVING)
        self._finish_if_done()

    def published(self, first_index: int, digests: Sequence[int], locations: Sequence[int]) -> None:
        """Start reading the published blocks that are wanted and not requested yet."""
        if self.state is not ReceiverState.RECEIVING or not self._reads.way.connector:
            return
        if self._falls_back:
            return  # the source publishes it again on the next stream
        try:
            self._reads.begin(first_index, digests, locations)
        except TransferFailed as error:
            self.fail(error)

    def finished(self, num_tokens: int, request_digest: bytes, token_ids: tuple[int, ...]) -> None:
        """Handle the end of the source's prefill; fails if the request digests differ, or if blocks are missing: no more come."""
        if self._source_finished or self.is_ending:
            return
        if self._local_blocks is None:
            self.fail(TransferFailed("the source finished before its blocks were wanted"))
            return
        if request_digest != self.source.request_digest:
            self.fail(DigestMismatch("the source computed another request: the digests differ"))
            return
        if self.num_published < self.num_blocks and not self._falls_back:
            self.fail(
                TransferFailed(f"the source finished after {self.num_published} of {self.num_blocks} wanted blocks")
            )
            return
        self._source_finished = True
        self._events.source_finished(self, num_tokens, token_ids)
        self._finish_if_done()

    def fail(self, cause: PdServeError) -> None:
        """End the transfer with an error; no effect if it has ended."""
        if not self.is_ending:
            self.cause = cause
            if self.num_landed > self._num_notified:
                self._notify_landed()
            self._events.failed(self, cause)
            self._end(ReceiverState.FAILED)

    def source_lost(self, cause: PdServeError) -> None:
        """End the transfer, because this epoch of the source no longer responds."""
        self._connectors.lost(self.source.worker_id, self.source.epoch)
        self.fail(cause)

    # ---- reads, reported by `_AsyncioListener` in the asyncio thread

    def read_landed(self, places: Sequence[int]) -> None:
        is_first = not self.num_landed
        if self._reads.landed(places) and self._ends_as is None:
            if is_first:
                self._connectors.landed(self.source.worker_id, self.source.epoch, self.connector_name)
            has_all = self.num_landed == self.num_blocks
            if has_all or self._loop.time() - self._notified_at >= NOTIFY_EVERY_S:
                self._notify_landed()
                if self._stream is not None and not (
                    has_all and self._source_finished
                ):  # otherwise `Release` reports it
                    self._stream.landed(self.num_landed)

    def _notify_landed(self) -> None:
        self._num_notified, self._notified_at = self.num_landed, self._loop.time()
        self._events.landed(self, self.num_landed)

    def read_ended(self, number: int, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        self._reads.ended(number)
        if outcome is not ReadOutcome.DONE and self._ends_as is None and not self._falls_back:
            cause = cause or TransferFailed("a read was cancelled")
            if not self._fall_back(cause):
                self.fail(cause)
        if self.wants_attach:
            self._attach_again()
        self._finish_if_done()

    def _fall_back(self, cause: TransferFailed) -> bool:
        """Continue over the next connector; False if there is none. Its reads begin after those over the failed one have ended."""
        name = self.connector_name
        rest = [other for other in self._connectors.names if other not in self.given_up and other != name]
        if not rest:
            return False
        log.warning(
            "reading from %s over %s failed, continuing over %s: %s",
            self.source.worker_id, name, " or ".join(rest), cause.message,
        )  # fmt: skip
        self.given_up.add(name)
        self.fell_back_from.append(name)
        self._connectors.failed(self._peer, name)
        self._falls_back = True
        self._reads.cancel()
        return True

    def _attach_again(self) -> None:
        """Attach again after all reads over the old connector have ended; blocks that did not land may then be written again."""
        self._reads.ask_again()
        if self._stream is not None:
            self._stream.close()

    def _finish_if_done(self) -> None:
        """Send `Release` if all blocks have landed; report `fenced` if the transfer ends and its last read has ended."""
        if self._ends_as is not None:
            self._fence_if_quiet()
            return
        everything = self._local_blocks is not None and self.num_landed == len(self._local_blocks)
        if everything and not self._reads and self._source_finished and not self.has_ended:
            if self.state is ReceiverState.ATTACHING:
                return
            self.state = move(RECEIVER_MOVES, self.state, ReceiverState.LANDED)
            if self._stream is not None:
                self._stream.release()
            self._events.fenced(self)

    def _end(self, state: ReceiverState) -> None:
        if self.is_ending:
            return
        self._ends_as = state
        if self.state is ReceiverState.RECEIVING:
            self.state = move(RECEIVER_MOVES, self.state, ReceiverState.DRAINING)
        if (stream := self._stream or self._opened) is not None:
            self._leave(stream)
        self._opened = self._stream = None
        self._reads.cancel()
        self._fence_if_quiet()

    def _leave(self, stream: ControlStream) -> None:
        """End a stream before all blocks have landed."""
        if self.source.block_hashes:
            stream.release()  # there is no call whose end would end the transfer at the source
        else:
            stream.close()

    def _fence_if_quiet(self) -> None:
        if not self._reads and not self.has_ended and self._ends_as is not None:
            self.state = move(RECEIVER_MOVES, self.state, self._ends_as)
            if self._local_blocks is not None:
                self._events.fenced(self)

    def call_soon(self, callback: object, *args: object) -> None:
        """Call in the asyncio thread, from a transport thread; no effect if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)  # type: ignore[arg-type]
        except RuntimeError:
            log.debug("the event loop has closed before a read ended")


class _AsyncioListener:
    """A `ReadListener` that passes the reports of transport threads to the asyncio thread."""

    def __init__(self, transfer: ReceiverTransfer, number: int, places: list[int]) -> None:
        self._transfer = transfer
        self._number = number
        self._places = places

    def landed(self, first: int, count: int) -> None:
        self._transfer.call_soon(self._transfer.read_landed, self._places[first : first + count])

    def ended(self, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        self._transfer.call_soon(self._transfer.read_ended, self._number, outcome, cause)
