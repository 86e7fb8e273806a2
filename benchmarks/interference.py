"""Time between two tokens of running streams while long prompts arrive: separate prefill and decode beside workers that do both.

Two clusters of two workers, each with one core. In one a worker prefills and the other decodes; in the other both decode, and
prefill their own prompts. Streams without end run in each, and prompts arrive at fixed times, as many for both. The clusters are
measured in turns; idle workers wait and take no time. Prompts are random, so nothing is found in a cache.

Usage: python benchmarks/interference.py [--model demo|DIR] [--streams 8] [--prompt-tokens 1000] [--every 0.5] [--seconds 10]
                                         [--rounds 7] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from cluster_of_processes import free_port, serving
from conditions import conditions
from probe import prompt_of
from quiet_rounds import quiet

from pdserve.models.model_folder import model_folder
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2

SEPARATE, TOGETHER = "prefill and decode", "both at each worker"
FLAGS = {
    SEPARATE: ["--local-prefill", "never"],
    TOGETHER: ["--prefill", "0", "--decode", "2", "--local-prefill", "always"],
}
STREAM_PROMPT_TOKENS = 32
SETTLE_S = 1.0
"""Streams run as long before prompts arrive."""
QUANTILES = {"p50": 0.5, "p99": 0.99}


@dataclass(frozen=True)
class Load:
    streams: int
    prompt_tokens: int
    every_s: float
    seconds: float
    vocabulary: int
    max_model_len: int


async def gaps(address: str, load: Load, seeds: itertools.count[int]) -> tuple[list[float], list[float]]:
    """Seconds between two messages of the streams, and to the first token of the prompts, while prompts arrive."""
    found: list[float] = []
    counts = asyncio.Event()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        def ask(num_prompt: int, num_output: int) -> Any:
            return stub.Generate(
                inference_pb2.GenerateRequest(
                    tokens=inference_pb2.TokenPrompt(token_ids=prompt_of(num_prompt, next(seeds), load.vocabulary)),
                    sampling=request_pb2.SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True),
                    stream=True,
                ),
                wait_for_ready=True,
            )

        async def stream() -> None:
            while True:
                last = 0.0
                async for _ in ask(STREAM_PROMPT_TOKENS, load.max_model_len - STREAM_PROMPT_TOKENS):
                    now = time.perf_counter()
                    if last and counts.is_set():
                        found.append(now - last)
                    last = now

        async def first_token_s() -> float:
            began = time.perf_counter()
            seconds = 0.0
            async for _ in ask(load.prompt_tokens, 2):
                seconds = seconds or time.perf_counter() - began
            return seconds

        streams = [asyncio.create_task(stream()) for _ in range(load.streams)]
        await asyncio.sleep(SETTLE_S)
        counts.set()
        prompts = []
        for _ in range(round(load.seconds / load.every_s)):
            prompts.append(asyncio.create_task(first_token_s()))
            await asyncio.sleep(load.every_s)
        ttfts = await asyncio.gather(*prompts)
        for task in streams:
            task.cancel()
        for task in streams:
            with suppress(asyncio.CancelledError):
                await task
    return found, ttfts


def figures_of(found: list[float], ttfts: list[float]) -> dict[str, float]:
    """Milliseconds, and the number of tokens."""
    ordered = sorted(found)
    result = {f"ITL {name}": ordered[int(part * (len(ordered) - 1))] * 1e3 for name, part in QUANTILES.items()}
    return result | {"TTFT p50": statistics.median(ttfts) * 1e3, "tokens": len(found)}


def summary(rounds: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, and the ratios of the first side to the second with the lowest and highest of a round."""
    names = list(rounds[SEPARATE][0])
    middle = {
        side: {name: statistics.median(one[name] for one in found) for name in names} for side, found in rounds.items()
    }
    ratios = {}
    for name in names:
        each = [a[name] / b[name] for a, b in zip(rounds[SEPARATE], rounds[TOGETHER], strict=True)]
        ratios[name] = [statistics.median(each), min(each), max(each)]
    return {"medians": middle, "ratio, lowest, highest": ratios, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two prompts")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = model_folder(options.model)
    config = json.loads((folder / "config.json").read_text())
    load = Load(
        options.streams, options.prompt_tokens, options.every, options.seconds, config["vocab_size"],
        config["max_position_embeddings"],
    )  # fmt: skip
    ports = {side: free_port() for side in FLAGS}
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in FLAGS}
    seeds = itertools.count(1)
    facts = conditions() | {"model": folder.name, "load": str(load)}
    with (
        serving(folder, FLAGS[SEPARATE], pinned=True, grpc_port=ports[SEPARATE]),
        serving(folder, FLAGS[TOGETHER], grpc_port=ports[TOGETHER]),
    ):
        for number in range(options.rounds + 1):
            for side in list(FLAGS) if number % 2 else list(FLAGS)[::-1]:
                address = f"127.0.0.1:{ports[side]}"
                found = figures_of(*quiet(lambda: asyncio.run(gaps(address, load, seeds))))  # noqa: B023
                if number:  # the first round warms up
                    rounds[side].append(found)
                print(f"round {number}: {side:<20} {json.dumps(found)}", flush=True)
    report = {"conditions": facts} | summary(rounds)
    print(json.dumps(report["medians"]), json.dumps(report["ratio, lowest, highest"]), sep="\n")
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
