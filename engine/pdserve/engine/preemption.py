"""`Preemption`: room for those that need it, taken from those that lose least by it."""

from __future__ import annotations

from pdserve.common.engine_types import EngineCoreEventType
from pdserve.engine.admission import Admission
from pdserve.engine.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request, RequestStatus
from pdserve.engine.running_batch import RunningBatch
from pdserve.engine.step import Step


class Preemption:
    """A preempted sequence loses its blocks and is computed again."""

    def __init__(self, kv: KVCacheManager, running: RunningBatch, admission: Admission) -> None:
        self._kv = kv
        self._running = running
        self._admission = admission
        self.num_preemptions = 0

    def make_room(self, step: Step, request: Request, num_tokens: int) -> list[int] | None:
        """Allocate for a running sequence, preempting others as needed; None when it was itself the victim."""
        while (added := self._kv.allocate_slots(request, num_tokens)) is None:
            victim = self._running.victim()
            if victim is None:
                return None  # only pinned sources run: it goes on when one of them is done
            self._preempt(step, victim)
            if victim is request:
                return None
        return added

    def give_way(self, step: Step) -> bool:
        """Preempt every running transfer that nobody wants yet; whether there was one."""
        unwanted = self._running.unwanted_sources()
        for request in unwanted:
            self._preempt(step, request)
        return bool(unwanted)

    def _preempt(self, step: Step, request: Request) -> None:
        step.take_out(request)
        self._running.leave(request)
        self.lose_blocks(request)

    def lose_blocks(self, request: Request) -> None:
        """It ran, but has no part in a step: it waits for room, to be computed again."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.note(EngineCoreEventType.PREEMPTED)
        self._kv.free(request)
        request.num_computed_tokens = 0
        request.move_to(RequestStatus.PREEMPTED)
        self._admission.add_preempted(request)
