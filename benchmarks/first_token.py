"""Time to first token at clusters that serve nothing else, and the stages of the way to it.

Two clusters, of which one prefills at the prefill worker and one at the decode worker, and both front ends get one prompt after the
other in turns, each prompt only once. Times of stages are from the moments that every service reports.

Usage: python benchmarks/first_token.py [--model demo|DIR] [--prompt-tokens 64 1000] [--num 60] [--front grpc http]
                                         [--prefill remote local] [--set name=value ...]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
from contextlib import AsyncExitStack, ExitStack
from urllib.parse import urlsplit

from cluster_of_processes import free_port, serving
from conditions import print_conditions
from probe import HttpProber, Probe, Prober, prompt_of

from pdserve.common import timeline
from pdserve.models.model_folder import model_folder

WARM_UP = 5
OUTPUT_TOKENS = 4
PLACES = {"remote": "never", "local": "always"}
"""Place of prefill -> `local_prefill`."""
SENT, RECEIVED = "sent", "received"
STAGES = (
    ("to the router", SENT, timeline.ARRIVED),
    ("tokenize", timeline.ARRIVED, timeline.TOKENIZED),
    ("admit", timeline.TOKENIZED, timeline.ADMITTED),
    ("place", timeline.ADMITTED, timeline.PLACED),
    ("hash", timeline.PLACED, timeline.ATTEMPTED),
    ("to the worker", timeline.ATTEMPTED, timeline.PREFILL_QUEUED),
    ("to its engine", timeline.PREFILL_QUEUED, timeline.PREFILL_STARTED),
    ("compute", timeline.PREFILL_STARTED, timeline.PREFILL_COMPUTED),
    ("back to the router", timeline.PREFILL_COMPUTED, timeline.FIRST_TOKEN),
    ("to the client", timeline.FIRST_TOKEN, RECEIVED),
)
"""(name, moment at which it begins, moment at which it ends); together they are the time to first token at the client."""
AFTERWARDS = (
    ("blocks landed", timeline.PREFILL_COMPUTED, timeline.KV_LANDED),
    ("decode began", timeline.PREFILL_COMPUTED, timeline.DECODE_STARTED),
)
"""As `STAGES`: what goes on while the first token is on its way."""


def stages(probe: Probe) -> dict[str, float]:
    """Stage -> seconds, of those whose moments were seen. Moments of two processes may contradict each other by some us."""
    seen = probe.timeline.moments_unix_ns
    seen = seen | {SENT: probe.sent_unix_ns, RECEIVED: probe.sent_unix_ns + int(probe.ttft_s * 1e9)}
    return {
        name: (seen[end] - seen[start]) / 1e9
        for name, start, end in (*STAGES, *AFTERWARDS)
        if start in seen and end in seen
    }


async def measure(
    clusters: dict[str, tuple[str, int]], model: str, fronts: list[str], length: int, num: int, vocabulary: int
) -> dict[tuple[str, str], list[Probe]]:
    """(front end, place) -> probes. clusters: place -> (base URL, gRPC port)."""
    found: dict[tuple[str, str], list[Probe]] = {}
    async with AsyncExitStack() as opened:
        probers: dict[tuple[str, str], Prober | HttpProber] = {}
        for place, (url, grpc_port) in clusters.items():
            at = urlsplit(url)
            made: dict[str, Prober | HttpProber] = {
                "grpc": Prober(f"127.0.0.1:{grpc_port}"),
                "http": HttpProber(at.hostname or "127.0.0.1", at.port or 80, model),
            }
            for front in fronts:
                probers[front, place] = made[front]
                opened.push_async_callback(made[front].close)
        seeds = itertools.count(1000 * length)
        for turn in range(WARM_UP + num):
            order = list(probers.items())
            for key, prober in order if turn % 2 else reversed(order):
                probe = await prober.ask(prompt_of(length, next(seeds), vocabulary), OUTPUT_TOKENS)
                if turn >= WARM_UP:
                    found.setdefault(key, []).append(probe)
    return found


def report(found: dict[tuple[str, str], list[Probe]], length: int) -> None:
    """Print each front end and place: times to first token, then medians of the stages side by side."""
    for (front, place), probes in sorted(found.items()):
        values = [probe.ttft_s for probe in probes]
        p90 = statistics.quantiles(values, n=10)[-1]
        label = f"{front}, {place}, {length} tokens"
        print(
            f"{label:<28} p50 {statistics.median(values) * 1e3:6.2f} ms   p90 {p90 * 1e3:6.2f} ms   "
            f"least {min(values) * 1e3:6.2f} ms"
        )
    print(f"\n{'medians in ms':<22}" + "".join(f"{f'{front} {place}':>14}" for front, place in sorted(found)))
    for name, _, _ in (*STAGES, *AFTERWARDS):
        cells = []
        for key in sorted(found):
            seconds = [taken[name] for probe in found[key] if name in (taken := stages(probe))]
            cells.append(f"{statistics.median(seconds) * 1e3:>14.2f}" if seconds else f"{'':>14}")
        print(f"{name:<22}" + "".join(cells))
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--num", type=int, default=60)
    parser.add_argument("--front", nargs="+", choices=("grpc", "http"), default=["grpc", "http"])
    parser.add_argument("--prefill", nargs="+", choices=tuple(PLACES), default=list(PLACES))
    parser.add_argument("--set", action="append", default=[], help="a setting of the services, as name=value")
    options = parser.parse_args()
    folder = model_folder(options.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    print_conditions()
    print(f"settings     {' '.join(options.set) or 'defaults'}\n")
    given = [f"--{assignment}" for assignment in options.set]
    with ExitStack() as running:
        clusters: dict[str, tuple[str, int]] = {}
        for place in options.prefill:
            port = free_port()
            flags = ["--local-prefill", PLACES[place], "--connector", "tcp", *given]
            clusters[place] = running.enter_context(serving(folder, flags, grpc_port=port)), port
        for length in options.prompt_tokens:
            found = asyncio.run(measure(clusters, folder.name, options.front, length, options.num, vocabulary))
            report(found, length)
    print(f"load after   {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
