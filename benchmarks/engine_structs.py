"""Time to encode and decode the structs of an engine's queues as msgpack: microseconds, best of several runs.

Usage: python benchmarks/engine_structs.py
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import partial

import msgspec
from conditions import print_conditions

from pdserve.common.request.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    LogprobsLists,
    SchedulerStats,
)
from pdserve.common.request.sampling_params import SamplingParams

NUM_RUNS, NUM_CALLS = 9, 5000
STATS = SchedulerStats(
    num_running_reqs=64,
    num_waiting_reqs=7,
    num_blocks_total=4096,
    num_blocks_free=1000,
    num_blocks_in_use=3096,
    num_waiting_tokens=5000,
    num_computed_prompt_tokens=1_000_000,
    prefill_s=12.5,
)


def request(num_tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="5f0c8f6e0b8b4d0c9d6f2f6e4f1a2b3c.0.0",
        prompt_token_ids=[token * 37 % 32_000 for token in range(num_tokens)],
        sampling_params=SamplingParams(temperature=0.7, top_p=0.9, seed=12345, max_tokens=256),
        eos_token_ids=(2,),
        arrival_time=1234.5678,
        block_hashes=[block.to_bytes(16, "little") for block in range(num_tokens // 16)],
        hash_root=b"r" * 16,
        trace_headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    )


def output(number: int, num_logprobs: int | None = None) -> EngineCoreOutput:
    logprobs = None
    if num_logprobs is not None:
        width = 1 + num_logprobs
        logprobs = LogprobsLists([list(range(width))], [[-0.5 * place for place in range(width)]], [1])
    return EngineCoreOutput(
        request_id=f"5f0c8f6e0b8b4d0c9d6f2f6e4f1a2b3c.0.{number}",
        new_token_ids=[number * 37 % 32_000],
        first_position=number,
        new_logprobs=logprobs,
    )


CASES: dict[str, msgspec.Struct] = {
    "EngineCoreRequest, 16 tokens": request(16),
    "EngineCoreRequest, 1,000 tokens": request(1000),
    "EngineCoreRequest, 12,000 tokens": request(12_000),
    "EngineCoreOutput, 1 token": output(7),
    "EngineCoreOutput, 1 token, 5 logprobs": output(7, 5),
    "EngineCoreOutputs of a step, 64 sequences": EngineCoreOutputs(
        outputs=[output(number) for number in range(64)], scheduler_stats=STATS
    ),
}


def best_us(call: Callable[[], object]) -> float:
    return min(timeit.repeat("call()", globals={"call": call}, repeat=NUM_RUNS, number=NUM_CALLS)) / NUM_CALLS * 1e6


def main() -> None:
    print_conditions()
    print(f"msgspec      {msgspec.__version__}\n")
    print(f"{'':<42} {'bytes':>7} {'encode us':>10} {'decode us':>10}")
    encoder = msgspec.msgpack.Encoder()
    for name, case in CASES.items():
        decoder = msgspec.msgpack.Decoder(type(case))
        data = encoder.encode(case)
        assert decoder.decode(data) == case
        encode, decode = best_us(partial(encoder.encode, case)), best_us(partial(decoder.decode, data))
        print(f"{name:<42} {len(data):>7,} {encode:>10.2f} {decode:>10.2f}")


if __name__ == "__main__":
    main()
