"""A worker's spans of one call, made after its end, as children of the attempt's span."""

from __future__ import annotations

from pdserve.common.telemetry.tracing import Attribute, Event, Tracing
from pdserve.common.timeline import to_unix_ns
from pdserve.worker.telemetry.call_stats import CallStats


def trace_call(tracing: Tracing, record: CallStats, worker_id: str, block_bytes: int) -> None:
    """Make a span per stage of the call, if the caller's trace is sampled."""
    parent = tracing.below(record.request.trace_headers)
    if parent is None:
        return
    for stage in record.stages():
        attributes: dict[str, Attribute] = {
            "pdserve.worker.id": worker_id,
            "pdserve.engine_request.id": record.request.request_id,
        }
        if record.request.tenant:
            attributes["pdserve.tenant.digest"] = record.request.tenant.hex()
        if record.request.client_request_id:
            attributes["pdserve.client_request.id"] = record.request.client_request_id
        if record.request.lora_name:
            attributes["pdserve.adapter"] = record.request.lora_name
        events: list[Event] = []
        match stage.name:
            case "prefill.compute":
                attributes["pdserve.prompt.tokens"] = len(record.request.prompt_token_ids)
                _describe_cached(record, attributes)
                events = [
                    Event("chunk", to_unix_ns(at), {"pdserve.chunk.tokens": num_tokens})
                    for at, num_tokens in record.prefill_chunks
                    if at <= stage.end
                ]
            case "kv.transfer":
                _describe_transfer(record, block_bytes, attributes, events)
            case "decode.generate":
                attributes["gen_ai.usage.output_tokens"] = record.num_output_tokens
                attributes["pdserve.preemptions"] = record.num_preemptions
                if record.num_draft_tokens:
                    attributes["pdserve.spec_decode.draft_tokens"] = record.num_draft_tokens
                    attributes["pdserve.spec_decode.accepted_tokens"] = record.num_accepted_tokens
                if "first_token" in record.moments:
                    events = [Event("first_token", to_unix_ns(record.moments["first_token"]))]
                events += [Event("preempted", to_unix_ns(at)) for at in record.preempted_at]
        parent.add(
            stage.name, to_unix_ns(stage.start), to_unix_ns(stage.end), attributes, events=events, error=stage.cause
        )


def _describe_cached(record: CallStats, attributes: dict[str, Attribute]) -> None:
    attributes["pdserve.prompt.cached_tokens"] = record.cached_tokens.total
    attributes |= record.cached_tokens.span_attributes


def _describe_transfer(
    record: CallStats, block_bytes: int, attributes: dict[str, Attribute], events: list[Event]
) -> None:
    if (transfer := record.transfer) is not None:
        attributes["pdserve.kv.connector"] = transfer.connector_name
        if transfer.given_up:  # failed in this transfer, or with this source shortly before
            attributes["pdserve.kv.fallbacks"] = transfer.given_up
        attributes["pdserve.kv.blocks_wanted"] = transfer.num_blocks
        attributes["pdserve.kv.blocks"] = transfer.num_landed
        attributes["pdserve.kv.bytes"] = transfer.num_landed * block_bytes
    _describe_cached(record, attributes)
    for name, moment in (("first_landing", "kv_first_landed"), ("last_landing", "kv_landed")):
        if moment in record.moments:
            events.append(Event(name, to_unix_ns(record.moments[moment])))
