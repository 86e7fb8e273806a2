"""Outputs of an engine as the router reads them."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.common import timeline
from pdserve.common.engine_types import EngineCoreOutput
from pdserve.common.wire import finish_reason_to_wire, logprobs_to_wire, moments_to_wire
from pdserve.v1 import request_pb2

LOCAL_MOMENTS = {
    "queued": (timeline.PREFILL_QUEUED,),
    "scheduled": (timeline.PREFILL_STARTED,),
    "first_token": (timeline.PREFILL_COMPUTED, timeline.DECODE_STARTED),
    "finished": (timeline.DECODE_FINISHED,),
}
"""The engine's moment -> those of the timeline, where the prompt is prefilled here."""


def outputs_to_wire(output: EngineCoreOutput, names: Mapping[str, tuple[str, ...]]) -> request_pb2.Outputs:
    """names: the engine's moment -> those of the timeline that it stands for."""
    moments = {wire: at for name, at in output.moments.items() for wire in names.get(name, ())}
    return request_pb2.Outputs(
        first_position=output.first_position,
        token_ids=output.new_token_ids,
        finish_reason=finish_reason_to_wire(output.finish_reason),
        stop_token_id=output.stop_reason if isinstance(output.stop_reason, int) else None,
        num_cached_tokens=output.num_cached_tokens,
        moments=moments_to_wire(moments) if moments else (),
        logprobs=logprobs_to_wire(output.new_logprobs),
    )
