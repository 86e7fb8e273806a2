"""`Preemption`: frees blocks for a sequence, by taking those of the sequences that lose least work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.common.request.engine_types import EngineCoreEventType
from pdserve.engine.kv_cache.kv_cache_coordinator import Room
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request, RequestStatus
from pdserve.engine.scheduler.running_batch import BatchBuilder, RunningBatch
from pdserve.engine.scheduler.waiting.waiting_queues import WaitingQueues


@dataclass(eq=False)
class Preemption:
    """Preempts and evicts. A preempted sequence is computed again here; an evicted one is placed again by the router."""

    _kv: KVCacheManager
    _running: RunningBatch
    _waiting: WaitingQueues
    _evict: Callable[[Request], bool]
    """Ends a sequence that waits for remote KV in favour of its argument, a running sequence; returns True if blocks will be
    returned."""
    num_preemptions: int = field(default=0, init=False)

    def make_room(self, step: BatchBuilder, request: Request, room: Room) -> list[list[int]] | None:
        """Allocate blocks for a running sequence, and preempt others as needed.

        Sources that run ahead lose their blocks first, then sequences that wait for remote KV, then running ones. None if the
        sequence itself was preempted, or if blocks of an evicted one will be returned.
        """
        while (added := self._kv.allocate_slots(request, room)) is None:
            victim = self._running.victim()
            runs_ahead = victim is not None and victim.is_unwanted_source
            if not runs_ahead and self._evict(request):
                step.preempted = True
                return self._kv.allocate_slots(request, room)
            if victim is None:
                # only wanted sources run, and are never preempted: the sequence continues when one of them ends, or has freed
                # blocks that both share
                step.preempted = True
                return None
            self._preempt(step, victim)
            if victim is request:
                return None
        return added

    def give_way(self, step: BatchBuilder) -> bool:
        """Preempt every running source without `Want`; returns True if there was one."""
        unwanted = self._running.unwanted_sources()
        for request in unwanted:
            self._preempt(step, request)
        return bool(unwanted)

    def _preempt(self, step: BatchBuilder, request: Request) -> None:
        step.unschedule(request)
        self._running.leave(request)
        self.lose_blocks(request)

    def lose_blocks(self, request: Request) -> None:
        """Preempt a running sequence that is not scheduled in this step; it waits for blocks, to be computed again."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.note(EngineCoreEventType.PREEMPTED)
        self._kv.free(request)
        request.num_computed_tokens = 0
        request.move_to(RequestStatus.PREEMPTED)
        self._waiting.add_preempted(request)
