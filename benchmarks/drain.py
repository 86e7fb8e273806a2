"""Streams whose decode worker drains: their longest pause between two tokens, next to rounds in which nothing drains.

One prefill and two decode workers. A round has several streams, half of them at each decode worker. In every second round one of
the decode workers drains in the middle of it (`POST /workers/ID/drain`), and is started again afterwards.

With `--rolling` there are two workers of each role, and streams follow one another all the time, while in each round every worker
drains, ends and starts again, one after the other. Between two rounds nothing drains for as long.

Usage: python benchmarks/drain.py [--model demo] [--rounds 10] [--streams 8] [--prompt 600] [--tokens 300] [--rolling]
                                  [--set name=value]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path

import httpx
from cluster_of_processes import serving
from completions import Completion, completion_body, stream_completion
from conditions import print_conditions
from metric_values import metrics

from pdserve.models.model_folder import model_folder

SEED = 5
START_S = 60.0


async def stream(
    http: httpx.AsyncClient, url: str, prompt: list[int], tokens: int, begun: asyncio.Event
) -> list[float]:
    """Seconds between two messages with tokens."""

    def note(completion: Completion) -> None:
        if len(completion.token_ids) >= tokens // 4:
            begun.set()

    completion = await stream_completion(http, f"{url}/v1/completions", completion_body(prompt, tokens), note)
    if (count := len(completion.token_ids)) != tokens:
        raise RuntimeError(f"a stream had {count} tokens of {tokens}")
    return completion.gaps_s


async def round_of(
    url: str, options: argparse.Namespace, draw: random.Random, vocabulary: int, name: str
) -> list[list[float]]:
    """Gaps of each stream. name: the worker that drains; empty: none."""
    async with httpx.AsyncClient(timeout=600) as http:
        begun = [asyncio.Event() for _ in range(options.streams)]
        prompts = [[draw.randrange(10, vocabulary) for _ in range(options.prompt)] for _ in begun]
        tasks = [
            asyncio.create_task(stream(http, url, prompt, options.tokens, event))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        if name:
            (await http.post(f"{url}/workers/{name}/drain", json={})).raise_for_status()
        gaps = await asyncio.gather(*tasks)
        if name:
            await joined(http, url, "decode")
        return gaps


async def joined(http: httpx.AsyncClient, url: str, role: str) -> None:
    """Wait until a worker that drains has left, and has joined again."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        workers = (await http.get(f"{url}/health")).json()["workers"][role]
        if workers["live"] == 2 and not workers["draining"]:
            return
        await asyncio.sleep(0.2)
    raise RuntimeError(f"a {role} worker did not come back")


async def streams_without_end(
    url: str, options: argparse.Namespace, vocabulary: int, gaps: list[tuple[float, list[float]]], over: asyncio.Event
) -> None:
    """gaps: gets the end of each stream and its gaps."""
    draw = random.Random(SEED)

    async def client(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            prompt = [draw.randrange(10, vocabulary) for _ in range(options.prompt)]
            found = await stream(http, url, prompt, options.tokens, asyncio.Event())
            gaps.append((time.monotonic(), found))

    async with httpx.AsyncClient(timeout=600) as http, asyncio.TaskGroup() as group:
        for _ in range(options.streams):
            group.create_task(client(http))


async def roll(
    url: str, options: argparse.Namespace, vocabulary: int
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Gaps of the streams that ended while all workers were restarted in turn, and of the others."""
    found, over = {"stay": list[list[float]](), "roll": list[list[float]]()}, asyncio.Event()
    gaps: list[tuple[float, list[float]]] = []
    async with httpx.AsyncClient(timeout=60) as http:
        workers = (await http.get(f"{url}/debug/status")).json()["workers"]
        load = asyncio.create_task(streams_without_end(url, options, vocabulary, gaps, over))
        for number in range(options.rounds):
            since = time.monotonic()
            for worker in workers:
                (await http.post(f"{url}/workers/{worker['worker_id']}/drain", json={})).raise_for_status()
                await joined(http, url, worker["role"])
            took = time.monotonic() - since
            found["roll"] += [each for ended, each in gaps if ended >= since]
            print(f"round {number}: {len(workers)} workers restarted in {took:.1f} s")
            since = time.monotonic()
            await asyncio.sleep(took / 4)
            found["stay"] += [each for ended, each in gaps if ended >= since]
            if load.done():
                break
        over.set()
        await load
    return found, await counted(url)


async def measure(
    url: str, options: argparse.Namespace, vocabulary: int
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    draw, found = random.Random(SEED), {"stay": list[list[float]](), "drain": list[list[float]]()}
    async with httpx.AsyncClient() as http:
        names = [
            worker["worker_id"]
            for worker in (await http.get(f"{url}/debug/status")).json()["workers"]
            if worker["role"] == "decode"
        ]
        for number in range(options.rounds + 1):
            drains = number % 2 == 0
            gaps = await round_of(url, options, draw, vocabulary, names[number // 2 % 2] if drains else "")
            if number:  # the first round warms up
                found["drain" if drains else "stay"] += gaps
    return found, await counted(url)


async def counted(url: str) -> dict[str, float]:
    """What the router has counted."""
    async with httpx.AsyncClient() as http:
        counts = await metrics(http, f"{url}/metrics")
    names = "requests_total", "migrations_total", "attempts_total", "migration_pause_seconds_sum"
    shown = tuple(f"pdserve_{name}" for name in names)
    return {name: value for name, value in counts.items() if name.startswith(shown)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=600, help="tokens")
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--rolling", action="store_true", help="restart all workers in turn under load")
    parser.add_argument("--set", action="append", default=[], help="a setting, name=value")
    options = parser.parse_args()
    folder = model_folder(options.model)
    config = folder / "config.json"
    vocabulary = json.loads(config.read_text())["vocab_size"] if config.exists() else 1000
    flags = [
        "--prefill",
        "2" if options.rolling else "1",
        "--decode",
        "2",
        *(f"--{setting}" for setting in options.set),
    ]
    print_conditions()
    print(
        f"{options.rounds} rounds of {options.streams} streams, prompts of {options.prompt} tokens, answers of {options.tokens}"
    )
    with serving(Path(options.model) if Path(options.model).exists() else folder, flags) as url:
        found, counts = asyncio.run((roll if options.rolling else measure)(url, options, vocabulary))
    for name, streams in found.items():
        longest = [max(gaps) * 1e3 for gaps in streams]
        gap = statistics.median(gap for gaps in streams for gap in gaps) * 1e3
        print(
            f"{name:<6} gap p50 {gap:6.1f} ms; longest of a stream: median {statistics.median(longest):6.1f}, "
            f"p90 {statistics.quantiles(longest, n=10)[-1]:6.1f}, longest of all {max(longest):6.1f}"
        )
    for name, count in counts.items():
        print(f"{name} {count:g}")


if __name__ == "__main__":
    main()
