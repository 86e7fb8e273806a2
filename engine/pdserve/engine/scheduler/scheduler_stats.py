"""`make_stats`: the state of a scheduler, as its `SchedulerStats`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.common.request.engine_types import SchedulerStats
from pdserve.engine.kv_cache.host_tier import HostTier
from pdserve.engine.kv_cache.store_tier import StoreTier
from pdserve.engine.stats.step_profile import StepProfile

if TYPE_CHECKING:
    from pdserve.engine.scheduler.scheduler import Scheduler


def make_stats(scheduler: Scheduler, profile: StepProfile) -> SchedulerStats:
    """Current statistics; the cost is proportional to the running sequences."""
    pool, waiting, tier = scheduler.pool, scheduler.waiting, scheduler.pool.tier or HostTier()
    store = pool.store or StoreTier(tier)
    slots = scheduler.running.lora_slots
    return SchedulerStats(
        num_running_reqs=len(scheduler.running),
        num_added_reqs=scheduler.num_added,
        num_waiting_reqs=len(waiting) + len(scheduler.grammars),
        num_grammar_reqs=len(scheduler.grammars),
        num_remote_kv_reqs=len(scheduler.receives) + scheduler.loads.num_local,
        num_idle_sessions=len(waiting.idle_sessions),
        num_blocks_total=pool.num_total,
        num_blocks_free=sum(pool.available) - pool.num_cached,
        num_blocks_cached=pool.num_cached,
        num_blocks_in_use=pool.num_in_use,
        num_blocks_quarantined=scheduler.holds.num_quarantined,
        num_preemptions=scheduler.num_preemptions,
        num_waiting_tokens=waiting.num_waiting_tokens + scheduler.running.num_uncomputed_tokens,
        num_computed_prompt_tokens=scheduler.num_computed_prompt_tokens,
        prefill_s=scheduler.prefill_s,
        prefix_cache_queries=scheduler.kv.num_queried_tokens,
        prefix_cache_hits=scheduler.kv.num_hit_tokens,
        num_steps=profile.num_steps,
        num_scheduled_tokens=profile.num_tokens,
        scheduling_s=profile.scheduling_s,
        update_s=profile.update_s,
        num_dropped_events=scheduler.num_dropped_events,
        spec_decoding_stats=scheduler.drafts.stats,
        external_prefix_cache_queries=tier.num_queried_tokens,
        external_prefix_cache_hits=tier.num_hit_tokens,
        peer_prefix_cache_queries=scheduler.receives.num_fetch_tokens,
        peer_prefix_cache_hits=scheduler.receives.num_fetched_tokens,
        num_host_blocks_total=tier.num_slots,
        num_host_blocks_used=tier.num_used,
        num_host_blocks_stored=tier.num_stored,
        num_host_blocks_loaded=tier.num_loaded,
        num_host_blocks_evicted=tier.num_evicted,
        store_prefix_cache_hits=store.num_hit_tokens,
        num_store_blocks=len(store),
        num_store_blocks_written=store.num_written,
        num_store_blocks_found=store.num_found,
        num_store_blocks_read=store.num_read,
        num_store_blocks_failed=store.num_failed,
        num_store_blocks_lost=store.num_lost,
        loaded_loras=tuple(slots.loaded),
        num_lora_loads=slots.num_loads,
        num_lora_evictions=slots.num_evictions,
        num_received_tokens=scheduler.receives.num_received_tokens,
    )
