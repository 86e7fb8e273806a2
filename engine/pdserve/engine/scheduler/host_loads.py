"""`HostLoads`: loads of blocks from the host-memory tier into the pool, from the search for them to their end.

    WAITING, PREEMPTED --allocate_slots--> WAITING_FOR_REMOTE_KVS --finished--> WAITING, with its blocks

A load is a copy that the executor makes during the steps of other sequences. It always ends by itself. Until then its blocks are
pinned, and so are the slots that it reads: if its sequence ends or loses its blocks before, they are in quarantine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdserve.engine.kv_cache.block_pool import PinnedBlocks, PinTracker, with_group_id
from pdserve.engine.kv_cache.host_tier import Slot
from pdserve.engine.kv_cache.kv_cache_coordinator import Room
from pdserve.engine.kv_cache.kv_cache_manager import NO_BLOCKS, KVCacheBlocks, KVCacheManager
from pdserve.engine.request import Request, Wait
from pdserve.engine.scheduler_output import SchedulerOutput
from pdserve.engine.sequence_blocks import BlockCounts, pairs_by_shape


@dataclass(slots=True)
class Load:
    """Blocks of one sequence on their way from the tier."""

    load_id: int
    request: Request | None
    """None after its sequence ended, or lost its blocks."""
    num_blocks: int
    """Blocks of the sequence, from its first, that the pool has when the load has ended."""
    hold: PinnedBlocks
    names: tuple[bytes, ...]
    slots: list[Slot]


@dataclass(frozen=True, slots=True)
class InHost:
    """Blocks of a sequence after those that the pool has; the tier or the pool has each of them."""

    num_blocks: int = 0
    """Places in each KV cache group."""
    names: tuple[bytes, ...] = ()
    """Names of the blocks to load, by which the tier finds them."""
    places: tuple[tuple[int, int], ...] = ()
    """(KV cache group, place) of each."""
    blocks: KVCacheBlocks = NO_BLOCKS
    """From the sequence's first one on; None for those to load."""

    def __len__(self) -> int:
        return self.num_blocks


NOT_IN_HOST = InHost()


@dataclass(eq=False)
class HostLoads:
    """One scheduler's."""

    _kv: KVCacheManager
    _holds: PinTracker
    _loads: dict[int, Load] = field(default_factory=dict, init=False)
    """Under way, by `Load.load_id`."""
    _by_request: dict[str, Load] = field(default_factory=dict, init=False)
    _begun: list[Load] = field(default_factory=list, init=False)
    """Not yet in a `SchedulerOutput`."""
    _names: Counter[bytes] = field(default_factory=Counter, init=False)
    """Names of blocks that are loaded for sequences that wait for them."""
    _num_begun: int = field(default=0, init=False)
    num_parked: int = field(default=0, init=False)
    """Number of sequences that wait only for a load, with those that will be forked from them; each will need further blocks."""

    def __post_init__(self) -> None:
        self._tier = self._kv.pool.tier

    def __len__(self) -> int:
        """Loads under way, those whose sequence is gone included."""
        return len(self._loads)

    @property
    def requests(self) -> list[Request]:
        """Sequences that wait for a load."""
        return [load.request for load in self._by_request.values() if load.request is not None]

    @property
    def num_local(self) -> int:
        """Number of sequences that wait only for a load, not also for remote KV."""
        return sum(Wait.REMOTE_KV not in request.waits_for for request in self.requests)

    def find(self, request: Request, computed: KVCacheBlocks, limit_tokens: int) -> InHost:
        """The longest run of blocks after those of `computed` that the tier has, over at most `limit_tokens` tokens. One block is
        worth a load: it takes less time than to compute the block's tokens again.

        With several KV cache groups each block may be in the pool or in the tier, and of groups with a window it is one that the
        next token sees.
        """
        if self._tier is None or request.skip_reading_prefix_cache:
            return NOT_IN_HOST
        first, end = len(computed), limit_tokens // self._kv.block_size
        if self._kv.num_groups > 1 or self._kv.coordinator.has_states:
            return self._find_in_groups(request.block_hashes[:end], computed)
        hashes = request.block_hashes[first:end]
        num_found = next((place for place, known in enumerate(hashes) if known not in self._tier), len(hashes))
        if not num_found:
            return NOT_IN_HOST
        places = tuple((0, place) for place in range(first, first + num_found))
        [known] = computed.blocks or ((),)
        return InHost(num_found, tuple(hashes[:num_found]), places, KVCacheBlocks(((*known, *[None] * num_found),)))

    def _find_in_groups(self, hashes: Sequence[bytes], computed: KVCacheBlocks) -> InHost:
        tier, found = self._tier, computed.blocks or ((),) * self._kv.num_groups
        if tier is None or len(hashes) <= len(computed):
            return NOT_IN_HOST
        blocks = self._kv.coordinator.extended(hashes, found, tier.__contains__)
        places = tuple(
            (group, place) for group, table in enumerate(blocks) for place, block in enumerate(table) if block is None
        )
        if not places:
            return NOT_IN_HOST
        names = tuple(with_group_id(hashes[place], group) for group, place in places)
        extended = KVCacheBlocks(blocks)
        return InHost(len(extended) - len(computed), names, places, extended)

    def is_loading(self, in_host: InHost) -> bool:
        """True if another sequence loads one of these blocks: it is soon in the pool, for all."""
        return any(name in self._names for name in in_host.names)

    def allocate_slots(
        self,
        request: Request,
        room: int | Room,
        computed: KVCacheBlocks,
        keep_free: BlockCounts | None,
        in_host: InHost,
    ) -> list[list[int]] | None:
        """As `KVCacheManager.allocate_slots`; begins to load the blocks after `computed`, if there are any.

        in_host: the result of `find`, in this step.
        """
        if self._tier is None or not in_host:
            return self._kv.allocate_slots(request, room, computed, keep_free)
        slots = self._tier.pin(in_host.names)  # blocks that are given up for this sequence need slots themselves
        added = self._kv.allocate_slots(request, room, in_host.blocks, keep_free, num_known=len(computed))
        if added is None:
            self._tier.unpin(slots)
            return None
        self._num_begun += 1
        hold = self._holds.out(self._kv.hold_places(request, in_host.places))
        load = Load(self._num_begun, request, len(computed) + len(in_host), hold, in_host.names, slots)
        self._loads[load.load_id] = self._by_request[request.request_id] = load
        self._begun.append(load)
        self._names.update(in_host.names)
        self.num_parked += _num_parked(request)
        return added

    def count_lookup(self, num_queried_tokens: int, num_hit_blocks: int) -> None:
        """Statistics of the tier, once per admission. num_queried_tokens: those that the pool did not have."""
        if self._tier is not None:
            self._tier.num_queried_tokens += num_queried_tokens
            self._tier.num_hit_tokens += num_hit_blocks * self._kv.block_size

    def fill(self, output: SchedulerOutput) -> None:
        """Add the copies to and from the tier that precede a step."""
        if self._tier is None:
            return
        output.kv_stores = self._tier.take_stores()
        for load in self._begun:
            output.kv_loads[load.load_id] = pairs_by_shape(
                self._kv.pool.num_shapes,
                ((shape, slot, row) for (shape, slot), row in zip(load.slots, load.hold.rows, strict=True)),
            )
            self._tier.num_loaded += len(load.slots)
        self._begun.clear()

    def finished(self, load_ids: Iterable[int]) -> list[Request]:
        """Apply the end of loads; returns the sequences that waited for them, whose blocks are now in the prefix cache."""
        waited = []
        for load_id in load_ids:
            load = self._loads[load_id]
            request = load.request
            self._end(load)
            if request is not None:
                self._forget(request)
                self._kv.remember_loaded(request, load.num_blocks)
                request.num_computed_tokens = load.num_blocks * self._kv.block_size
                waited.append(request)
        return waited

    def is_waited_for(self, request: Request) -> bool:
        """True if a load for this sequence is under way."""
        return request.request_id in self._by_request

    def stop(self, request: Request) -> bool:
        """Forget a sequence that ends or loses its blocks; its blocks are in quarantine until the load has ended. False, with no
        effect, if it waits for no load."""
        if not self.is_waited_for(request):
            return False
        load = self._forget(request)
        if load in self._begun:
            self._begun.remove(load)
            self._end(load)
        else:
            load.request = None
            self._holds.quarantine(set(load.hold.block_ids))
        return True

    def _forget(self, request: Request) -> Load:
        load = self._by_request.pop(request.request_id)
        self.num_parked -= _num_parked(request)
        self._names -= Counter(load.names)
        return load

    def _end(self, load: Load) -> None:
        del self._loads[load.load_id]
        self._holds.back(load.hold)
        if self._tier is not None:
            self._tier.unpin(load.slots)

    def check(self) -> None:
        """Check the tier's books against the loads under way. Raises: TierCorrupt."""
        if self._tier is not None:
            self._tier.check(Counter(slot for load in self._loads.values() for slot in load.slots))


def _num_parked(request: Request) -> int:
    # one that also receives is counted there
    return 0 if Wait.REMOTE_KV in request.waits_for else request.num_forks + 1
