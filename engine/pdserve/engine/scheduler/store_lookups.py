"""`StoreLookups`: questions to a store that other workers share, which of a request's blocks it has.

    arrival --begin--> WAITING_FOR_REMOTE_KVS --ended, overdue--> WAITING

Only such a store needs them: the books have what any other one has (`StoreTier`). A request waits for its lookup before it enters a
queue, and what was found enters the books. A lookup always ends by itself; while one is late or was not answered, none begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pdserve.common import clock
from pdserve.engine.kv_cache.store_tier import StoreTier
from pdserve.engine.request import Request, Wait
from pdserve.engine.scheduler.read_times import ReadTimes
from pdserve.engine.scheduler_output import LookupEnd

MAX_NAMES = 4096
"""Names in one lookup: 65,536 tokens in blocks of 16, with one KV cache group."""
SILENT_S = 5.0
"""Seconds without lookups after one that was not answered."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A sequence that waits no longer for a lookup."""

    request: Request


@dataclass(slots=True)
class _Lookup:
    request: Request | None
    """None after its sequence ended, or has waited long enough."""
    names: Sequence[bytes]
    began_at: float = 0.0
    """`clock.monotonic()` seconds, once it is in a `SchedulerOutput`."""


@dataclass(eq=False)
class StoreLookups:
    """One scheduler's."""

    _store: StoreTier | None
    _ids: Iterator[int]
    """Of lookups, loads and writes."""
    _lookups: dict[int, _Lookup] = field(default_factory=dict, init=False)
    """Under way, by copy id."""
    _by_request: dict[str, int] = field(default_factory=dict, init=False)
    _times: ReadTimes = field(default_factory=ReadTimes, init=False)
    _begun: list[int] = field(default_factory=list, init=False)
    """Not yet in a `SchedulerOutput`."""
    _late: set[int] = field(default_factory=set, init=False)
    """Under way for longer than a sequence waits."""
    _silent_until: float = field(default=0.0, init=False)

    def __len__(self) -> int:
        """Lookups under way, those whose sequence is gone included."""
        return len(self._lookups)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait for one."""
        return len(self._by_request)

    @property
    def is_answered(self) -> bool:
        """False while the store does not answer: a lookup would keep its sequence waiting for nothing."""
        return not self._late and clock.monotonic() >= self._silent_until

    def begin(self, request: Request, names: Sequence[bytes]) -> None:
        """Let a request that is in no queue wait until it is known which of these names the store has."""
        copy_id = next(self._ids)
        self._lookups[copy_id] = _Lookup(request, names[:MAX_NAMES])
        self._by_request[request.request_id] = copy_id
        self._begun.append(copy_id)
        request.wait_for(Wait.LOOKUP)

    def take(self) -> dict[int, list[bytes]]:
        """`SchedulerOutput.kv_lookups`: those that have begun since the last call."""
        begun = {copy_id: self._lookups[copy_id] for copy_id in self._begun}
        self._begun.clear()
        for lookup in begun.values():
            lookup.began_at = clock.monotonic()
        return {copy_id: list(lookup.names) for copy_id, lookup in begun.items()}

    def ended(self, end: LookupEnd) -> list[LookedUp]:
        """Note what the store has; returns the sequence that waited for it, if one still does."""
        lookup = self._lookups.pop(end.copy_id)
        self._late.discard(end.copy_id)
        if self._store is not None and end.is_answered:
            self._times.add(1, clock.monotonic() - lookup.began_at)
            self._store.know(end.found)
            self._store.num_found += len(end.found)
        else:
            self._silent_until = clock.monotonic() + SILENT_S
            if self._store is not None:
                self._store.fell_silent()
        if lookup.request is None:
            return []
        del self._by_request[lookup.request.request_id]
        lookup.request.settle_wait(Wait.LOOKUP)
        return [LookedUp(lookup.request)]

    def overdue(self) -> list[LookedUp]:
        """Sequences that have waited as long as they should; their lookups go on without them."""
        late: list[Request] = []
        latest = clock.monotonic() - self._times.limit_s(1)
        for copy_id in self._by_request.values():  # in the order in which they began
            lookup = self._lookups[copy_id]
            if lookup.request is None or not 0.0 < lookup.began_at < latest:
                break
            self._late.add(copy_id)
            late.append(lookup.request)
        for request in late:
            self.stop(request)
        return [LookedUp(request) for request in late]

    def stop(self, request: Request) -> None:
        """Let a sequence wait no longer. No effect if it waits for no lookup."""
        copy_id = self._by_request.pop(request.request_id, None)
        if copy_id is None:
            return
        if copy_id in self._begun:
            self._begun.remove(copy_id)
            del self._lookups[copy_id]
        else:
            self._lookups[copy_id].request = None
        request.settle_wait(Wait.LOOKUP)
