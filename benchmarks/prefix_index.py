"""Time of lookups of a 12,000-token prompt in an index of a million blocks of 64 workers: median and 99th percentile.

Also the mapping of the prompt's block hashes to placement hashes. Times are CPU time.

Usage: python benchmarks/prefix_index.py
"""

from __future__ import annotations

import random
import statistics
import time

from conditions import print_conditions

from pdserve.common.block_hash import BLOCK_HASH_BYTES, placement_hash
from pdserve.common.kv_events import WorkerKey
from pdserve.router.placement.prefix_index import PrefixIndex

NUM_WORKERS, NUM_BLOCKS, PROMPT_BLOCKS, NUM_LOOKUPS = 64, 1_000_000, 750, 2000


def main() -> None:
    draw = random.Random(1)
    workers: list[WorkerKey] = [(f"worker-{number}", number) for number in range(NUM_WORKERS)]
    index = PrefixIndex()
    prompts = []
    for number in range(NUM_BLOCKS // PROMPT_BLOCKS):
        hashes = [draw.randbytes(BLOCK_HASH_BYTES) for _ in range(PROMPT_BLOCKS)]
        prompts.append(hashes)
        prompt = [placement_hash(block_hash) for block_hash in hashes]
        for holder in draw.sample(workers, 1 + number % 3):
            index.stored(holder, prompt[: draw.randrange(1, PROMPT_BLOCKS + 1)] if number % 2 else prompt)
    lookups, mappings = [], []
    for _ in range(NUM_LOOKUPS):
        prompt = draw.choice(prompts)
        started = time.thread_time()
        names = [placement_hash(block_hash) for block_hash in prompt]
        mapped = time.thread_time()
        index.match(names, workers, 0.0)
        lookups.append(time.thread_time() - mapped)
        mappings.append(mapped - started)
    print_conditions()
    print(f"{len(index):,} blocks, {NUM_WORKERS} workers, {PROMPT_BLOCKS}-block prompts, {NUM_LOOKUPS} lookups")
    for name, times in (("lookup", lookups), ("block hashes to placement hashes", mappings)):
        p99 = statistics.quantiles(times, n=100)[98]
        print(f"{name}: median {statistics.median(times) * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us")


if __name__ == "__main__":
    main()
