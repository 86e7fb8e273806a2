"""`TransferEvents`: applies an event from the transfer side to the state of the engine.

Late, repeated and unknown events are counted and dropped (I9).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import PdServeError
from pdserve.common.request.engine_types import Migration
from pdserve.engine.kv_cache.block_pool import PinnedBlocks, PinTracker
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager, RestingTable
from pdserve.engine.request import Request, RequestStatus, Wait
from pdserve.engine.scheduler.kv_messages import (
    Found,
    HoldReturned,
    IntoEngine,
    KvOutbox,
    Landed,
    Lookup,
    Migrating,
    Missed,
    Offered,
    ReceiveFailed,
    Revoke,
    Settled,
    SourceFinished,
    Want,
)
from pdserve.engine.scheduler.waiting.remote_kv_queue import Ready, RemoteKvQueue
from pdserve.engine.scheduler.waiting.waiting_queues import WaitingQueues


@dataclass(frozen=True, slots=True)
class End:
    """Result of an event that ends this request."""

    request: Request
    status: RequestStatus
    cause: PdServeError | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """Result of an event after which this request can be admitted: its source has so many of its first blocks."""

    request: Request
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ComputeHere:
    """Result of an event after which blocks of this request that were being fetched have to be computed."""

    request: Request
    cause: PdServeError


Outcome = Ready | End | Offer | ComputeHere | None


@dataclass(eq=False)
class TransferEvents:
    """Passes events on to `RemoteKvQueue` and `KvSendTracker`."""

    _requests: Mapping[str, Request]
    _holds: PinTracker
    _receives: RemoteKvQueue
    _sources: KvSendTracker
    _waiting: WaitingQueues
    num_dropped: int = field(default=0, init=False)

    def apply(self, event: IntoEngine) -> Outcome:
        """Apply one event; returns the action that the scheduler must take, None if there is none."""
        if isinstance(event, HoldReturned):
            self._holds.back(event.hold)
            return self._receives.returned(event.request_id, event.hold.block_ids)
        if isinstance(event, Lookup):
            self._sources.lookup(event)
            return None
        if isinstance(event, Revoke) and self._sources.forget(event.request_id):
            return None
        request = self._requests.get(event.request_id)
        if request is None:
            if not (isinstance(event, Want) and self._sources.want_ended(event.request_id, event.first_index)):
                self.num_dropped += 1
            return None
        if isinstance(event, Landed | SourceFinished) and not self._receives.expects(event):
            self.num_dropped += 1
            return None
        match event:
            case Landed():
                return self._receives.landed(event.request_id, event.num_blocks)
            case SourceFinished():
                outcome = self._receives.source_finished(event)
                return self._failed(request, outcome.cause) if isinstance(outcome, ReceiveFailed) else outcome
            case ReceiveFailed():
                return self._failed(request, event.cause)
            case Offered():
                return self._offered(request, event.num_blocks)
            case Want():
                self._want(request, event.first_index)
                return None
            case Revoke():
                return End(request, RequestStatus.FINISHED_ABORTED)

    def _want(self, request: Request, first_index: int) -> None:
        if not request.core.transfer_source or request.wanted_from is not None:
            self.num_dropped += 1
            return
        self._sources.want(request, first_index)
        self._waiting.wanted(request)

    def _offered(self, request: Request, num_blocks: int) -> Offer | None:
        if Wait.OFFER in request.waits_for:
            return Offer(request, num_blocks)
        self.num_dropped += 1
        return None

    def _failed(self, request: Request, cause: PdServeError) -> Outcome:
        if Wait.REMOTE_KV in request.waits_for:
            if request.core.remote_prefill:
                return End(request, RequestStatus.FINISHED_ERROR, cause)
            return ComputeHere(request, cause)
        if Wait.OFFER in request.waits_for:
            return Offer(request, 0)
        if request.num_offered_blocks:
            request.num_offered_blocks = 0
            self._receives.cancel_remote(request)
        else:
            self.num_dropped += 1
        return None


class KvSendTracker:
    """Publishes final blocks of wanted sequences, each once; no block is published before `Want`.

    A prefill that ends before `Want` *rests*: its blocks are released, so they are cached and later reused. `Want` usually follows
    soon, so the block table is kept without references: if no block that is wanted has been reused when it arrives, all of them are
    published without computing again; otherwise `Missed` is sent. What another worker looks up in the prefix cache rests as well,
    and so does a sequence that another worker continues.
    """

    def __init__(self, kv: KVCacheManager, holds: PinTracker, connector: KvOutbox) -> None:
        self._kv = kv
        self._holds = holds
        self._connector = connector
        self._resting: dict[str, RestingTable] = {}
        self.device_event: DeviceEvent | None = None
        """On a GPU, the event of the last step; every final block was written before it."""

    def rest(self, request: Request) -> None:
        """Release the blocks of a sequence that ended before `Want`, but keep its table. `forget` follows when its transfer
        ends."""
        self._resting[request.request_id] = self._kv.rest(request)

    def migrate(self, request: Request) -> Migration:
        """Let the blocks of a sequence that another worker continues rest for that. `forget` follows when its transfer ends."""
        migration = self._kv.migration(request, without_draft_head=request.migrations[request.index])
        request.num_given_tokens = migration.num_tokens
        request.core = msgspec.structs.replace(request.core, without_draft_head=migration.without_draft_head)
        self.rest(request)
        self._connector.send(Migrating(request.request_id, request.core.request_id, request.index, migration))
        return migration

    def lookup(self, event: Lookup) -> None:
        """Look up blocks for another worker, and keep where they are: who never asks for them pins nothing. A repetition gets the
        same answer, since what is published belongs to the first."""
        table = self._resting.get(event.request_id) or self._kv.find_resting(event.block_hashes)
        if table.order.num_places:
            self._resting[event.request_id] = table
        self._connector.send(Found(event.request_id, table.order.num_places))

    def forget(self, request_id: str) -> bool:
        """Drop the table of a transfer that has ended; False if it has none that rests."""
        return self._resting.pop(request_id, None) is not None

    def want_ended(self, request_id: str, first_index: int) -> bool:
        """Handle `Want` for a resting table: publish what is wanted if it is unchanged, else send `Missed`.

        False if there is none: it was published before, or its transfer has ended.
        """
        if (table := self._resting.pop(request_id, None)) is None:
            return False
        hold = self._kv.hold_resting(table, first_index)
        if hold is None:
            self._connector.send(Missed(request_id))
        elif len(hold):
            self._settle(request_id, first_index, hold)
        return True

    def want(self, request: Request, first_index: int) -> None:
        """Handle `Want`: the receiver has reserved blocks from `first_index` on. Publishes the blocks that are already final."""
        request.wanted_from = first_index
        self.publish(request)

    def publish(self, request: Request) -> None:
        """Send `Settled` for blocks that became final: full blocks, and the partial last one at the prompt's end."""
        if request.wanted_from is None:
            return
        computed = min(request.num_computed_tokens, request.num_given_tokens)
        final = computed // self._kv.block_size
        if computed == request.num_given_tokens:
            final = -(-computed // self._kv.block_size)
        order = self._kv.transfer_order(request)
        first, end = max(request.num_settled_blocks, request.wanted_from), order.number(final)
        if end > first:
            request.num_settled_blocks = end
            self._settle(request.request_id, first, self._kv.hold_places(request, order.blocks(first, end)))

    def _settle(self, request_id: str, first_index: int, hold: PinnedBlocks) -> None:
        self._connector.send(Settled(request_id, first_index, self._holds.out(hold), self.device_event))
