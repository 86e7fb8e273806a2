"""pdserve beside vLLM's prefill and decode servers: rounds in turns, the idle side stopped, medians, ratios.

Both systems have one core for prefill and one for decode, whole processes pinned; pdserve's router is beside prefill. The client is
not pinned. vLLM's workers spin when idle, so all its processes are stopped (SIGSTOP) while pdserve is measured. pdserve's idle
processes wait; the share of a core that they used is reported. A measurement beside which other processes were busy is repeated.
`vllm_peer.py` says how its environment is made. A shape is CONCURRENCYxPROMPT+OUTPUT[:REQUESTS], with 4 requests per stream, and at
least 6, unless REQUESTS is given.

Usage: python benchmarks/side_by_side.py --model DIR --vllm-python ENVIRONMENT/bin/python [--rounds 7] [--shapes 1x256+64 16x256+64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import psutil
from cluster_of_processes import serving
from conditions import conditions
from load import LoadResult, LoadShape, PdServe, Target, VllmPrefillDecode, run_load
from process_trees import running, stopped
from quiet_rounds import quiet
from vllm_peer import prefill_decode

FIGURES = {"requests_per_s": max, "ttft_p50_s": min, "tpot_p50_s": min}
"""Figure -> which of two values is the better one."""
IDLE_S = 5.0
SHAPE = re.compile(r"(\d+)x(\d+)\+(\d+)(?::(\d+))?")


def shape_of(text: str, vocabulary: int, seed: int) -> LoadShape:
    match = SHAPE.fullmatch(text)
    if match is None:
        raise SystemExit(f"--shapes: {text!r} is not CONCURRENCYxPROMPT+OUTPUT[:REQUESTS]")
    concurrency, prompt, output = (int(number) for number in match.groups()[:3])
    requests = int(match[4]) if match[4] else max(6, 4 * concurrency)
    return LoadShape(requests, concurrency, prompt, output, vocabulary, seed)


def interleave(
    targets: Mapping[str, tuple[Target, Sequence[int]]], text: str, vocabulary: int, rounds: int, seeds: Iterator[int]
) -> dict[str, list[LoadResult]]:
    """One target after the other, again and again: a drift of the machine hits both.

    seeds: of prompts, never the same for two measurements, or a cache would have those of an earlier shape.
    """
    results: dict[str, list[LoadResult]] = {name: [] for name in targets}
    for number in range(rounds):
        names = list(targets) if number % 2 else list(targets)[::-1]
        for name in names:
            target, pids = targets[name]
            with running(pids):
                result = quiet(lambda: asyncio.run(run_load(target, shape_of(text, vocabulary, next(seeds)))))  # noqa: B023
            results[name].append(result)
            print(f"  {text}, round {number + 1}: {name:<10} {result}", flush=True)
    return results


def idle_share(parent: int, others: Sequence[int]) -> float:
    """CPU time per second of all descendants that run, but for the trees of `others`."""
    stopped = {process.pid for pid in others for process in psutil.Process(pid).children(recursive=True)} | set(others)
    processes = [process for process in psutil.Process(parent).children(recursive=True) if process.pid not in stopped]
    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    time.sleep(IDLE_S)
    return (sum(sum(process.cpu_times()[:2]) for process in processes) - before) / IDLE_S


def summary(results: Mapping[str, list[LoadResult]], ours: str, peer: str) -> dict[str, object]:
    """Medians of each side, and ratios with the lowest and highest ratio of a round; best rounds of each side, and their ratios.

    Other machines on the same host slow a round, never speed it up: the best rounds are those that they disturbed least.
    """
    middle = {
        name: {figure: statistics.median(getattr(result, figure) for result in rounds) for figure in FIGURES}
        for name, rounds in results.items()
    }
    best = {
        name: {figure: better(getattr(result, figure) for result in rounds) for figure, better in FIGURES.items()}
        for name, rounds in results.items()
    }
    ratios = {}
    for figure in FIGURES:
        per_round = [getattr(a, figure) / getattr(b, figure) for a, b in zip(results[ours], results[peer], strict=True)]
        ratios[figure] = [middle[ours][figure] / middle[peer][figure], min(per_round), max(per_round)]
    raw = {
        name: [{figure: getattr(result, figure) for figure in FIGURES} for result in rounds]
        for name, rounds in results.items()
    }
    return {
        "medians": middle,
        "pdserve / vLLM, lowest, highest": ratios,
        "best rounds": best,
        "pdserve / vLLM, best rounds": {figure: best[ours][figure] / best[peer][figure] for figure in FIGURES},
        "rounds": raw,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", default=["1x256+64", "16x256+64"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    report: dict[str, object] = {
        "conditions": conditions()
        | {"model": options.model.name, "rounds": str(options.rounds), "idle side": "stopped"}
    }
    with (
        tempfile.TemporaryDirectory() as scratch,
        prefill_decode(options.vllm_python, options.model, Path(scratch)) as (prefill, decode, vllm),
        stopped(vllm),
        serving(options.model, pinned=True) as url,
    ):
        ours = PdServe(f"{url}/v1/completions", options.model.name)
        peer = VllmPrefillDecode(f"{prefill}/v1/completions", f"{decode}/v1/completions")
        targets: dict[str, tuple[Target, Sequence[int]]] = {ours.name: (ours, []), peer.name: (peer, vllm)}
        report["share of a core of idle pdserve"] = idle_share(os.getpid(), vllm)
        seeds = count()
        for text in options.shapes:
            compared = summary(interleave(targets, text, vocabulary, options.rounds, seeds), ours.name, peer.name)
            report[text] = compared
            for name in ("pdserve / vLLM, lowest, highest", "pdserve / vLLM, best rounds"):
                print(f"{text}: {name} {json.dumps(compared[name])}", flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
