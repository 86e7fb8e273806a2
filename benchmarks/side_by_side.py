"""pdserve beside a vLLM prefill/decode pair that is already running: interleaved rounds, medians, ratios.

The vLLM servers are started by hand, one core each, with NIXL between them (KV connector `NixlConnector`). Whole process
trees are pinned: theirs by hand, `taskset -acp 0 PID` for prefill and `taskset -acp 1 PID` for decode, ours by this
script, the router beside prefill. The client is not pinned.

Usage: python benchmarks/side_by_side.py --model DIR --vllm-prefill http://127.0.0.1:8100 --vllm-decode http://127.0.0.1:8200
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from pathlib import Path

from cluster_of_processes import serving
from conditions import conditions
from load import LoadResult, LoadShape, PdServe, Target, VllmPrefillDecode, run_load

FIGURES = ("requests_per_s", "ttft_p50_s", "tpot_p50_s")


async def interleave(targets: list[Target], shape: LoadShape, rounds: int) -> dict[str, list[LoadResult]]:
    """One target after the other, again and again: a drift of the machine hits both."""
    results: dict[str, list[LoadResult]] = {target.name: [] for target in targets}
    for number in range(rounds):
        for target in targets:
            result = await run_load(target, LoadShape(**{**_fields(shape), "seed": number}))
            results[target.name].append(result)
            print(f"  {shape.concurrency:2d} at once, round {number + 1}: {target.name:<10} {result}", flush=True)
    return results


def _fields(shape: LoadShape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in LoadShape.__slots__}


def medians(results: list[LoadResult]) -> dict[str, float]:
    return {figure: statistics.median(getattr(result, figure) for result in results) for figure in FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-prefill", required=True)
    parser.add_argument("--vllm-decode", required=True)
    parser.add_argument("--peer", default="", help="what runs there, for the conditions: version, settings, cores")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    peer = VllmPrefillDecode(f"{options.vllm_prefill}/v1/completions", f"{options.vllm_decode}/v1/completions")
    report: dict[str, object] = {
        "conditions": conditions() | {"model": options.model.name, "rounds": str(options.rounds), "peer": options.peer}
    }
    with serving(options.model, pinned=True) as url:
        ours = PdServe(f"{url}/v1/completions", options.model.name)
        for concurrency, num_requests in ((1, 8), (16, 64)):
            shape = LoadShape(num_requests, concurrency, 256, 64, vocabulary)
            results = asyncio.run(interleave([ours, peer], shape, options.rounds))
            middle = {name: medians(rounds) for name, rounds in results.items()}
            ratio = {figure: middle[ours.name][figure] / middle[peer.name][figure] for figure in FIGURES}
            raw = {
                name: [{figure: getattr(result, figure) for figure in FIGURES} for result in rounds]
                for name, rounds in results.items()
            }
            report[f"{concurrency} at once, 256+64 tokens"] = {
                "medians": middle,
                "pdserve / vLLM": ratio,
                "rounds": raw,
            }
            print(f"{concurrency} at once: pdserve / vLLM {ratio}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
