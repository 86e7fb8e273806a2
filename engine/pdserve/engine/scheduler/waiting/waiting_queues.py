"""`WaitingQueues`: sequences that wait to enter the batch, and the rule that admits them.

Sequences are tried by priority, and within a priority in this order: preempted, ready (KV has landed in their blocks), overdue
(passed too often), sources with `Want` (another worker has reserved blocks for them), other sequences, and sources without `Want`.
`StarvationGuard` decides which sequences block others; ready sequences are never blocked.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from pdserve.common.errors import Evicted, NeedsPrefill, PdServeError
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.kv_cache_coordinator import Room
from pdserve.engine.kv_cache.kv_cache_manager import NO_BLOCKS, KVCacheBlocks, KVCacheManager
from pdserve.engine.request import Request, RequestStatus, Wait
from pdserve.engine.scheduler.running_batch import RunningBatch
from pdserve.engine.scheduler.tier_loads import NOT_IN_TIERS, InTiers, TierLoads
from pdserve.engine.scheduler.waiting.refused_admissions import RefusedAdmissions
from pdserve.engine.scheduler.waiting.remote_kv_queue import RemoteKvQueue
from pdserve.engine.scheduler.waiting.starvation_guard import RequestQueue, StarvationGuard


@dataclass(eq=False)
class AdmissionOrder:
    """Sequences of several queues by priority, those of equal priority in the order of the queues. Iterated once.

    Lists are taken when the order is made; queues may change between two sequences. Only those that are tried cost anything.
    """

    queues: Sequence[Sequence[Request]]
    """Each by priority."""
    ready: Sequence[Request]
    """Sequences that hold blocks; one of the queues."""
    look_ahead: int
    """Number of sequences without room that may be passed by ones that hold no blocks."""
    num_without_room: int = 0
    """Number of sequences that had no room, counted by the caller."""

    def __iter__(self) -> Iterator[Request]:
        tried: set[str] = set()
        for request in heapq.merge(*self.queues, key=attrgetter("priority")):
            if self.num_without_room > self.look_ahead:
                break
            if request.request_id not in tried:  # an overdue sequence is in its own queue, too
                tried.add(request.request_id)
                yield request
        yield from (request for request in self.ready if request.request_id not in tried)


class Refusal(enum.Enum):
    NO_ROOM = "no blocks"
    OTHERS_FIRST = "others have the next room"
    NO_LORA_SLOT = "other adapters have all slots"
    NO_ENCODER_ROOM = "images of others have the room or the step"
    LOADING = "its blocks are being loaded from a tier, or come from another worker"
    RUN_AHEAD = "nobody wants it yet, and the share for such is used up"
    NOTHING_TO_FETCH = "it computes nothing, and what its source has is here"


@dataclass(frozen=True, slots=True)
class Cached:
    """What need not be computed of a sequence's first tokens."""

    blocks: KVCacheBlocks = NO_BLOCKS
    """From the prefix cache."""
    num_tokens: int = 0
    """Tokens that are computed already: those of `blocks`, or of a session's own."""
    in_tiers: InTiers = NOT_IN_TIERS
    num_known: int = 0
    """Tokens with those that are loaded and fetched."""
    is_fetched: bool = False
    """True if the last of them come from the sequence's source."""

    @property
    def is_complete(self) -> bool:
        """True if nothing has to come."""
        return self.num_known == self.num_tokens

    def by_source(self, block_size: int) -> CachedTokens:
        """`num_known` by source, if all of it comes."""
        in_tiers = self.in_tiers
        num_coming = self.num_known - self.num_tokens - len(in_tiers) * block_size
        num_in_store = in_tiers.num_stored * block_size
        return CachedTokens(self.num_tokens, len(in_tiers) * block_size - num_in_store, num_in_store, num_coming)


class WaitingQueues:
    """The scheduler's queues of sequences that do not run."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVCacheManager,
        starvation: StarvationGuard,
        loads: TierLoads,
        receives: RemoteKvQueue,
    ) -> None:
        self._config = config
        self._kv = kv
        self._loads = loads
        self._receives = receives
        self._starvation = starvation
        self._preempted = starvation.preempted
        self._ready = RequestQueue()
        self._wanted = starvation.watch(RequestQueue())
        self._waiting = starvation.watch(RequestQueue())
        # sources without `Want` wait for that, not for blocks, so they are not watched for starvation
        self._unwanted = RequestQueue()
        self._queues = (self._preempted, self._ready, self._wanted, self._waiting, self._unwanted)
        self._refused = RefusedAdmissions(config, kv)
        self._num_tokens: dict[str, int] = {}
        """Sequence id -> its tokens that are counted in `num_waiting_tokens`."""
        self.num_waiting_tokens = 0
        self.idle_sessions: set[str] = set()
        """Ids of sessions that wait for their client's next turn."""
        self.num_inserted = 0
        """Sequences that entered a queue since the start."""

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues)

    @property
    def num_ready(self) -> int:
        """Number of ready sequences and of those that wait for a load: they hold blocks and will need further ones."""
        return len(self._ready) + self._loads.num_parked

    @property
    def num_preempted(self) -> int:
        """Number of preempted sequences."""
        return len(self._preempted)

    def add(self, request: Request) -> None:
        """Insert a sequence by arrival; later arrivals may be in the queue already if its grammar took long to compile."""
        self._count(request)
        if request.is_unwanted_source:
            self._unwanted.insert(request)
        else:
            (self._wanted if request.is_pinned_source else self._waiting).insert(request)

    def add_ready(self, request: Request) -> None:
        self._count(request)
        self._ready.append(request)

    def add_preempted(self, request: Request) -> None:
        self._count(request)
        (self._unwanted if request.is_unwanted_source else self._preempted).prepend(request)

    def wanted(self, request: Request) -> None:
        """Handle `Want` for a waiting source: move it to the queue of wanted sources."""
        if self._unwanted.remove(request):
            (self._wanted if request.status is RequestStatus.WAITING else self._preempted).append(request)

    def remove(self, request: Request) -> None:
        """Remove a sequence from its queue; no effect if it is in none."""
        self.idle_sessions.discard(request.request_id)
        if any(queue.remove(request) for queue in self._queues):
            self.num_waiting_tokens -= self._num_tokens.pop(request.request_id)
            self._starvation.ended(request)
            self._refused.forget(request)

    def _count(self, request: Request) -> None:
        self.num_inserted += 1
        self._num_tokens[request.request_id] = request.num_uncomputed_tokens
        self.num_waiting_tokens += request.num_uncomputed_tokens

    def candidates(self, after_preemption: bool) -> AdmissionOrder:
        """Sequences that this step may try; their number is bounded.

        after_preemption: True if this step preempted a sequence; then only sequences that hold blocks may enter.
        """
        limit, look_ahead = self._config.max_num_seqs + self._config.look_ahead, self._config.look_ahead
        ready = self._ready.first(limit)
        if after_preemption:
            return AdmissionOrder((ready,), ready, look_ahead)
        overdue = [request for request in self._starvation.overdue.first(1) if request.status is RequestStatus.WAITING]
        new = [queue.first(limit) for queue in (self._wanted, self._waiting, self._unwanted)]
        return AdmissionOrder((self._preempted.first(limit), ready, overdue, *new), ready, look_ahead)

    def try_admit(
        self, request: Request, budget: int, running: RunningBatch, num_growing: int
    ) -> int | Refusal | PdServeError:
        """Allocate a sequence's blocks and remove it from its queue.

        num_growing: number of sequences that run or are being received. One block stays free for each of them, and for each ready
        one; if there are any, a prompt of n sequences is admitted only together with n - 1 further blocks. Returns the number of
        tokens to compute in this step, or the reason why it cannot enter, or the error that ends it. A sequence with blocks in the
        tier, or at another worker, gets all blocks of its tokens and waits until those have come; then it is ready.
        """
        if not running.lora_slots.fits(request.core.lora_fingerprint):
            return Refusal.NO_LORA_SLOT
        if request in self._ready:
            return self._admit_ready(request, budget, running)
        if request not in self._preempted and self._kept_waiting_by_others(request):
            return Refusal.OTHERS_FIRST
        num_others, keep_free = num_growing + self.num_ready, None
        if request.core.transfer_source:
            # it has blocks for its whole prompt, but for the states on its way. A wanted source is never preempted; with these the
            # one that was admitted first can always move on
            keep_free = self._kv.state_places(num_others) if num_others and self._kv.has_states else None
        elif num_others:
            keep_free = self._kv.places(num_others + request.num_forks)
        chunk_budget = None if self._config.reserve_whole_prompt else budget
        if self._refused.still_lacks_room(request, keep_free, chunk_budget):
            return Refusal.NO_ROOM
        cached = self._cached(request)
        if self._is_coming(request, cached):
            return Refusal.LOADING
        if request.core.fetches_only and not cached.is_fetched:
            return Refusal.NOTHING_TO_FETCH
        uncached = request.num_tokens - cached.num_known
        lacks_pixels = request.lacks_pixels(request.num_tokens - uncached)
        is_refused = lacks_pixels or self._too_long_for_here(request, uncached)
        if is_refused and not request.core.fetches_only:
            if request.status is RequestStatus.WAITING:
                refusal = NeedsPrefill(f"{uncached} tokens of the prompt are not cached here")
                refusal.uncached_tokens = uncached
                return refusal
            if lacks_pixels:
                return Evicted("images or sound of the prompt would have to be encoded again, and are not here")
            cap = self._config.max_local_prefill_tokens
            return Evicted(f"{uncached} tokens would have to be recomputed here, at most {cap} are")
        chunk = self._kv.chunk(request, cached.num_tokens, self._config.chunk(uncached, budget))
        encoded = running.encoder.plan(request, cached.num_tokens, chunk)
        num_tokens = encoded.num_tokens
        if not num_tokens and cached.is_complete:
            return Refusal.NO_ENCODER_ROOM
        room = self.room(request, cached.num_tokens, num_tokens, cached.blocks)
        if not cached.is_complete:
            # what follows the load is computed when that has ended: a group with a window needs room only for it
            blocks = cached.in_tiers.blocks if cached.in_tiers else cached.blocks
            room = self._kv.room(request, cached.num_known, cached.num_known, blocks)
        if request.is_unwanted_source and not self._may_run_ahead(request, room, running):
            return Refusal.RUN_AHEAD
        if cached.is_fetched:
            request.waits_for.add(Wait.REMOTE_KV)
        if self._loads.allocate_slots(request, room, cached.blocks, keep_free, cached.in_tiers) is None:
            request.waits_for.discard(Wait.REMOTE_KV)
            if not self._kv.has_blocks(request):
                self._refused.add(request)
            return Refusal.NO_ROOM
        self.remove(request)
        self._starvation.placed(request)
        request.num_computed_tokens = cached.num_tokens
        if request.status is RequestStatus.WAITING:
            self._kv.count_lookup(request, cached.num_tokens)
            request.found_cached(cached.by_source(self._config.block_size))
            self._loads.count_lookup(request.num_given_tokens - cached.num_tokens)
        if cached.is_fetched:
            self._receives.fetch(request, len(cached.blocks) + len(cached.in_tiers))
        elif request.num_offered_blocks:
            self._receives.cancel_remote(request)
        request.num_offered_blocks = 0
        if not cached.is_complete:
            request.move_to(RequestStatus.WAITING_FOR_REMOTE_KVS)
            return Refusal.LOADING
        running.encoder.commit(request, encoded)
        return num_tokens

    def room(
        self,
        request: Request,
        num_computed_tokens: int,
        num_scheduled_tokens: int,
        computed: KVCacheBlocks = NO_BLOCKS,
    ) -> Room:
        """Tokens for which a sequence needs blocks in a step that computes `num_scheduled_tokens` after the computed ones.

        computed: cached blocks to begin with, at admission.
        """
        num_tokens = num_computed_tokens + num_scheduled_tokens
        if not self._config.reserve_whole_prompt:
            return (num_tokens,) * self._kv.num_groups
        return self._kv.room(request, num_computed_tokens, num_tokens, computed)

    def _admit_ready(self, request: Request, budget: int, running: RunningBatch) -> int | Refusal:
        num_tokens = self._config.chunk(request.num_uncomputed_tokens, budget)
        num_tokens = self._kv.chunk(request, request.num_computed_tokens, num_tokens)
        encoded = running.encoder.plan(request, request.num_computed_tokens, num_tokens)
        if not encoded.num_tokens:
            return Refusal.NO_ENCODER_ROOM
        room = self.room(request, request.num_computed_tokens, encoded.num_tokens)
        if self._kv.allocate_slots(request, room) is None:
            return Refusal.NO_ROOM
        self.remove(request)
        running.encoder.commit(request, encoded)
        return encoded.num_tokens

    def _cached(self, request: Request) -> Cached:
        """What the prefix cache has of a sequence, then the tiers, then its source."""
        if self._kv.has_blocks(request):
            num_tokens = request.num_computed_tokens  # a session may have kept its own blocks
            return Cached(num_tokens=num_tokens, num_known=num_tokens)
        limit, block_size = request.num_tokens - 1, self._config.block_size
        computed = self._kv.get_computed_blocks(request, limit)
        in_tiers = self._loads.find(request, computed, limit)
        num_known = max(len(computed) + len(in_tiers), request.num_offered_blocks) * block_size
        encoder_prompt = request.core.encoder_prompt
        if encoder_prompt is not None and num_known < encoder_prompt.num_slots:
            return Cached()  # a part of an encoder's prompt is computed with the whole
        if request.num_offered_blocks > len(computed) + len(in_tiers):
            computed = self._kv.get_blocks_to_keep(request, num_known)
            in_tiers = self._loads.find(request, computed, num_known, uses_store=False)
        # pool and tier may have all of it together
        is_fetched = request.num_offered_blocks > len(computed) + len(in_tiers)
        return Cached(computed, len(computed) * block_size, in_tiers, num_known, is_fetched)

    def _is_coming(self, request: Request, cached: Cached) -> bool:
        """True if blocks that the sequence lacks come for another one."""
        if self._loads.is_loading(cached.in_tiers):
            return True
        num_here = len(cached.blocks) + len(cached.in_tiers)
        return cached.is_fetched and self._receives.is_fetching(request.block_hashes[num_here])

    def _kept_waiting_by_others(self, request: Request) -> bool:
        """True if the sequence must wait for a preempted or overdue one, or for a source with `Want` of at least its priority."""
        if self._starvation.must_wait(request):
            return True
        if request.is_pinned_source or request in self._starvation.overdue:
            return False
        wanted = self._wanted.peek()
        return wanted is not None and wanted.priority <= request.priority

    def _too_long_for_here(self, request: Request, uncached: int) -> bool:
        if request.core.transfer_source or request.core.prefill_here:
            return False
        embeds = request.core.prompt_embeds
        if embeds is not None and not embeds.data and uncached > request.num_output_tokens:
            return True  # another worker has the embeddings
        caps = [self._config.max_local_prefill_tokens]
        if request.status is RequestStatus.WAITING:
            # the limit is for new requests; a request that has streamed gains nothing from another worker
            caps.append(request.core.local_prefill_tokens)
        return any(cap is not None and uncached > cap for cap in caps)

    def prefers_local(self, request: Request) -> bool:
        """True if a request that waits for remote KV is cheaper to prefill here.

        True when the cache has a part of its prompt and no more is uncached than `local_prefill_tokens`.
        """
        limit = request.core.local_prefill_tokens
        if limit is None or request.sampling_params.prompt_logprobs is not None:
            return False
        cached = self._cached(request).num_known
        uncached = request.num_given_tokens - cached
        if request.lacks_pixels(cached):
            return False
        return cached > 0 and uncached <= limit and not self._too_long_for_here(request, uncached)

    def _may_run_ahead(self, request: Request, room: Room, running: RunningBatch) -> bool:
        coming = {request.request_id: request for request in (*self._loads.requests, *self._receives.fetching)}
        loaded = [*coming.values(), *self._ready.first(self._config.max_num_seqs)]
        others = [*running.unwanted_sources(), *(other for other in loaded if other.is_unwanted_source)]
        used = sum(map(self._kv.num_blocks, others))
        needed = sum(map(self._config.blocks_for, room))
        return used + needed <= self._config.run_ahead_share * self._config.num_blocks
