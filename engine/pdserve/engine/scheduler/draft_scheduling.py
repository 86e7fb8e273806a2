"""`DraftScheduling`: which drafts a step computes, what becomes of them, and how many were confirmed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdserve.common.request.engine_types import SpecDecodingStats
from pdserve.engine.config import EngineConfig
from pdserve.engine.kv_cache.kv_cache_manager import KVCacheManager
from pdserve.engine.request import Request, RequestStatus
from pdserve.engine.scheduler.running_batch import BatchBuilder, RunningBatch
from pdserve.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput


class DraftScheduling:
    """One scheduler's. Drafts never take a token of the step, or a block, that a known token needs."""

    def __init__(self, config: EngineConfig, kv: KVCacheManager, running: RunningBatch) -> None:
        self._config = config
        self._setting = config.speculative_config
        self._kv = kv
        self._running = running
        self._stats = SpecDecodingStats()
        self.forget_history()

    def forget_history(self) -> None:
        """Reset the counters."""
        num_spec_tokens = 0 if self._setting is None else self._setting.num_speculative_tokens
        self._stats = SpecDecodingStats(
            num_spec_tokens=num_spec_tokens, num_accepted_tokens_per_pos=[0] * num_spec_tokens
        )

    @property
    def stats(self) -> SpecDecodingStats | None:
        """Counts since the start; None without speculation."""
        if self._setting is None:
            return None
        return msgspec.structs.replace(
            self._stats, num_accepted_tokens_per_pos=list(self._stats.num_accepted_tokens_per_pos)
        )

    def limit(self, request: Request) -> int:
        """Tokens to draft for a sequence per step, at most."""
        core = request.core
        if self._setting is None or core.transfer_source or core.pooling_params is not None:
            return 0
        if core.mm_features and self._setting.reads_tokens_only:
            return 0
        if self._kv.lacks_draft_entries(request):
            return 0
        limit = self._setting.num_speculative_tokens
        return limit if core.speculative_tokens is None else min(limit, core.speculative_tokens)

    def may_draft(self, request: Request) -> bool:
        """True if the result of a step may have drafts of this sequence."""
        if self._setting is None or not self.limit(request):
            return False
        most = self._setting.disable_by_batch_size
        return most is None or len(self._running) <= most

    def of_step(self, step: BatchBuilder, request: Request) -> list[int]:
        """The drafts of a sequence that a step may compute after its last known token, which is not scheduled yet."""
        drafts, request.spec_token_ids = request.spec_token_ids, []
        if not drafts or request.num_uncomputed_tokens != 1:
            return []
        if request.grammar is not None:
            drafts = drafts[: request.grammar.num_drafts]
        limits = (
            # the step computes one more token than there are drafts, and half of it is left to others
            (self._config.max_num_batched_tokens - len(self._running)) // 2 - step.num_drafts,
            step.budget - len(self._running),
            request.sampling_params.output_limit - request.num_output_tokens - 1,
            self._config.max_model_len - request.num_tokens - 1,
            self._kv.num_drafts_in_block(request) if self._kv.has_states else self._num_in_free_blocks(request),
        )
        return drafts[: max(0, min(limits))]

    def _num_in_free_blocks(self, request: Request) -> int:
        """Drafts for which there are blocks that no running sequence is about to need."""
        counts = self._kv.pool.available, self._kv.num_blocks_missing(request, request.num_tokens), self._kv.per_place
        num_running = len(self._running)
        num_spare = min(
            max(0, available - num_running - missing) // of_place
            for available, missing, of_place in zip(*counts, strict=True)
        )
        num_slots = max(
            self._kv.num_slots(request), self._config.blocks_for(request.num_tokens) * self._config.block_size
        )
        return num_slots + num_spare * self._config.block_size - request.num_tokens

    def count(self, requests: Mapping[str, Request], scheduled: SchedulerOutput, computed: ModelRunnerOutput) -> None:
        """Count the drafts of a step, before its tokens are reported."""
        if not scheduled.scheduled_spec_decode_tokens:
            return
        for req_id, token_ids in zip(computed.req_ids, computed.sampled_token_ids, strict=True):
            if num_drafts := scheduled.num_drafts(req_id):
                request, num_accepted = requests[req_id], len(token_ids) - 1
                self._stats.observe(num_drafts, num_accepted)
                request.num_draft_tokens += num_drafts
                request.num_accepted_tokens += num_accepted

    def update(
        self, requests: Mapping[str, Request], scheduled: SchedulerOutput, drafts: Mapping[str, list[int]]
    ) -> None:
        """Take back the blocks of drafts that were not accepted, after a step, and keep the drafts of the next one."""
        for req_id in scheduled.scheduled_spec_decode_tokens:
            if (request := requests.get(req_id)) is not None:
                self._kv.trim(request, request.num_computed_tokens + 1)
        for req_id, token_ids in drafts.items():
            request = requests.get(req_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                request.spec_token_ids = token_ids[: self.limit(request)]
                if request.grammar is not None:
                    # its masks are computed while the next step is prepared and begins
                    request.grammar.draft(request.spec_token_ids)
