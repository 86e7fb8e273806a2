"""Events of a decode call, as `DecodeEvent` messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdserve.common.errors import PdServeError
from pdserve.common.request.engine_types import EngineCoreOutput, Migration
from pdserve.common.request.wire.messages import (
    ended_to_wire,
    moments_to_wire,
    outputs_to_wire,
    prompt_logprobs_to_wire,
)
from pdserve.v1 import decode_pb2, prefill_pb2, request_pb2


def admitted_event(moment: str, arrival_time: float) -> decode_pb2.DecodeEvent:
    """arrival_time: `clock.monotonic()` seconds."""
    return decode_pb2.DecodeEvent(admitted=prefill_pb2.Admitted(moments=moments_to_wire({moment: arrival_time})))


def receiving_event(awaits_source: bool) -> decode_pb2.DecodeEvent:
    return decode_pb2.DecodeEvent(receiving=decode_pb2.Receiving(awaits_source=awaits_source))


def landed_event(num_blocks: int, block_bytes: int, connector: str) -> decode_pb2.DecodeEvent:
    """block_bytes: of one block."""
    landed = decode_pb2.Landed(num_blocks=num_blocks, transfer_bytes=num_blocks * block_bytes, connector=connector)
    return decode_pb2.DecodeEvent(landed=landed)


def migrating_event(output: EngineCoreOutput, migration: Migration) -> decode_pb2.DecodeEvent:
    """output: the last one of the sequence."""
    last = request_pb2.Outputs(
        index=output.index,
        first_position=output.first_position + len(output.new_token_ids) - 1,
        token_ids=[migration.token_id],
    )
    computed = prefill_pb2.Computed(
        num_tokens=migration.num_sent_tokens, request_digest=migration.request_digest, first_outputs=[last]
    )
    migrating = decode_pb2.Migrating(
        index=output.index, computed=computed, without_draft_head=migration.without_draft_head
    )
    return decode_pb2.DecodeEvent(migrating=migrating)


def migrated_event(index: int, state: str, cause: PdServeError | None) -> decode_pb2.DecodeEvent:
    """state, cause: as in `ended_to_wire`."""
    migrated = decode_pb2.Migrated(index=index, ended=ended_to_wire(state, cause))
    return decode_pb2.DecodeEvent(migrated=migrated)


def needs_prefill_event(uncached_tokens: int) -> decode_pb2.DecodeEvent:
    return decode_pb2.DecodeEvent(needs_prefill=decode_pb2.NeedsPrefill(uncached_tokens=uncached_tokens))


def prefilling_locally_event() -> decode_pb2.DecodeEvent:
    return decode_pb2.DecodeEvent(prefilling_locally=decode_pb2.PrefillingLocally())


def output_events(output: EngineCoreOutput, names: Mapping[str, tuple[str, ...]]) -> Iterator[decode_pb2.DecodeEvent]:
    """The prompt's log-probabilities, then the `Outputs` message, of one output of the engine. names: see `outputs_to_wire`."""
    for piece in prompt_logprobs_to_wire(output.prompt_logprobs, output.first_prompt_position):
        yield decode_pb2.DecodeEvent(prompt_logprobs=piece)
    yield outputs_event(output, names)


def outputs_event(output: EngineCoreOutput, names: Mapping[str, tuple[str, ...]]) -> decode_pb2.DecodeEvent:
    """One output of the engine without the prompt's log-probabilities."""
    return decode_pb2.DecodeEvent(outputs=outputs_to_wire(output, names))
