"""`WorkerMetrics`: a worker's Prometheus metrics. Events are counted when calls end; states are read at the scrape."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from pdserve.common.request.engine_types import SpecDecodingStats
from pdserve.common.telemetry.metrics import LATENCY_BUCKETS_S, Families, by_label
from pdserve.common.worker_identity import WorkerIdentity
from pdserve.worker.engine_client import EngineClient
from pdserve.worker.telemetry.call_stats import CallStats
from pdserve.worker.transfers.transfer_messages import ReceivedBlocks
from pdserve.worker.worker_roles import WorkerRoles

KNOWN_CONNECTORS = ("nixl", "tcp")


class WorkerMetrics:
    """Metrics of one worker."""

    def __init__(
        self,
        registry: CollectorRegistry,
        identity: WorkerIdentity,
        engine: EngineClient,
        roles: WorkerRoles,
    ) -> None:
        def seconds(name: str, meaning: str, *labels: str) -> Histogram:
            return Histogram(name, meaning, labels, buckets=LATENCY_BUCKETS_S, registry=registry)

        def count(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(name, meaning, labels, registry=registry)

        self._block_bytes = identity.layout.mean_block_bytes
        self._stages = {
            "prefill.queue": seconds("pdserve_prefill_queue_seconds", "Waiting for the engine, before a prefill."),
            "prefill.compute": seconds("pdserve_prefill_compute_seconds", "Computing a prompt and its first token."),
            "decode.reserve": seconds("pdserve_decode_reserve_seconds", "Waiting for room for a prompt's KV blocks."),
            "decode.queue": seconds("pdserve_decode_queue_seconds", "Waiting for the engine, with all KV landed."),
            "decode.generate": seconds("pdserve_decode_generate_seconds", "All tokens that this engine sampled."),
        }
        self._transfer = seconds(
            "pdserve_kv_transfer_seconds", "From reserved blocks to the last verified one.", "connector"
        )
        self._transfer_blocks = count("pdserve_kv_transfer_blocks_total", "KV blocks landed, verified.", "connector")
        self._transfer_bytes = count("pdserve_kv_transfer_bytes_total", "Bytes of landed KV blocks.", "connector")
        self._output_tokens = count("pdserve_sampled_tokens_total", "Tokens sampled for routers.")
        self._calls = count("pdserve_calls_total", "Calls of routers, by outcome.", "call", "outcome")
        self._errors = count("pdserve_call_errors_total", "Calls of routers that failed, by cause.", "code")
        registry.register(Families(partial(_state, identity, engine, roles)))

    def call(self, record: CallStats) -> None:
        """Count an ended call."""
        outcome = record.outcome
        self._calls.labels(record.call, outcome).inc()
        if outcome not in ("ok", "cancelled", "needs_prefill"):
            self._errors.labels(outcome).inc()
        self._output_tokens.inc(record.num_output_tokens)
        for stage in record.stages():
            if stage.cause is None and stage.name in self._stages:
                self._stages[stage.name].observe(stage.end - stage.start)
            elif (
                stage.name == "kv.transfer"
                and stage.cause is None
                and record.transfer
                and record.transfer.connector_name
            ):
                self._transfer.labels(record.transfer.connector_name).observe(stage.end - stage.start)
        self.received(record.transfer)

    def received(self, transfer: ReceivedBlocks | None) -> None:
        """Count the blocks that have come from another worker."""
        if transfer is not None and (connector := transfer.connector_name):
            self._transfer_blocks.labels(connector).inc(transfer.num_landed)
            self._transfer_bytes.labels(connector).inc(transfer.num_landed * self._block_bytes)


def _state(identity: WorkerIdentity, engine: EngineClient, roles: WorkerRoles) -> Iterable[Metric]:
    """Current states, read at each scrape."""
    stats, transfers = engine.stats, engine.transfer_counts
    labels = ["worker", "role", "model_fingerprint"]
    worker = (identity.worker_id, roles.role.value, identity.layout.model_fingerprint)
    yield by_label(
        GaugeMetricFamily, "pdserve_worker_info", "Always 1; the labels identify the worker.", labels, {worker: 1}
    )
    changes = {role.value: count for role, count in roles.num_changes.items()}
    meaning = "Times that the worker has taken a role since its start."
    yield by_label(CounterMetricFamily, "pdserve_role_switches", meaning, ["role"], changes)
    names = (*KNOWN_CONNECTORS, *identity.connectors)
    works = {name: int(name in identity.connectors) for name in names}
    meaning = "1 for each connector that works here."
    yield by_label(GaugeMetricFamily, "pdserve_connector_up", meaning, ["connector"], works)
    states = {
        "pdserve_kv_blocks": (
            "KV blocks of the pool; they add up to it.",
            {"free": stats.num_blocks_free, "cached": stats.num_blocks_cached, "in_use": stats.num_blocks_in_use},
        ),
        "pdserve_engine_requests": (
            "Sequences in the engine.",
            {
                "running": stats.num_running_reqs,
                "waiting": stats.num_capacity_reqs,
                "waiting_for_grammar": stats.num_grammar_reqs,
                "waiting_for_kv": stats.num_remote_kv_reqs,
                "waiting_for_turn": stats.num_idle_sessions,
            },
        ),
    }
    for name, (meaning, counts) in states.items():
        yield by_label(GaugeMetricFamily, name, meaning, ["state"], counts)
    adapters = {"offered": len(engine.known_adapters), "loaded": len(stats.loaded_loras)}
    meaning = "LoRA adapters that requests may name, and those that have a slot on the device."
    yield by_label(GaugeMetricFamily, "pdserve_lora_adapters", meaning, ["state"], adapters)
    stage_s = {"schedule": stats.scheduling_s, **engine.step_totals.stage_s, "update": stats.update_s}
    meaning = "Time of the engine's steps, by stage."
    yield by_label(CounterMetricFamily, "pdserve_step_stage_seconds", meaning, ["stage"], stage_s)
    layer_s = {str(layer): layer_s for layer, layer_s in enumerate(engine.step_totals.layer_s)}
    meaning = "Time of the model's layers, by layer."
    yield by_label(CounterMetricFamily, "pdserve_layer_seconds", meaning, ["layer"], layer_s)
    meaning = "Prompt tokens, by the source of their KV."
    tokens = stats.prompt_tokens_by_source
    yield by_label(CounterMetricFamily, "pdserve_prompt_tokens_by_source", meaning, ["source"], tokens)
    meaning = "Ended KV transfers, by outcome."
    yield by_label(CounterMetricFamily, "pdserve_kv_transfers", meaning, ["role", "outcome"], transfers.num_ended)
    for name, meaning, value in (
        ("pdserve_kv_blocks_quarantined", "Blocks in use that only an unfinished read holds.",
         stats.num_blocks_quarantined),
        ("pdserve_kv_blocks_pinned", "Blocks in use that transfers keep for their receivers.",
         transfers.num_pinned),
        ("pdserve_kv_host_bytes", "Host memory in use for blocks that left the pool.",
         identity.layout.pool_bytes(stats.num_host_blocks_used) if stats.num_host_blocks_used else 0),
        ("pdserve_kv_store_blocks", "KV blocks that the store below host memory is known to have.", stats.num_store_blocks),
        ("pdserve_waiting_prompt_tokens", "Prompt tokens still to compute.", stats.num_waiting_tokens),
        ("pdserve_open_transfers", "Active KV transfers, as source or receiver.", transfers.num_open),
        ("pdserve_draining", "1 while the worker accepts no new requests.", int(engine.draining)),
        ("pdserve_engine_tick_age_seconds", "Since the engine's loop last showed progress.", engine.tick_age_s),
    ):  # fmt: skip
        yield GaugeMetricFamily(name, meaning, value=value)
    for name, meaning, count in (
        ("pdserve_engine_ticks", "Turns of the engine's loop, and layers computed.", engine.tick),
        ("pdserve_steps", "Steps of the engine that computed something.", stats.num_steps),
        ("pdserve_scheduled_tokens", "Tokens of these steps.", stats.num_scheduled_tokens),
        ("pdserve_dropped_events", "Late, repeated and unknown events in the engine.", stats.num_dropped_events),
        ("pdserve_preemptions", "Sequences that lost their blocks to others.", stats.num_preemptions),
        ("pdserve_prefix_queried_tokens", "Prompt tokens looked up in the prefix cache.",
         stats.prefix_cache_queries),
        ("pdserve_external_prefix_queried_tokens", "Prompt tokens looked up in host memory, since the pool lacked them.",
         stats.external_prefix_cache_queries),
        ("pdserve_peer_prefix_queried_tokens", "Prompt tokens whose blocks were asked for at another worker.",
         stats.peer_prefix_cache_queries),
        ("pdserve_kv_host_blocks_stored", "KV blocks copied to host memory.", stats.num_host_blocks_stored),
        ("pdserve_kv_host_blocks_loaded", "KV blocks loaded from host memory.", stats.num_host_blocks_loaded),
        ("pdserve_kv_host_blocks_evicted", "KV blocks that others displaced from host memory.",
         stats.num_host_blocks_evicted),
        ("pdserve_kv_store_blocks_written", "KV blocks written to the store.", stats.num_store_blocks_written),
        ("pdserve_kv_store_blocks_found", "KV blocks that lookups found in a store that workers share.",
         stats.num_store_blocks_found),
        ("pdserve_kv_store_blocks_read", "KV blocks read from the store.", stats.num_store_blocks_read),
        ("pdserve_kv_store_blocks_failed", "KV blocks that the store did not have as they were written.",
         stats.num_store_blocks_failed),
        ("pdserve_kv_store_blocks_lost", "KV blocks that the store gave up for others, or did not keep.",
         stats.num_store_blocks_lost),
        ("pdserve_lora_loads", "LoRA adapters that got a slot on the device.", stats.num_lora_loads),
        ("pdserve_lora_evictions", "LoRA adapters that lost their slot to another.", stats.num_lora_evictions),
        ("pdserve_kv_transfer_fallbacks", "Transfers that continued over another connector.", transfers.num_fallbacks),
    ):  # fmt: skip
        yield CounterMetricFamily(name, meaning, value=count)
    yield from _speculation(stats.spec_decoding_stats or SpecDecodingStats())


def _speculation(stats: SpecDecodingStats) -> Iterable[Metric]:
    """Counters of drafts, by vLLM's names; zeros without speculation."""
    for name, meaning, count in (
        ("pdserve_spec_decode_num_drafts", "Times that a sequence was computed with drafts.", stats.num_drafts),
        ("pdserve_spec_decode_num_draft_tokens", "Drafted tokens that were computed.", stats.num_draft_tokens),
        ("pdserve_spec_decode_num_accepted_tokens", "Drafted tokens that equalled the sampled ones.",
         stats.num_accepted_tokens),
    ):  # fmt: skip
        yield CounterMetricFamily(name, meaning, value=count)
    by_position = {str(place): count for place, count in enumerate(stats.num_accepted_tokens_per_pos or [0])}
    meaning = "The same by their place in the draft, from 0."
    name = "pdserve_spec_decode_num_accepted_tokens_per_pos"
    yield by_label(CounterMetricFamily, name, meaning, ["position"], by_position)
