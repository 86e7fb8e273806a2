"""Workers with their engine in their own process, and with `engine_process`, in turns: hand-over, tokens, CPU time.

Two clusters run, of which one is measured at a time, so that a drift of the machine hits both. Each round measures, per cluster:

    hand-over        from the end of a prompt's computation at prefill to decode's first step, while 4 streams keep decode busy
    TPOT at N        seconds between tokens of N streams
    processor        microseconds of CPU time per token of all services' processes, with N streams

Usage: python benchmarks/engine_process.py [--model demo|DIR] [--rounds 5] [--streams 16 64] [--num 12] [--set name=value ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
from cluster_of_processes import free_port, serving
from conditions import print_conditions
from probe import Prober, prompt_of

from pdserve.common import timeline
from pdserve.models.model_folder import model_folder

VARIANTS = ("in the worker", "engine_process")
BUSY_STREAMS = 4
OUTPUT_TOKENS = 100
WARM_UP = 3

Figures = dict[str, list[float]]


def processor_s(router: psutil.Process) -> float:
    """CPU seconds so far of a cluster's processes."""
    times = [process.cpu_times() for process in (router, *router.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def hand_over(prober: Prober, num: int, seed: int, vocabulary: int) -> list[float]:
    """Milliseconds of every request."""
    over = False

    async def stream(number: int) -> None:
        turn = 0
        while not over:
            await prober.ask(prompt_of(64, seed + 1000 * number + turn, vocabulary), OUTPUT_TOKENS)
            turn += 1

    streams = [asyncio.create_task(stream(number)) for number in range(1, BUSY_STREAMS + 1)]
    taken = []
    for number in range(num + WARM_UP):
        probe = await prober.ask(prompt_of(500, seed + 10**6 + number, vocabulary), 4)
        seconds = probe.timeline.seconds(timeline.PREFILL_COMPUTED, timeline.DECODE_STARTED)
        if seconds is None:
            raise RuntimeError("a request did not go through prefill and decode")
        taken.append(seconds * 1e3)
    over = True
    await asyncio.gather(*streams)
    return taken[WARM_UP:]


async def round_of(port: int, router: psutil.Process, options: argparse.Namespace, seed: int, vocab: int) -> Figures:
    prober = Prober(f"127.0.0.1:{port}")
    figures = {"hand-over, ms": await hand_over(prober, options.num, seed, vocab)}
    for num_streams in options.streams:
        before = processor_s(router)
        asked = [
            prober.ask(prompt_of(64, seed + 10**7 + 1000 * num_streams + number, vocab), OUTPUT_TOKENS)
            for number in range(num_streams)
        ]
        probes = await asyncio.gather(*asked)
        spent_us = (processor_s(router) - before) * 1e6
        figures[f"TPOT at {num_streams}, ms"] = [statistics.median(probe.tpot_s for probe in probes) * 1e3]
        figures[f"processor at {num_streams}, us per token"] = [spent_us / (num_streams * OUTPUT_TOKENS)]
    await prober.close()
    return figures


def newest_child() -> psutil.Process:
    """The child of this process that `serving` has started last."""
    return max(psutil.Process().children(), key=lambda process: process.create_time())


def report(found: dict[str, list[Figures]]) -> None:
    """Medians of the rounds' medians, and the ratio round by round."""
    before, after = (found[name] for name in VARIANTS)
    print(f"{'':<32}" + "".join(f"{name:>18}" for name in VARIANTS) + f"{'ratio [lowest, highest]':>28}")
    for name in before[0]:
        pairs = [
            (statistics.median(one[name]), statistics.median(other[name]))
            for one, other in zip(before, after, strict=True)
        ]
        ratios = [other / one for one, other in pairs]
        cells = "".join(f"{statistics.median(pair[place] for pair in pairs):>18.2f}" for place in (0, 1))
        print(f"{name:<32}{cells}{_spread(ratios):>28}")


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--num", type=int, default=12, help="hand-overs per round")
    parser.add_argument("--set", action="append", default=[], help="a setting of the services, as name=value")
    options = parser.parse_args()
    folder: Path = model_folder(options.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    print_conditions()
    settings = [f"max_num_seqs={max(options.streams)}", *options.set]
    flags = ["--local-prefill", "never", "--connector", "tcp"]
    flags += [f"--{assignment}" for assignment in settings]
    found: dict[str, list[Figures]] = defaultdict(list)
    with ExitStack() as stack:
        places = {}
        for name in VARIANTS:
            port = free_port()
            own = [f"--engine-process={str(name == 'engine_process').lower()}"]
            stack.enter_context(serving(folder, [*flags, *own], grpc_port=port))
            places[name] = port, newest_child()
        for number in range(options.rounds):
            for name in VARIANTS if number % 2 == 0 else VARIANTS[::-1]:
                port, router = places[name]
                found[name].append(asyncio.run(round_of(port, router, options, 10**8 * number, vocabulary)))
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}", flush=True)
    report(found)


if __name__ == "__main__":
    main()
