"""Cost of recording traffic (`record`): CPU time per prompt in the event loop and in the writer's thread, and memory.

Prompts end as they do in a router, in this process; the file is in the temporary folder. Half of the blocks of each prompt were in
the one before. A turn of the router's event loop does no more for a record than keep the hashes and queue the line.

Usage: python benchmarks/record_cost.py [--prompts 2000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path

from conditions import print_conditions
from prometheus_client import CollectorRegistry

from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.timeline import FINISHED, FIRST_TOKEN, Timeline, now_unix_ns
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.telemetry.router_metrics import RouterMetrics
from pdserve.router.telemetry.traffic_record import MAX_NUMBERED_BLOCKS, Numbers, TrafficRecord

BLOCK_SIZE = 16
NUM_BLOCKS = (0, 64, 512, 4096)
"""Full blocks of a prompt."""
OUTPUT_TOKENS = 200


def ended_prompt(metrics: RouterMetrics, hashes: list[bytes]) -> RequestTrace:
    """A request with one prompt that has ended, whose blocks are not kept yet."""
    request = RequestTrace(metrics, now_unix_ns(), None, {}, is_recorded=True)
    prompt = request.run(Timeline())
    prompt.num_prompt_tokens = len(hashes) * BLOCK_SIZE + 5
    prompt.num_output_tokens, prompt.num_attempts = OUTPUT_TOKENS, 1
    prompt.prefill, prompt.decode, prompt.finish_reason = "prefill-0", "decode-0", "stop"
    prompt.timeline.mark(FIRST_TOKEN)
    prompt.timeline.mark(FINISHED)
    return request


def measured(folder: Path, metrics: RouterMetrics, num_blocks: int, num_prompts: int) -> tuple[float, float, float]:
    """Seconds per prompt in the caller's thread and in the writer's, and bytes of a line."""
    draw = random.Random(0)
    path = folder / "record"
    record = TrafficRecord(RouterSettings(record=str(path), record_mib=1 << 20))
    shared = [draw.randbytes(8) for _ in range(num_blocks // 2)]
    loop_s, before = 0.0, time.process_time()
    made_s = 0.0
    for number in range(num_prompts):
        began = time.thread_time()
        hashes = shared + [draw.randbytes(8) for _ in range(num_blocks - len(shared))]
        request = ended_prompt(metrics, hashes)
        made_s += time.thread_time() - began
        began = time.thread_time()
        request.runs[0].hashed(hashes, BLOCK_SIZE)
        record.ended(request, "tenant")
        loop_s += time.thread_time() - began
        while sum(record.counts.values()) <= number - 64:
            time.sleep(0.001)
    record.close()
    thread_s = time.process_time() - before - loop_s - made_s
    if record.counts != {"written": num_prompts, "dropped": 0}:
        raise RuntimeError(f"not all lines were written: {record.counts}")
    size = path.stat().st_size / num_prompts
    path.unlink()
    return loop_s / num_prompts, thread_s / num_prompts, size


def numbers_bytes() -> int:
    """What the numbers of as many blocks as are remembered take, bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    numbers, draw = Numbers(MAX_NUMBERED_BLOCKS), random.Random(0)
    for _ in range(4 * MAX_NUMBERED_BLOCKS // 4096):
        numbers.of([draw.getrandbits(64) for _ in range(4096)])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print_conditions()
    metrics = RouterMetrics(CollectorRegistry(), lambda: 0, lambda: {}, lambda: 0)
    print(f"{MAX_NUMBERED_BLOCKS} numbered blocks: {numbers_bytes() / 2**20:.0f} MiB")
    for num_blocks in NUM_BLOCKS:
        with tempfile.TemporaryDirectory() as folder:
            rounds = [measured(Path(folder), metrics, num_blocks, options.prompts) for _ in range(options.rounds)]
        loop_s, thread_s, size = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(
            f"{num_blocks:>5} blocks: event loop {loop_s * 1e6:7.1f} us, writer {thread_s * 1e6:8.1f} us per prompt; "
            f"{size:.0f} bytes"
        )


if __name__ == "__main__":
    main()
