"""Time to first token at a cluster that serves nothing else: one prompt after the other through prefill and decode.

Usage: python benchmarks/first_token.py [--model demo|DIR] [--prompt-tokens 64 1000] [--num 60]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics

from cluster_of_processes import free_port, serving
from conditions import conditions
from probe import Prober, prompt_of

from pdserve.models.model_folder import model_folder

WARM_UP = 5


async def measure(address: str, length: int, num: int, vocabulary: int) -> list[float]:
    """Seconds to the first token of each prompt, at the client."""
    prober = Prober(address)
    probes = [await prober.ask(prompt_of(length, 1000 * length + i, vocabulary), 4) for i in range(WARM_UP + num)]
    await prober.close()
    return [probe.ttft_s for probe in probes[WARM_UP:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--num", type=int, default=60)
    options = parser.parse_args()
    folder = model_folder(options.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    for name, value in conditions().items():
        print(f"{name:<12} {value}")
    port = free_port()
    with serving(folder, ["--local-prefill", "never", "--connector", "tcp"], grpc_port=port):
        for length in options.prompt_tokens:
            values = asyncio.run(measure(f"127.0.0.1:{port}", length, options.num, vocabulary))
            p90 = statistics.quantiles(values, n=10)[-1]
            print(f"{length:5d} tokens   p50 {statistics.median(values) * 1e3:6.2f} ms   p90 {p90 * 1e3:6.2f} ms")


if __name__ == "__main__":
    main()
