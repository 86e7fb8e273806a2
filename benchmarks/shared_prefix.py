"""Prompts that share prefixes: cached tokens with placement by prefix and in turn, compared with an oracle.

Two clusters of two prefill and two decode workers run side by side, one with `kv_aware`, one with `round_robin`. They get the same
requests in the same order, in alternating slices, so that both run under the same conditions. The oracle places the same requests
with knowledge of every pool: at decode if one has the prefix, else at prefill if one has it, else at the worker whose least
recently used prefix is oldest.

With one request at a time the comparison is exact. With several at once the pools also hold blocks of running requests, which the
oracle does not count.

Usage: python benchmarks/shared_prefix.py [--requests 400] [--concurrency 1 4] [--out results/shared_prefix.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cluster_of_processes import serving
from completions import completion_body, stream_completion
from conditions import conditions

from pdserve.models.model_folder import model_folder

POLICIES = ("kv_aware", "round_robin")
NUM_PREFIXES, PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 24, 500, 8, 4
"""Prompt and output end within one block after the prefix: a request leaves nothing but its prefix in a cache."""
BLOCK_SIZE, PREFIXES_IN_POOL, NUM_WORKERS = 16, 8, 2
PREFIX_BLOCKS = PREFIX_TOKENS // BLOCK_SIZE
NUM_BLOCKS = PREFIXES_IN_POOL * (PREFIX_BLOCKS + 1)
SLICE = 40
SEED = 7


@dataclass
class Served:
    """Results of one policy."""

    cached_tokens: int = 0
    prompt_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    """How the last placements were: remote, local."""

    def summary(self, oracle_tokens: int) -> dict[str, Any]:
        return {
            "cached_tokens": self.cached_tokens,
            "prompt_tokens": self.prompt_tokens,
            "share_of_oracle": round(self.cached_tokens / oracle_tokens, 4),
            "ttft_p50_ms": round(statistics.median(self.ttft_s) * 1e3, 2),
            "ttft_mean_ms": round(statistics.fmean(self.ttft_s) * 1e3, 2),
            "last_placements": self.kinds,
        }


class Pool:
    """Prefixes that one worker holds, the one used longest ago first."""

    def __init__(self) -> None:
        self._used_at: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, prefix: int) -> bool:
        return prefix in self._used_at

    @property
    def oldest(self) -> int:
        """When what would make room was used; -1 while there is room."""
        return -1 if len(self._used_at) < PREFIXES_IN_POOL else next(iter(self._used_at.values()))

    def use(self, prefix: int, moment: int) -> None:
        self._used_at[prefix] = moment
        self._used_at.move_to_end(prefix)
        if len(self._used_at) > PREFIXES_IN_POOL:
            self._used_at.popitem(last=False)


def oracle(order: list[int]) -> int:
    """Cached prompt tokens of a router that knows every pool, with one request after the other."""
    prefill, decode = ([Pool() for _ in range(NUM_WORKERS)] for _ in range(2))
    hits = 0
    for moment, prefix in enumerate(order):
        sink = next((pool for pool in decode if prefix in pool), None)
        source = next((pool for pool in prefill if prefix in pool), None)
        hits += sink is not None or source is not None
        if sink is None:
            # decode receives it from a prefill worker, which then holds it as well
            (source or min(prefill, key=lambda pool: pool.oldest)).use(prefix, moment)
        (sink or min(decode, key=lambda pool: pool.oldest)).use(prefix, moment)
    return hits * PREFIX_BLOCKS * BLOCK_SIZE


async def serve(client: httpx.AsyncClient, url: str, prompts: list[list[int]], concurrency: int, into: Served) -> None:
    """Send them, in this order, so many at once."""
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> None:
        async with gate:
            answer = await stream_completion(client, f"{url}/v1/completions", completion_body(prompt, OUTPUT_TOKENS))
            into.cached_tokens += answer.num_cached_tokens
            into.prompt_tokens += answer.num_prompt_tokens
            into.ttft_s.append(answer.ttft_s)

    await asyncio.gather(*(one(prompt) for prompt in prompts))


async def measure(urls: dict[str, str], prompts: list[list[int]], concurrency: int) -> dict[str, Served]:
    results = {policy: Served() for policy in urls}
    async with httpx.AsyncClient(timeout=600) as client:
        for start in range(0, len(prompts), SLICE):
            # who is first changes, so that neither always finds the machine colder
            for policy in list(urls) if start // SLICE % 2 else reversed(list(urls)):
                await serve(client, urls[policy], prompts[start : start + SLICE], concurrency, results[policy])
        for policy, url in urls.items():
            for placement in (await client.get(f"{url}/debug/routing")).json()["placements"]:
                kinds = results[policy].kinds
                kinds[placement["kind"]] = kinds.get(placement["kind"], 0) + 1
    return results


def run_all(folder: Path, prompts: list[list[int]], concurrency: int, settings: list[str]) -> dict[str, Served]:
    """Fresh clusters, both policies."""
    flags = ["--prefill", str(NUM_WORKERS), "--decode", str(NUM_WORKERS), f"--num-blocks={NUM_BLOCKS}"]
    for setting in settings:
        flags += [f"--{setting}"]
    with ExitStack() as stack:
        urls = {policy: stack.enter_context(serving(folder, [*flags, "--policy", policy])) for policy in POLICIES}
        return asyncio.run(measure(urls, prompts, concurrency))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--set", action="append", default=[], help="a setting of both clusters, name=value")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = model_folder("demo")
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    draw = random.Random(SEED)
    prefixes = [[draw.randrange(10, vocabulary) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    order = [draw.randrange(NUM_PREFIXES) for _ in range(options.requests)]
    prompts = [prefixes[number] + [draw.randrange(10, vocabulary) for _ in range(OWN_TOKENS)] for number in order]
    described, oracle_tokens = conditions(), oracle(order)
    for name, value in described.items():
        print(f"{name:<12} {value}")
    print(
        f"{options.requests} requests over {NUM_PREFIXES} prefixes of {PREFIX_TOKENS} tokens; "
        f"{NUM_WORKERS}+{NUM_WORKERS} workers with pools of {PREFIXES_IN_POOL} prefixes"
    )
    print(f"{'oracle':<22} {oracle_tokens:8d} cached tokens")
    runs = []
    for concurrency in options.concurrency:
        for policy, served in run_all(folder, prompts, concurrency, options.set).items():
            summary = served.summary(oracle_tokens)
            runs.append({"concurrency": concurrency, "policy": policy, **summary, "ttft_s": served.ttft_s})
            print(
                f"{concurrency} at once, {policy:<11} {summary['cached_tokens']:8d} cached tokens, "
                f"{summary['share_of_oracle']:.3f} of the oracle   TTFT p50 {summary['ttft_p50_ms']:6.1f} ms, "
                f"mean {summary['ttft_mean_ms']:6.1f} ms",
                flush=True,
            )
    if options.out:
        shape = {
            "requests": options.requests, "prefixes": NUM_PREFIXES, "prefix_tokens": PREFIX_TOKENS,
            "own_tokens": OWN_TOKENS, "output_tokens": OUTPUT_TOKENS, "num_blocks": NUM_BLOCKS, "seed": SEED,
            "settings": options.set,
        }  # fmt: skip
        report = {"conditions": described, "shape": shape, "oracle_cached_tokens": oracle_tokens, "runs": runs}
        options.out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
