"""Time from the end of a prompt's computation at prefill to decode's first step, while decode is busy.

Usage: python benchmarks/handover.py [--model demo|DIR] [--prompt-tokens 1000] [--streams 4] [--num 60] [--set name=value ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from cluster_of_processes import free_port, serving
from conditions import print_conditions
from probe import Prober, prompt_of

from pdserve.common import timeline
from pdserve.models.model_folder import model_folder

STEPS = (
    ("blocks landed after the prompt was computed", timeline.PREFILL_COMPUTED, timeline.KV_LANDED),
    ("waiting for decode's step", timeline.KV_LANDED, timeline.DECODE_STARTED),
    ("hand-over", timeline.PREFILL_COMPUTED, timeline.DECODE_STARTED),
)


STREAM_TOKEN = "one token of the streams, decode's step"


async def measure(address: str, options: argparse.Namespace, vocabulary: int) -> dict[str, list[float]]:
    """(phase -> seconds of every request, seconds per token of the other streams)."""
    prober = Prober(address)
    over = False
    tokens_s: list[float] = []

    async def stream(number: int) -> None:
        turn = 0
        while not over:
            tokens_s.append((await prober.ask(prompt_of(64, 1000 * number + turn, vocabulary), 200)).tpot_s)
            turn += 1

    seconds: dict[str, list[float]] = {name: [] for name, _, _ in STEPS}
    streams = [asyncio.create_task(stream(number + 1)) for number in range(options.streams)]
    for number in range(options.num + 5):
        probe = await prober.ask(prompt_of(options.prompt_tokens, 10**6 + number, vocabulary), 8)
        if number < 5:
            continue
        for name, start, end in STEPS:
            taken = probe.timeline.seconds(start, end)
            if taken is None:
                raise RuntimeError("a request did not go through prefill and decode")
            seconds[name].append(taken)
    over = True
    await asyncio.gather(*streams)
    await prober.close()
    return seconds | ({STREAM_TOKEN: tokens_s} if len(tokens_s) > 1 else {})


def _line(values: Sequence[float]) -> str:
    deciles = statistics.quantiles(values, n=10)
    return f"p50 {statistics.median(values) * 1e3:6.2f} ms   p90 {deciles[-1] * 1e3:6.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=4, help="streams that keep decode busy")
    parser.add_argument("--num", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], help="a setting of the services, as name=value")
    options = parser.parse_args()
    folder: Path = model_folder(options.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    print_conditions()
    port = free_port()
    print(f"{options.num} prompts of {options.prompt_tokens} tokens, {options.streams} other streams at decode\n")
    flags = ["--local-prefill", "never", "--connector", "tcp"]
    flags += [f"--{assignment}" for assignment in options.set]
    with serving(folder, flags, grpc_port=port):
        seconds = asyncio.run(measure(f"127.0.0.1:{port}", options, vocabulary))
    for name, values in seconds.items():
        print(f"{name:<46} {_line(values)}")


if __name__ == "__main__":
    main()
