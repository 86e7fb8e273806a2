"""`TierLoads`: loads of blocks from host memory and from the store below it, from the search for them to their end.

    WAITING, PREEMPTED --allocate_slots--> WAITING_FOR_REMOTE_KVS --finished--> WAITING, with its blocks
                                                                  --failed, overdue--> as before, without them

A load is a copy that the executor makes during the steps of other sequences. It always ends by itself, but one that reads the store
may fail, or take longer than its sequence should wait. Until its end its blocks are pinned, and so are the slots that it reads: if
its sequence ends or loses its blocks before, they are in quarantine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from pdserve.common import clock
from pdserve.engine.kv_cache.block_pool import PinnedBlocks, PinTracker, with_group_id
from pdserve.engine.kv_cache.host_tier import Slot
from pdserve.engine.kv_cache.kv_cache_coordinator import Room
from pdserve.engine.kv_cache.kv_cache_manager import NO_BLOCKS, KVCacheBlocks, KVCacheManager
from pdserve.engine.request import Request, RequestStatus, Wait
from pdserve.engine.scheduler.read_times import ReadTimes
from pdserve.engine.scheduler.store_lookups import LookedUp, StoreLookups
from pdserve.engine.scheduler_output import CopyEnd, LookupEnd, SchedulerOutput
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
    slots: dict[int, Slot]
    """By number in `names`, of the blocks that host memory has; the store has the others."""
    num_in_host: int
    """Blocks of the sequence that host memory has, without those in the pool."""
    num_stored: int
    """Blocks of the sequence of which the store has a part."""
    was_preempted: bool
    began_at: float = 0.0
    """`clock.monotonic()` seconds, of a load that reads the store."""

    @property
    def stored_names(self) -> list[bytes]:
        """Of the blocks that are read from the store."""
        return [name for number, name in enumerate(self.names) if number not in self.slots]


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """A sequence that gets no blocks from a load, after all."""

    request: Request
    was_preempted: bool


@dataclass(frozen=True, slots=True)
class InTiers:
    """Blocks of a sequence after those that the pool has; a tier or the pool has each of them."""

    num_blocks: int = 0
    """Places in each KV cache group."""
    names: tuple[bytes, ...] = ()
    """Names of the blocks to load, by which the tiers find them."""
    places: tuple[tuple[int, int], ...] = ()
    """(KV cache group, place) of each."""
    blocks: KVCacheBlocks = NO_BLOCKS
    """From the sequence's first one on; None for those to load."""
    num_stored: int = 0
    """Of the places, those of which only the store has a block."""

    def __len__(self) -> int:
        return self.num_blocks


NOT_IN_TIERS = InTiers()


@dataclass(eq=False)
class TierLoads:
    """One scheduler's."""

    _kv: KVCacheManager
    _holds: PinTracker
    _compute_s: Callable[[int], float | None]
    """Seconds that so many prompt tokens take to compute here; None if it is not known."""
    _loads: dict[int, Load] = field(default_factory=dict, init=False)
    """Under way, by `Load.load_id`."""
    _by_request: dict[str, Load] = field(default_factory=dict, init=False)
    _begun: list[Load] = field(default_factory=list, init=False)
    """Not yet in a `SchedulerOutput`."""
    _names: Counter[bytes] = field(default_factory=Counter, init=False)
    """Names of blocks that are loaded for sequences that wait for them."""
    _copy_ids: Iterator[int] = field(default_factory=lambda: count(1), init=False)
    """Of loads and writes."""
    _read_times: ReadTimes = field(default_factory=ReadTimes, init=False)
    _overdue: set[int] = field(default_factory=set, init=False)
    """Loads under way that read the store for longer than a sequence waits."""
    lookups: StoreLookups = field(init=False)
    num_parked: int = field(default=0, init=False)
    """Number of sequences that wait only for a load, with those that will be forked from them; each will need further blocks."""

    def __post_init__(self) -> None:
        self._tier = self._kv.pool.tier
        self._store = self._kv.pool.store
        self.lookups = StoreLookups(self._store, self._copy_ids)

    def __len__(self) -> int:
        """Loads under way, those whose sequence is gone included."""
        return len(self._loads)

    @property
    def has_copies(self) -> bool:
        """True if a load, a lookup or a write is under way, or a write has to begin: steps end and begin them."""
        return self.has_waiting or (self._store is not None and self._store.has_writes)

    @property
    def has_waiting(self) -> bool:
        """True if a load or a lookup is under way, for which sequences may wait."""
        return bool(self._loads) or len(self.lookups) > 0

    @property
    def requests(self) -> list[Request]:
        """Sequences that wait for a load."""
        return [load.request for load in self._by_request.values() if load.request is not None]

    @property
    def num_local(self) -> int:
        """Number of sequences that wait only for a load or a lookup, not also for remote KV."""
        num_loading = sum(Wait.REMOTE_KV not in request.waits_for for request in self.requests)
        return num_loading + self.lookups.num_waiting

    def find(self, request: Request, computed: KVCacheBlocks, limit_tokens: int, *, uses_store: bool = True) -> InTiers:
        """The longest run of blocks after those of `computed` that the tiers have, over at most `limit_tokens` tokens. One block in
        host memory is worth a load: it takes less time than to compute the block's tokens again. What the store adds is worth it if
        it was read faster lately than it can be computed.

        With several KV cache groups each block may be in the pool or in a tier, and of groups with a window it is one that the
        next token sees. uses_store: False for what cannot do without a block after it was found.
        """
        if self._tier is None or request.skip_reading_prefix_cache:
            return NOT_IN_TIERS
        hashes = request.block_hashes[: limit_tokens // self._kv.block_size]
        if self._store is None or not uses_store or self._overdue:
            return self._run(hashes, computed, self._tier.__contains__)
        with_store = self._run(hashes, computed, self._is_in_tiers)
        if not with_store.num_stored:
            return with_store
        in_host = self._run(hashes, computed, self._tier.__contains__)
        num_blocks = self._num_stored_blocks(with_store)
        return with_store if self._is_worth(num_blocks, len(with_store) - len(in_host)) else in_host

    def _is_worth(self, num_blocks: int, num_places: int) -> bool:
        """True unless blocks take longer to read from the store than the tokens of `num_places` blocks to compute."""
        read_s = self._read_times.expected(num_blocks)
        compute_s = self._compute_s(num_places * self._kv.block_size)
        return read_s is None or compute_s is None or read_s < compute_s

    def begin_lookup(self, request: Request) -> None:
        """Let a new request wait for what a shared store has of its blocks, if nothing here tells and the store answers."""
        core = request.core
        if self._store is None or not self._store.is_shared or core.fetches_only or request.skip_reading_prefix_cache:
            return
        if self._overdue or not self.lookups.is_answered:
            return
        hashes = request.block_hashes[: (request.num_tokens - 1) // self._kv.block_size]
        names = (with_group_id(block_hash, group) for block_hash in hashes for group in range(self._kv.num_groups))
        unknown = [name for name in names if self._kv.pool.find(name) is None and not self._is_in_tiers(name)]
        if unknown and self._is_worth(len(unknown), -(-len(unknown) // self._kv.num_groups)):
            self.lookups.begin(request, unknown)

    def _is_in_tiers(self, name: bytes) -> bool:
        return (self._tier is not None and name in self._tier) or (self._store is not None and name in self._store)

    def _num_stored_blocks(self, in_tiers: InTiers) -> int:
        return sum(self._tier is None or name not in self._tier for name in in_tiers.names)

    def _run(self, hashes: Sequence[bytes], computed: KVCacheBlocks, is_known: Callable[[bytes], bool]) -> InTiers:
        """hashes: of the sequence's first blocks. is_known: says if a tier has a name."""
        if self._kv.num_groups > 1 or self._kv.coordinator.has_states:
            return self._run_in_groups(hashes, computed, is_known)
        first = len(computed)
        hashes = hashes[first:]
        num_found = next((place for place, known in enumerate(hashes) if not is_known(known)), len(hashes))
        if not num_found:
            return NOT_IN_TIERS
        places = tuple((0, place) for place in range(first, first + num_found))
        [known] = computed.blocks or ((),)
        extended = KVCacheBlocks(((*known, *[None] * num_found),))
        return self._in_tiers(num_found, tuple(hashes[:num_found]), places, extended)

    def _in_tiers(
        self, num_blocks: int, names: tuple[bytes, ...], places: tuple[tuple[int, int], ...], blocks: KVCacheBlocks
    ) -> InTiers:
        stored = set()
        if self._store is not None:
            stored = {place for name, (_, place) in zip(names, places, strict=True) if name not in (self._tier or ())}
        return InTiers(num_blocks, names, places, blocks, len(stored))

    def _run_in_groups(
        self, hashes: Sequence[bytes], computed: KVCacheBlocks, is_known: Callable[[bytes], bool]
    ) -> InTiers:
        found = computed.blocks or ((),) * self._kv.num_groups
        if len(hashes) <= len(computed):
            return NOT_IN_TIERS
        blocks = self._kv.coordinator.extended(hashes, found, is_known)
        places = tuple(
            (group, place) for group, table in enumerate(blocks) for place, block in enumerate(table) if block is None
        )
        if not places:
            return NOT_IN_TIERS
        names = tuple(with_group_id(hashes[place], group) for group, place in places)
        extended = KVCacheBlocks(blocks)
        return self._in_tiers(len(extended) - len(computed), names, places, extended)

    def is_loading(self, in_tiers: InTiers) -> bool:
        """True if another sequence loads one of these blocks: it is soon in the pool, for all."""
        return any(name in self._names for name in in_tiers.names)

    def allocate_slots(
        self,
        request: Request,
        room: int | Room,
        computed: KVCacheBlocks,
        keep_free: BlockCounts | None,
        in_tiers: InTiers,
    ) -> list[list[int]] | None:
        """As `KVCacheManager.allocate_slots`; begins to load the blocks after `computed`, if there are any.

        in_tiers: the result of `find`, in this step.
        """
        if self._tier is None or not in_tiers:
            return self._kv.allocate_slots(request, room, computed, keep_free)
        numbers = [number for number, name in enumerate(in_tiers.names) if name in self._tier]
        # blocks that are given up for this sequence need slots themselves
        slots = self._tier.pin([in_tiers.names[number] for number in numbers])
        added = self._kv.allocate_slots(request, room, in_tiers.blocks, keep_free, num_known=len(computed))
        if added is None:
            self._tier.unpin(slots)
            return None
        load = Load(
            next(self._copy_ids),
            request,
            len(computed) + len(in_tiers),
            self._holds.out(self._kv.hold_places(request, in_tiers.places)),
            in_tiers.names,
            dict(zip(numbers, slots, strict=True)),
            len(in_tiers) - in_tiers.num_stored,
            in_tiers.num_stored,
            request.status is RequestStatus.PREEMPTED,
        )
        self._loads[load.load_id] = self._by_request[request.request_id] = load
        self._begun.append(load)
        self._names.update(in_tiers.names)
        self.num_parked += _num_parked(request)
        return added

    def count_lookup(self, num_queried_tokens: int) -> None:
        """Statistics of host memory, once per admission. num_queried_tokens: those that the pool did not have."""
        if self._tier is not None:
            self._tier.num_queried_tokens += num_queried_tokens

    def _count_hits(self, load: Load) -> None:
        """Statistics of the load of a sequence's first admission."""
        if load.was_preempted:
            return
        if self._tier is not None:
            self._tier.num_hit_tokens += load.num_in_host * self._kv.block_size
        if self._store is not None:
            self._store.num_hit_tokens += load.num_stored * self._kv.block_size

    def fill(self, output: SchedulerOutput) -> None:
        """Add the copies to and from the tiers that precede a step."""
        if self._tier is None:
            return
        output.kv_stores = self._tier.take_stores()
        if self._store is not None:
            output.kv_clear = self._store.take_clear()
            output.kv_writes = self._store.take_writes(self._copy_ids)
            output.kv_lookups = self.lookups.take()
        for load in self._begun:
            rows = load.hold.rows
            output.kv_loads[load.load_id] = pairs_by_shape(
                self._kv.pool.num_shapes, ((shape, slot, rows[number]) for number, (shape, slot) in load.slots.items())
            )
            self._tier.num_loaded += len(load.slots)
            if load.num_stored:
                load.began_at = clock.monotonic()
                output.kv_reads[load.load_id] = [
                    (name, load.hold.shapes[number], rows[number])
                    for number, name in enumerate(load.names)
                    if number not in load.slots
                ]
        self._begun.clear()

    def finished(self, ends: Iterable[CopyEnd | LookupEnd]) -> list[Request | NotLoaded | LookedUp]:
        """Apply the end of loads, lookups and writes; returns the sequences that waited for them: those whose blocks are now in the
        prefix cache, those whose blocks have to be found again, or computed, and those of which it is known what the store has."""
        waited: list[Request | NotLoaded | LookedUp] = []
        for end in ends:
            if isinstance(end, LookupEnd):
                waited += self.lookups.ended(end)
                continue
            if self._store is not None and self._store.is_writing(end.copy_id):
                self._kv.pool.forget_stored(self._store.wrote(end.copy_id, end.lost))
                continue
            load = self._loads[end.copy_id]
            request = load.request
            self._end(load)
            is_whole = self._read(load, end)
            if request is None:
                continue
            self._forget(request)
            if not is_whole:
                waited.append(NotLoaded(request, load.was_preempted))
                continue
            self._count_hits(load)
            self._kv.remember_loaded(request, load.num_blocks)
            request.num_computed_tokens = load.num_blocks * self._kv.block_size
            waited.append(request)
        return waited

    def _read(self, load: Load, end: CopyEnd) -> bool:
        """Note what has become of a load's reads; True if it has all of its blocks."""
        self._overdue.discard(load.load_id)
        if self._store is None or not load.num_stored:
            return True
        names = load.stored_names
        self._read_times.add(len(names), clock.monotonic() - load.began_at)
        if end.is_whole:
            self._store.num_read += len(names)
        else:
            # of other ranks it is only known that they lack some
            self._kv.pool.forget_stored(self._store.failed(end.lost or names))
        return end.is_whole

    def overdue(self) -> list[NotLoaded | LookedUp]:
        """Sequences that have waited for the store as long as they should; their loads and lookups go on without them. Until these
        have ended, the store is not read."""
        return [*self._overdue_loads(), *self.lookups.overdue()]

    def _overdue_loads(self) -> list[NotLoaded]:
        if self._store is None or not self._loads:
            return []
        now, waited = clock.monotonic(), []
        for load in self._loads.values():
            if load.began_at and now > load.began_at + self._read_times.limit_s(len(load.names) - len(load.slots)):
                self._overdue.add(load.load_id)
                if load.request is not None:
                    waited.append(NotLoaded(load.request, load.was_preempted))
        for late in waited:
            self.stop(late.request)
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
            self._tier.unpin([*load.slots.values()])

    def check(self) -> None:
        """Check the tiers' books against the copies under way. Raises: TierCorrupt."""
        if self._tier is not None:
            writes = [] if self._store is None else self._store.pins
            loads = (slot for load in self._loads.values() for slot in load.slots.values())
            self._tier.check(Counter([*loads, *writes]))


def _num_parked(request: Request) -> int:
    # one that also receives is counted there
    return 0 if Wait.REMOTE_KV in request.waits_for else request.num_forks + 1
