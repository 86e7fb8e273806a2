"""`RemoteKvQueue`: sequences whose KV comes from another worker, from reservation to the moment they can run.

    unreserved --reserve--> receiving --landed, finished, holds back, loaded--> ready
        |                       |
        +------- stop ----------+------- fail

Blocks that the host-memory tier has are loaded from there instead of received. Sequences in this queue cost a step nothing, since
only events change them.

A sequence with a `block_source` is admitted as others are, and then comes here with `fetch`: the blocks that its source has offered
are received, and the rest of its prompt is computed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from pdserve.common import clock
from pdserve.common.device_event import DeviceEvent
from pdserve.common.errors import DigestMismatch, Evicted, TransferFailed
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.common.transfer_order import TransferOrder
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.block_pool import PinTracker, added
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request
from pdserve.engine.scheduler.kv_messages import (
    KvOutbox,
    Landed,
    ReceiveFailed,
    ReceiveInto,
    SourceFinished,
    StopReceiving,
)
from pdserve.engine.scheduler.tier_loads import TierLoads
from pdserve.engine.scheduler.waiting.refused_admissions import RefusedAdmissions
from pdserve.engine.scheduler.waiting.starvation_guard import RequestQueue, StarvationGuard
from pdserve.engine.sequence_blocks import BlockCounts

GROWTH_TOKENS = 128
"""Tokens by which sequences are expected to grow while the KV of another one arrives and is used."""
RETURNS_WITHIN_S = 1.5
"""Seconds for which a step waits for the blocks of an evicted sequence; reads that take longer may never end."""
Ready = tuple[Request, tuple[int, ...]]
"""A request whose KV has landed, with the first token of each of its sequences, sampled at the source."""


@dataclass(slots=True)
class Receive:
    """One sequence whose blocks are being received."""

    request: Request
    order: TransferOrder
    num_places: int
    """Places from the first whose blocks were in the prefix cache here, are loaded from the host-memory tier, or are outside the
    window."""
    num_tokens: int
    """Tokens whose blocks are here when all have landed."""
    num_blocks: int
    """Blocks to receive, the partial last one included."""
    held: set[int]
    """Block ids the transfer may still write."""
    num_landed: int = 0
    finished: SourceFinished | None = field(default=None)

    @property
    def first_index(self) -> int:
        """Number of the first block to receive."""
        return self.order.number(self.num_places)

    @property
    def is_fetch(self) -> bool:
        """True if only a part of the prompt comes."""
        return not self.request.core.remote_prefill

    @property
    def first_hash(self) -> bytes:
        """Of a fetch: of its first block."""
        return self.request.block_hashes[self.num_places]

    @property
    def is_complete(self) -> bool:
        return self.finished is not None and self.num_landed >= self.num_blocks and not self.held


class RemoteKvQueue:
    """The receiving side of transfers, inside the scheduler."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        holds: PinTracker,
        connector: KvOutbox,
        starvation: StarvationGuard,
        loads: TierLoads,
    ) -> None:
        self._config = config
        self._kv = kv
        self._holds = holds
        self._connector = connector
        self._starvation = starvation
        self._loads = loads
        self._unreserved = starvation.watch(RequestQueue())
        self._refused = RefusedAdmissions(config, kv)
        self._receiving: dict[str, Receive] = {}
        self._fetched: set[bytes] = set()
        """Hash of the first block of each fetch."""
        self.num_fetch_tokens = 0
        """Tokens whose blocks `fetch` asked for."""
        self.num_fetched_tokens = 0
        """Those whose blocks came."""
        self.num_received_tokens = 0
        """Tokens whose blocks came from the source of a sequence that is not computed here."""
        self._unsent: dict[str, ReceiveInto] = {}
        """Reserved in this step: their blocks may still be copied to the host-memory tier."""
        self.num_parked = 0
        """Number of sequences that hold blocks in this queue; each will need further blocks."""
        self.launched_event: DeviceEvent | None = None
        """On a GPU, the event of the last launched step. No later step writes a block that is free now."""
        self._room_expected_until = 0.0
        """Time until which blocks of an evicted sequence are expected, `clock.monotonic()` seconds."""

    def __len__(self) -> int:
        return len(self._unreserved) + len(self._receiving)

    @property
    def num_unreserved(self) -> int:
        return len(self._unreserved)

    def add(self, request: Request) -> None:
        self._unreserved.insert(request)

    def cancel_remote(self, request: Request) -> None:
        """Stop receiving a sequence that is computed here instead."""
        self._connector.send(StopReceiving(request.request_id))

    def reserve(self, running: Collection[Request], num_ready: int) -> None:
        """Reserve blocks in the queue's order, passing over at most `look_ahead` sequences that do not fit yet.

        running: sequences of the batch. num_ready: number of further ones that hold blocks and are not received; a block per group
        is kept free for each. While another sequence holds blocks, one is placed only where all of them, and itself, have room for
        `GROWTH_TOKENS` further tokens, or as many as they may have: otherwise one of them would soon take the blocks of another,
        whose KV would be computed or moved again.
        """
        if not self._unreserved:
            return
        others = (*running, *(receive.request for receive in self._receiving.values()))
        growth = added(self._kv.places(num_ready), *map(self._growth, others))
        has_others = bool(running or num_ready or self._receiving)
        for request in self._unreserved.first(self._config.look_ahead + 1):
            if self._starvation.must_wait(request):
                continue
            own_growth = self._growth(request, request.num_given_tokens)
            keep_free = added(growth, own_growth) if has_others else None
            if self._refused.still_lacks_room(request, keep_free):
                continue
            computed = self._kv.get_blocks_to_keep(request, request.num_given_tokens)
            # the rest is received meanwhile, so no block may turn out to be missing
            in_tiers = self._loads.find(request, computed, request.num_given_tokens, uses_store=False)
            if self._loads.is_loading(in_tiers):
                continue
            num_places = len(computed) + len(in_tiers)
            room = self._loads.allocate_slots(request, request.num_given_tokens, computed, keep_free, in_tiers)
            if room is None:
                self._refused.add(request)
                continue
            self._unreserved.remove(request)
            self._refused.forget(request)
            self._starvation.placed(request)
            num_in_pool = 0 if computed.is_null else len(computed) * self._config.block_size
            self._kv.count_lookup(request, num_in_pool)
            self._loads.count_lookup(request.num_given_tokens - num_in_pool)
            num_cached = num_places * self._config.block_size if in_tiers else num_in_pool
            request.found_cached(CachedTokens(pool=num_in_pool, host=num_cached - num_in_pool))
            self._kv.expect_received(request)
            order = self._kv.transfer_order(request)
            self._receive(request, order, num_places, request.num_given_tokens)
            growth, has_others = added(growth, own_growth), True

    def _receive(self, request: Request, order: TransferOrder, num_places: int, num_tokens: int) -> Receive:
        """Receive the blocks after the first `num_places` places into the sequence's tables."""
        request.mark("kv_reserved")
        first = order.number(num_places)
        hold = self._holds.out(self._kv.hold_places(request, order.blocks(first, len(order))))
        receive = Receive(request, order, num_places, num_tokens, len(hold), set(hold.block_ids))
        self._receiving[request.request_id] = receive
        self.num_parked += request.num_sequences
        self._unsent[request.request_id] = ReceiveInto(request.request_id, first, hold, self.launched_event)
        return receive

    def fetch(self, request: Request, num_places: int) -> None:
        """Receive what the sequence's source has offered after its first `num_places` places. Its tables have room for that."""
        order = self._kv.order_of_blocks(request.num_offered_blocks)
        receive = self._receive(request, order, num_places, order.num_places * self._config.block_size)
        self._fetched.add(receive.first_hash)
        self.num_fetch_tokens += self._num_coming(receive)

    def _num_coming(self, receive: Receive) -> int:
        """Tokens of the blocks that a transfer brings."""
        return max(0, receive.num_tokens - receive.num_places * self._config.block_size)

    def is_fetching(self, block_hash: bytes) -> bool:
        """True if a fetch begins with this block: it is soon in the pool, for all."""
        return block_hash in self._fetched

    @property
    def fetching(self) -> list[Request]:
        """Sequences that receive only a part of their prompt."""
        return [receive.request for receive in self._receiving.values() if receive.is_fetch]

    def _growth(self, request: Request, num_given: int | None = None) -> BlockCounts:
        """Blocks that a sequence and those forked from it may take soon. num_given: as of `KVCacheManager.growth`."""
        # and the token that comes with its KV: without room for that, two sequences that are ready may wait for each other
        num_tokens = min(request.num_tokens_within(1 + GROWTH_TOKENS), self._config.max_model_len)
        return added(self._kv.growth(request, num_tokens, num_given), self._kv.places(request.num_forks))

    def send_reserved(self, copied: DeviceEvent | None) -> None:
        """Let the transfer side write into the blocks that `reserve` has reserved, once copies of their former content are queued.

        copied: on a GPU, the event after these, if there are any.
        """
        for message in self._unsent.values():
            self._connector.send(message if copied is None else replace(message, device_event=copied))
        self._unsent.clear()

    @property
    def returns_room(self) -> bool:
        """True if blocks of evicted sequences will be returned after their reads end."""
        return self._holds.num_quarantined > 0 and clock.monotonic() < self._room_expected_until

    def victim(self, taker: Request) -> Request | None:
        """The waiting sequence to evict in favour of a running one: the last in order of priority and arrival.

        None if all have a higher priority than `taker`.
        """
        return max(
            (receive.request for receive in self._receiving.values() if receive.request.priority >= taker.priority),
            key=lambda request: (request.priority, request.arrival),
            default=None,
        )

    def expect_room(self) -> None:
        """Note that a sequence is evicted, so that its blocks will be returned."""
        self._room_expected_until = clock.monotonic() + RETURNS_WITHIN_S

    def expects(self, event: Landed | SourceFinished) -> bool:
        """True if the event concerns a sequence that is being received and is not a repetition."""
        receive = self._receiving.get(event.request_id)
        if receive is None:
            return False
        if isinstance(event, Landed):
            return receive.num_landed < event.num_blocks <= receive.num_blocks
        return receive.finished is None

    def landed(self, request_id: str, num_blocks: int) -> Ready | None:
        """Apply `Landed`; returns the request if that completes it."""
        receive = self._receiving.get(request_id)
        if receive is None:
            return None
        receive.request.mark("kv_first_landed")
        receive.num_landed = num_blocks
        return self._ready(receive)

    def source_finished(self, event: SourceFinished) -> Ready | ReceiveFailed | None:
        """Apply `SourceFinished`; returns the request if that completes it, or a failure if the counts disagree."""
        receive = self._receiving.get(event.request_id)
        if receive is None:
            return None
        request = receive.request
        num_sent, num_sampled = request.core.num_sent_tokens, request.num_sequences
        if receive.is_fetch:
            num_sent, num_sampled = receive.num_tokens, 0
        if event.num_tokens != num_sent or len(event.token_ids) != num_sampled:
            text = (
                f"the source computed {event.num_tokens} tokens and sampled {len(event.token_ids)}, "
                f"{num_sent} tokens and {num_sampled} sequences were asked for"
            )
            return ReceiveFailed(event.request_id, DigestMismatch(text))
        receive.finished = event
        return self._ready(receive)

    def returned(self, request_id: str, block_ids: tuple[int, ...]) -> Ready | None:
        """Apply `HoldReturned`; returns the request if that completes it."""
        receive = self._receiving.get(request_id)
        if receive is None:
            return None
        receive.held.difference_update(block_ids)
        return self._ready(receive)

    def loaded(self, request: Request) -> Ready | None:
        """Apply the end of a sequence's load; returns the request if that completes it."""
        return self._ready(self._receiving[request.request_id])

    def stop(self, request: Request, cause: Exception | None = None) -> None:
        """End a waiting request. Its verified full blocks enter the cache, unless the request digests differed."""
        receive = self._take(request)
        if receive is None:
            self._unreserved.remove(request)
            self._refused.forget(request)
            self._starvation.ended(request)
        else:
            if (unsent := self._unsent.pop(request.request_id, None)) is not None:
                self._holds.back(unsent.hold)
            else:
                self._holds.quarantine(receive.held)
            is_verified = isinstance(cause, Evicted | TransferFailed) and not isinstance(cause, DigestMismatch)
            if is_verified and not self._loads.is_waited_for(request):
                num_places = receive.order.num_complete(receive.first_index + receive.num_landed)
                self._kv.remember_received(request, num_places)
        self._connector.send(StopReceiving(request.request_id))

    def _ready(self, receive: Receive) -> Ready | None:
        request = receive.request
        if not receive.is_complete or receive.finished is None or self._loads.is_waited_for(request):
            return None
        self._take(request)
        request.mark("kv_landed")
        request.num_computed_tokens = receive.num_tokens
        if receive.is_fetch:
            self.num_fetched_tokens += self._num_coming(receive)
        else:
            self.num_received_tokens += self._num_coming(receive)
        self._kv.remember_received(request, receive.order.num_places)
        return request, receive.finished.token_ids

    def _take(self, request: Request) -> Receive | None:
        receive = self._receiving.pop(request.request_id, None)
        if receive is not None:
            self.num_parked -= request.num_sequences
            if receive.is_fetch:
                self._fetched.discard(receive.first_hash)
        return receive
