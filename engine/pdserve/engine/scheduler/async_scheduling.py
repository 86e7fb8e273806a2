"""`AsyncScheduling`: schedules the next step of decoding sequences before the tokens of the step under way are known.

The device then has the next step queued when it ends this one. At most one step is ahead. A step is scheduled ahead only if a full
schedule would do nothing else than continue the sequences that run: none waits that might be admitted, none is preempted, and each
decodes plainly (no grammar, whose mask depends on the token; no drafts, which continue the token; no transfer source, which ends
with its prompt; no sequence that migrates, which ends with its token). A sequence that turns out to have ended has a row in the
step ahead; the row's result is dropped. Its keys and values are written to its own blocks, before anything that is queued later
reads or writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import gt

from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.block_pool import added
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request, RequestStatus
from pdserve.engine.scheduler.draft_scheduling import DraftScheduling
from pdserve.engine.scheduler.running_batch import RunningBatch
from pdserve.engine.scheduler.tier_loads import TierLoads
from pdserve.engine.scheduler.waiting.remote_kv_queue import RemoteKvQueue
from pdserve.engine.scheduler.waiting.waiting_queues import WaitingQueues
from pdserve.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pdserve.engine.sequence_blocks import BlockCounts
from pdserve.engine.structured_outputs.structured_output_manager import StructuredOutputManager


@dataclass(frozen=True, slots=True)
class _Refused:
    """State after a full schedule: sequences that waited then need not be tried again before a part of it changes."""

    num_inserted: int
    num_unreserved: int
    num_running: int
    available: BlockCounts


@dataclass(eq=False)
class AsyncScheduling:
    """One scheduler's."""

    _config: EngineConfig
    _kv: KVCacheManager
    _running: RunningBatch
    _waiting: WaitingQueues
    _receives: RemoteKvQueue
    _loads: TierLoads
    _grammars: StructuredOutputManager
    _drafts: DraftScheduling
    _refused: _Refused | None = field(default=None, init=False)

    def scheduled(self, *, has_tried_all: bool) -> None:
        """Note that a full schedule has just been made. has_tried_all: False if the next may admit what this one has not tried."""
        self._refused = self._state() if has_tried_all else None

    def _state(self) -> _Refused:
        return _Refused(
            self._waiting.num_inserted, self._receives.num_unreserved, len(self._running), self._kv.pool.available
        )

    def next_step(self, under_way: SchedulerOutput) -> SchedulerOutput | None:
        """The step after `under_way`, whose results are not known; None if it must wait for them.

        Allocates blocks. The runner gets it before the results of `under_way` are applied.
        """
        if len(self._grammars) or self._kv.has_copies or self._may_admit():
            return None
        continuing = []
        for request in self._running.values():
            num_tokens = under_way.num_scheduled_tokens.get(request.request_id)
            if num_tokens != request.num_uncomputed_tokens or not _decodes_plainly(request):
                return None
            if self._drafts.may_draft(request):
                return None
            if not self._ends_by_length(request):
                continuing.append(request)
        if not 0 < len(continuing) <= self._config.max_num_batched_tokens:
            return None
        rooms = [request.num_tokens + 1 for request in continuing]
        missing = added(*map(self._kv.num_blocks_missing, continuing, rooms))
        if not self._kv.pool.has(missing):
            return None
        step = SchedulerOutput(finished_req_ids=self._running.take_finished_ids())
        for request, room in zip(continuing, rooms, strict=True):
            step.num_scheduled_tokens[request.request_id] = 1
            # a state that moves along to the next place takes no block
            if not self._kv.has_room(request, room) and (rows := self._kv.allocate_slots(request, room)):
                step.scheduled_cached_reqs.new_block_ids[request.request_id] = rows
        self._loads.fill(step)
        return step

    def _may_admit(self) -> bool:
        """True if a full schedule might give blocks or a place to a sequence that does not run."""
        if not len(self._waiting) and not self._receives.num_unreserved:
            return False
        is_full = len(self._running) >= self._config.max_num_seqs
        if is_full and not self._receives.num_unreserved:
            return False
        now, then = self._state(), self._refused
        return (
            then is None
            or (now.num_inserted, now.num_unreserved) != (then.num_inserted, then.num_unreserved)
            or now.num_running < then.num_running
            or any(map(gt, now.available, then.available))
            or self._running.encoder.has_refused
        )

    def _ends_by_length(self, request: Request) -> bool:
        """True if the token under way is the sequence's last one, whichever it is."""
        is_last = request.num_output_tokens + 1 >= request.sampling_params.output_limit
        return is_last or request.num_tokens + 1 >= self._config.max_model_len


def _decodes_plainly(request: Request) -> bool:
    core = request.core
    if request.grammar is not None or core.transfer_source or core.pooling_params is not None or request.migrations:
        return False
    return request.num_sequences == 1 and request.status is RequestStatus.RUNNING


def living(
    requests: Mapping[str, Request], launched: Mapping[str, Request], step: SchedulerOutput, computed: ModelRunnerOutput
) -> tuple[SchedulerOutput, ModelRunnerOutput]:
    """A step and its result without sequences that ended, or ended a turn, after it was launched.

    requests: the unfinished ones; launched: those of the step, when it was launched.
    """
    gone = {
        req_id
        for req_id, request in launched.items()
        if requests.get(req_id) is not request or request.status is not RequestStatus.RUNNING
    }
    if not gone:
        return step, computed
    kept = [place for place, req_id in enumerate(computed.req_ids) if req_id not in gone]
    scheduled = {req_id: count for req_id, count in step.num_scheduled_tokens.items() if req_id not in gone}
    drafts = {req_id: of_one for req_id, of_one in step.scheduled_spec_decode_tokens.items() if req_id not in gone}
    living_step = SchedulerOutput(num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens=drafts)
    return living_step, ModelRunnerOutput(
        req_ids=[computed.req_ids[place] for place in kept],
        sampled_token_ids=[computed.sampled_token_ids[place] for place in kept],
        logprobs={number: computed.logprobs[place] for number, place in enumerate(kept) if place in computed.logprobs},
        failed={number: computed.failed[place] for number, place in enumerate(kept) if place in computed.failed},
        failed_requests={req_id: error for req_id, error in computed.failed_requests.items() if req_id not in gone},
        failed_loras=computed.failed_loras,
        draft_token_ids={req_id: of_one for req_id, of_one in computed.draft_token_ids.items() if req_id not in gone},
        held_back=[req_id for req_id in computed.held_back if req_id not in gone],
        compute_s=computed.compute_s,
        stats=computed.stats,
    )
