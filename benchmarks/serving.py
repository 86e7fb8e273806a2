"""TTFT, TPOT and requests/s of a cluster on this machine: router, one prefill and one decode worker.

Usage: python benchmarks/serving.py [--model demo|DIR] [--prompt-tokens 256] [--output-tokens 64] [--set name=value ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from cluster_of_processes import serving
from conditions import print_conditions
from load import LoadShape, PdServe, run_load

from pdserve.models.model_folder import model_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--set", action="append", default=[], help="a setting of the services, as name=value")
    options = parser.parse_args()
    folder = model_folder(options.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    print_conditions()
    with serving(folder, [f"--{assignment}" for assignment in options.set]) as url:
        for concurrency, num_requests in ((1, 10), (4, 32), (16, 96)):
            shape = LoadShape(num_requests, concurrency, options.prompt_tokens, options.output_tokens, vocabulary)
            result = asyncio.run(run_load(PdServe(f"{url}/v1/completions", Path(folder).name), shape))
            print(f"{concurrency:3d} at once   {result}")


if __name__ == "__main__":
    main()
