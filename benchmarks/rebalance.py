"""Times between two tokens of streams that are all at one of two decode workers, with and without `rebalance`.

One prefill and two decode workers. In a skewed round all prompts begin alike: placement by cached prefix sends them to the decode
worker that has the beginning. In an even round each prompt has a beginning of its own, and both workers get as many. Clusters, one
per value of `rebalance`, are asked in turns. Cached blocks are not moved to other workers, so that the skew lasts.

The model has to be slow enough for one client to read all streams: with the bundled one the client is the bottleneck.

Usage: python benchmarks/rebalance.py [--model smollm2] [--rounds 4] [--streams 8] [--tokens 600] [--settings never auto]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
from cluster_of_processes import serving
from completions import Completion, completion_body, stream_completion
from conditions import print_conditions
from metric_values import metrics

from pdserve.models.model_folder import model_folder

SEED = 3
BEGINNING_TOKENS, OWN_TOKENS = 1500, 32
SETTLE_S = 1.2
"""Until reports of workers have arrived."""
KINDS = ("skewed", "even")


@dataclass
class Figures:
    """Of one setting and kind of round."""

    gaps_s: list[list[float]] = field(default_factory=list)
    """Of each round, of all streams."""
    tail_s: list[float] = field(default_factory=list)
    """Of each round, from the start of the measurement to the end of the last stream."""

    def __str__(self) -> str:
        each = [sorted(gaps) for gaps in self.gaps_s]
        p50, p99 = ([gaps[int(part * (len(gaps) - 1))] * 1e3 for gaps in each] for part in (0.5, 0.99))
        return (
            f"gap p50 {statistics.median(p50):6.2f} ms, p99 {statistics.median(p99):6.2f} [{min(p99):.2f}, {max(p99):.2f}], "
            f"longest {max(gaps[-1] for gaps in each) * 1e3:6.1f}; all streams ended after {statistics.median(self.tail_s):.2f} s"
        )


async def _num_running(http: httpx.AsyncClient, url: str) -> list[int]:
    """Of each decode worker."""
    workers = (await http.get(f"{url}/debug/status")).json()["workers"]
    return [worker["num_running"] for worker in workers if worker["role"] == "decode"]


async def round_of(
    url: str, options: argparse.Namespace, draw: random.Random, vocabulary: int, kind: str
) -> tuple[Figures, list[int]]:
    """Figures, and the sequences of each decode worker when all streams run."""

    def tokens(num: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(num)]

    running = asyncio.Event()
    num_begun = 0

    def note(completion: Completion) -> None:
        nonlocal num_begun
        num_begun += len(completion.message_s) == 1
        if num_begun == options.streams:
            running.set()

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        beginning = tokens(BEGINNING_TOKENS)
        if kind == "skewed":
            await stream_completion(http, f"{url}/v1/completions", completion_body(beginning, 2))
            await asyncio.sleep(SETTLE_S)
        tasks = []
        for _ in range(options.streams):
            prompt = [*(beginning if kind == "skewed" else tokens(BEGINNING_TOKENS)), *tokens(OWN_TOKENS)]
            body = completion_body(prompt, options.tokens)
            tasks.append(asyncio.create_task(stream_completion(http, f"{url}/v1/completions", body, note)))
        await running.wait()
        began = time.perf_counter()
        await asyncio.sleep(SETTLE_S)
        at_workers = await _num_running(http, url)
        ended = await asyncio.gather(*tasks)
    gaps = [
        after - before
        for stream in ended
        for before, after in zip(stream.message_s, stream.message_s[1:], strict=False)
        if before >= began
    ]
    return Figures([gaps], [max(stream.message_s[-1] for stream in ended) - began]), at_workers


async def measure(
    urls: dict[str, str], options: argparse.Namespace, vocabulary: int
) -> tuple[dict[tuple[str, str], Figures], dict[str, float]]:
    results = {(kind, setting): Figures() for kind in KINDS for setting in urls}
    draw = random.Random(SEED)
    for number in range(options.rounds):
        for kind in KINDS:
            for setting in list(urls) if number % 2 else list(urls)[::-1]:
                found, at_workers = await round_of(urls[setting], options, draw, vocabulary, kind)
                print(f"round {number + 1}, {kind:<6} {setting:<6} {found}; sequences {at_workers}", flush=True)
                results[kind, setting].gaps_s += found.gaps_s
                results[kind, setting].tail_s += found.tail_s
    async with httpx.AsyncClient() as http:
        counts = {
            f"{setting} {name}": value
            for setting, url in urls.items()
            for name, value in (await metrics(http, f"{url}/metrics")).items()
            if name.startswith(("pdserve_migrations_total", "pdserve_migration_pause_seconds_sum"))
        }
    return results, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600, help="of each answer")
    parser.add_argument("--settings", nargs="+", default=["never", "auto"])
    parser.add_argument("--set", action="append", default=[], help="a setting of all clusters, name=value")
    options = parser.parse_args()
    folder = model_folder(options.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    flags = ["--prefill", "1", "--decode", "2", "--block-moves", "never", *(f"--{setting}" for setting in options.set)]
    print_conditions()
    print(f"{options.model}, {options.rounds} rounds of {options.streams} streams, answers of {options.tokens}")
    with ExitStack() as stack:
        urls = {
            setting: stack.enter_context(serving(folder, [*flags, "--rebalance", setting]))
            for setting in options.settings
        }
        results, counts = asyncio.run(measure(urls, options, vocabulary))
    for (kind, setting), figures in results.items():
        print(f"{kind:<6} {setting:<6} {figures}")
    for name, count in counts.items():
        print(f"{name} {count:g}")


if __name__ == "__main__":
    main()
