"""Values of an engine's queues are plain arrays on the wire, and nothing is lost on the way."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.common.request import engine_types
from pdserve.common.request.engine_types import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    SchedulerStats,
)
from pdserve.common.request.sampling_params import SamplingParams

REQUEST = EngineCoreRequest(
    request_id="r.0.0",
    prompt_token_ids=[1, 2, 3],
    sampling_params=SamplingParams(temperature=0.5, stop=("a",), logit_bias={3: -1.5}, seed=7),
    eos_token_ids=(2,),
    arrival_time=12.5,
    block_hashes=[b"h" * 16],
    hash_root=b"r" * 16,
    priority=-4,
    trace_headers={"traceparent": "00"},
)
OUTPUT = EngineCoreOutput(
    request_id="r.0.0",
    new_token_ids=[4, 5],
    first_position=1,
    finish_reason=FinishReason.STOP,
    stop_reason=5,
    moments={"queued": 1.0, "finished": 2.0},
    prefill_chunks=[(1.5, 3)],
    new_logprobs=LogprobsLists([[4, 1], [5, 2]], [[-0.5, -0.75], [-1.0, -2.0]], [1, 2]),
    events=[EngineCoreEvent(EngineCoreEventType.PREEMPTED, 1.25)],
)
OUTPUTS = EngineCoreOutputs(
    outputs=[OUTPUT, EngineCoreOutput(request_id="s")],
    scheduler_stats=SchedulerStats(num_running_reqs=2, prefill_s=0.5),
    blocks_stored=[b"h" * 16],
)


@pytest.mark.parametrize("value", [REQUEST, OUTPUT, OUTPUTS], ids=lambda value: type(value).__name__)
def test_nothing_is_lost_on_the_way(value: msgspec.Struct) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value


def test_structs_are_arrays_without_their_defaults_and_unknown_to_the_collector() -> None:
    structs = [
        kind
        for kind in vars(engine_types).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == engine_types.__name__
    ]
    assert {EngineCoreRequest, EngineCoreOutput, EngineCoreOutputs, SchedulerStats, LogprobsLists} <= set(structs)
    for kind in structs:
        config = kind.__struct_config__
        assert (config.array_like, config.gc) == (True, False), kind
        if kind.__struct_defaults__:
            assert config.omit_defaults, kind
