"""One greedy tenant beside nine quiet ones that each use half of their fair share: its effect on the nine.

A router with a key per tenant, and workers with the step times of `paced_worker.py`, so that their capacity does not depend on
other processes of this machine. First the greedy tenant runs alone, which measures the capacity. Then slices with and without it
alternate, with the same arrivals of the nine in both, so that both run under the same conditions. The greedy tenant keeps
`GREEDY_AT_ONCE` requests open, several times the number of places, and sends the next when one has ended, or soon after one was
refused. It runs in a separate process, so that its answers do not delay the nine at the client's side.

Usage: python benchmarks/fairness.py [--slices 6] [--slice-s 15] [--max-num-seqs 64] [--prefill 0]
                                     [--step-ms 25] [--token-ms 0.2] [--out results/fairness.txt]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from cluster_of_processes import START_S, free_port
from conditions import conditions

from pdserve.common.settings.api_key_file import key_hash, new_key
from pdserve.v1 import inference_pb2, request_pb2
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub

NUM_QUIET = 9
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 96), (16, 48)
"""Ranges of uniformly drawn lengths."""
VOCABULARY = 2000
GREEDY_AT_ONCE = 160
SHARE_OFFERED = 0.5
SEED = 11
PROCESS_S = 1.0
"""Seconds that a process takes to start, approximately."""
AHEAD_S = 8.0
"""Seconds for which the greedy tenant runs before the nine begin, so that its first requests have ended at different times."""


@dataclass
class Seen:
    """Results of some tenants in slices of one kind."""

    ttft_s: list[float] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    """Seconds in the router from the tokenized prompt to its place."""
    num_asked: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    """Prompt and output tokens of served requests."""
    ended_s: list[float] = field(default_factory=list)
    """End of each served request; `time.monotonic()` seconds, which all processes of a machine share."""


def line(name: str, slices: list[Seen]) -> str:
    """One line of results. Counts are over all slices, times of the median slice, which leaves out pauses of the whole machine."""
    asked, served, refused = (
        sum(values)
        for values in zip(*((seen.num_asked, len(seen.ttft_s), seen.num_refused) for seen in slices), strict=True)
    )
    ttft = "  ".join(f"p{part * 100:g} {median_part(slices, part) * 1e3:7.1f} ms" for part in (0.5, 0.9, 0.99))
    queue = statistics.median(part_of(seen.queue_s, 0.99) for seen in slices)
    return (
        f"{name:<26} asked {asked:5d}  served {served:5d}  refused {refused:5d}  TTFT {ttft}  "
        f"queue in the router p99 {queue * 1e3:7.1f} ms"
    )


def median_part(slices: list[Seen], part: float) -> float:
    """Median over the slices of a percentile of TTFT."""
    return statistics.median(part_of(seen.ttft_s, part) for seen in slices)


def part_of(values: list[float], part: float) -> float:
    """The quantile `part` of the values; 0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


@dataclass(frozen=True)
class Tenants:
    """Keys of the tenants, and their keys file."""

    keys: dict[str, str]

    @classmethod
    def make(cls, folder: Path) -> Tenants:
        keys = {name: new_key() for name in ("greedy", *(f"quiet-{number}" for number in range(NUM_QUIET)))}
        entries = (f'[[keys]]\nname = "{name}"\nsha256 = "{key_hash(key)}"\n' for name, key in keys.items())
        (folder / "keys.toml").write_text("".join(entries))
        return cls(keys)


@contextmanager
def fleet(num_prefill: int, max_num_seqs: int, keys: Path, pace: dict[str, str]) -> Iterator[str]:
    """The address of a router's gRPC front end."""
    addresses = {"prefill": [free_port() for _ in range(num_prefill)], "decode": [free_port()]}
    http_port, grpc_port = free_port(), free_port()
    paced = str(Path(__file__).with_name("paced_worker.py"))
    commands = [
        [sys.executable, paced, role, "--port", str(port), f"--max-num-seqs={max_num_seqs}", *interval]
        for role, ports in addresses.items()
        for port in ports
        for interval in [["--stream-interval=8"] if role == "decode" else []]
    ]
    known = [flag for role, ports in addresses.items() for port in ports for flag in (f"--{role}", f"127.0.0.1:{port}")]
    commands.append(
        [
            sys.executable, "-m", "pdserve.cli.main", "router", "--port", str(http_port), "--grpc-port", str(grpc_port),
            *known, f"--api-keys-file={keys}", "--log-level=warning",
        ]
    )  # fmt: skip
    environ = os.environ | pace | {"OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) for command in commands]
    try:
        until_s = time.monotonic() + START_S
        while not is_healthy(http_port, 1 + num_prefill):
            if time.monotonic() > until_s or any(process.poll() is not None for process in processes):
                raise RuntimeError("the fleet did not start")
            time.sleep(0.2)
        yield f"127.0.0.1:{grpc_port}"
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGINT)
        for process in processes:
            process.wait(60)


def is_healthy(http_port: int, num_workers: int) -> bool:
    try:
        health = httpx.get(f"http://127.0.0.1:{http_port}/health", timeout=1)
    except httpx.HTTPError:
        return False
    return num_workers == sum(int(role["live"]) for role in health.json()["workers"].values())


async def ask(stub: Any, key: str, draw: random.Random, seen: Seen) -> bool:
    """Send one request; False if it was refused."""
    prompt = [draw.randrange(10, VOCABULARY) for _ in range(draw.randint(*PROMPT_TOKENS))]
    output = draw.randint(*OUTPUT_TOKENS)
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=prompt),
        sampling=request_pb2.SamplingParams(temperature=0, max_tokens=output, ignore_eos=True),
        stream=True,
    )
    seen.num_asked += 1
    start = time.perf_counter()
    first_s = None
    try:
        async for response in stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=300):
            first_s = time.perf_counter() - start if first_s is None else first_s
            moments = {moment.name: moment.unix_ns for moment in response.moments}
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        seen.num_refused += 1
        return False
    if first_s is not None:
        seen.ttft_s.append(first_s)
        seen.queue_s.append((moments["admitted"] - moments["tokenized"]) / 1e9)
        seen.num_tokens += len(prompt) + output
        seen.ended_s.append(time.monotonic())
    return True


async def keep_asking(stub: InferenceServiceStub, key: str, seed: int, seen: Seen, until_s: float) -> None:
    """Send requests of the greedy tenant, one after the other."""
    draw = random.Random(seed)
    while time.perf_counter() < until_s:
        if not await ask(stub, key, draw, seen):
            await asyncio.sleep(0.05)


async def arrive(stub: InferenceServiceStub, key: str, seed: int, seen: Seen, per_s: float, until_s: float) -> None:
    """Send requests of a quiet tenant at random times, independent of earlier ones."""
    draw = random.Random(seed)
    asked: set[asyncio.Task[bool]] = set()
    while (wait_s := draw.expovariate(per_s)) < until_s - time.perf_counter():
        await asyncio.sleep(wait_s)
        asked.add(asyncio.create_task(ask(stub, key, random.Random(draw.random()), seen)))
    if asked:
        await asyncio.gather(*asked)


async def greedily(address: str, key: str, seconds: float) -> Seen:
    """Run the greedy tenant for `seconds`."""
    seen, until_s = Seen(), time.perf_counter() + seconds
    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        stub = InferenceServiceStub(channel)
        for number in range(GREEDY_AT_ONCE):
            group.create_task(keep_asking(stub, key, number, seen, until_s))
    return seen


async def quietly(address: str, tenants: Tenants, seed: int, per_s: float, seconds: float, seen: Seen) -> None:
    """Run the nine for `seconds`; returns when all their requests have ended."""
    until_s = time.perf_counter() + seconds
    async with grpc.aio.insecure_channel(address) as channel, asyncio.TaskGroup() as group:
        stub = InferenceServiceStub(channel)
        for number in range(NUM_QUIET):
            key = tenants.keys[f"quiet-{number}"]
            group.create_task(arrive(stub, key, seed * 100 + number, seen, per_s, until_s))


class GreedyProcess:
    """The greedy tenant in a separate process."""

    def __init__(self, address: str, key: str, seconds: float) -> None:
        command = [sys.executable, __file__, "--greedy", address, "--slice-s", str(seconds)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PDSERVE_API_KEY": key}
        )

    def wait(self, into: Seen) -> None:
        """Wait until it has ended, and add its results."""
        output, _ = self._process.communicate(timeout=600)
        found = json.loads(output)
        into.ttft_s += found["ttft_s"]
        into.queue_s += found["queue_s"]
        into.ended_s += found["ended_s"]
        for name in ("num_asked", "num_refused", "num_tokens"):
            setattr(into, name, getattr(into, name) + found[name])


def measure(address: str, tenants: Tenants, slices: int, slice_s: float) -> list[str]:
    """The lines of the result."""
    greedy_key = tenants.keys["greedy"]
    alone, end_s = Seen(), time.monotonic() + PROCESS_S + AHEAD_S + slice_s
    GreedyProcess(address, greedy_key, AHEAD_S + slice_s).wait(alone)
    # requests that end after the last arrival do not count, since the fleet was not full then
    requests_per_s = sum(end_s - slice_s <= moment < end_s - PROCESS_S for moment in alone.ended_s) / (
        slice_s - PROCESS_S
    )
    per_s = SHARE_OFFERED * requests_per_s / (NUM_QUIET + 1)
    lines = [
        f"the greedy tenant alone: {requests_per_s:.1f} requests/s; each of the {NUM_QUIET} offers {per_s:.2f} requests/s",
    ]
    without, beside, greedy = [], [], Seen()
    for number in range(slices):
        without.append(Seen())
        asyncio.run(quietly(address, tenants, number, per_s, slice_s, without[-1]))
        process = GreedyProcess(address, greedy_key, slice_s + PROCESS_S + AHEAD_S)
        time.sleep(PROCESS_S + AHEAD_S)
        beside.append(Seen())
        asyncio.run(quietly(address, tenants, number, per_s, slice_s, beside[-1]))
        process.wait(greedy)
    ratio = median_part(beside, 0.99) / median_part(without, 0.99)
    lines += [
        line("nine without the greedy", without),
        line("nine beside the greedy", beside),
        line("the greedy beside the nine", [greedy]),
        f"TTFT p99 of the nine, in the median slice: {ratio:.2f} times that without the greedy one",
        f"tokens: {sum(seen.num_tokens for seen in beside)} of the nine, {greedy.num_tokens} of the greedy",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", type=int, default=6)
    parser.add_argument("--slice-s", type=float, default=15.0)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--token-ms", type=float, default=0.2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--greedy", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.greedy:
        seen = asyncio.run(greedily(options.greedy, os.environ["PDSERVE_API_KEY"], options.slice_s))
        sys.stdout.write(json.dumps(asdict(seen)))
        return
    stands = conditions()
    with tempfile.TemporaryDirectory() as folder:
        tenants = Tenants.make(Path(folder))
        pace = {"PACED_STEP_MS": str(options.step_ms), "PACED_TOKEN_MS": str(options.token_ms)}
        with fleet(options.prefill, options.max_num_seqs, Path(folder) / "keys.toml", pace) as address:
            lines = measure(address, tenants, options.slices, options.slice_s)
    shape = (
        f"{options.prefill} prefill and 1 decode worker, steps of {options.step_ms:g} ms and {options.token_ms:g} ms per token, "
        f"max_num_seqs {options.max_num_seqs}; prompts of "
        f"{PROMPT_TOKENS[0]} to {PROMPT_TOKENS[1]} tokens, outputs of {OUTPUT_TOKENS[0]} to {OUTPUT_TOKENS[1]}; "
        f"{options.slices} slices of {options.slice_s:g} s each"
    )
    text = "\n".join([*(f"{name}: {value}" for name, value in stands.items()), shape, "", *lines]) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
