"""A load that changes between prompts and answers, on two workers of each role, with and without `role_switch`.

Phases alternate: long prompts with short answers, then short prompts with long answers, each at a rate that two workers of the role
that has the work cannot serve and three can. Arrivals are Poisson's. Workers have the bundled model and simulated steps
(`paced_worker.py`): real ones would share the cores of a machine, so that no role could help another.

Rounds with and without `role_switch` take turns over the same workers. Each has a router of its own, and begins with the roles
with which the workers were started; both rounds of a pair have the same arrivals.

Usage: python benchmarks/square_wave.py [--pairs 2] [--phases 4] [--phase-s 20] [--dwell-s 5] [--set name=value]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cluster_of_processes import free_port
from conditions import print_conditions

from pdserve.common.net.public_server import make_public_channel
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2

SEED = 7
VOCABULARY = 2000
START_S = 120.0
PACE = {"PACED_STEP_MS": "20", "PACED_TOKEN_MS": "0.2"}
MAX_NUM_SEQS = 16
STEP_TOKENS = 512
ROLES = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "decode"}


@dataclass(frozen=True)
class Phase:
    """A kind of load. A worker of the role that has the work serves `capacity` of its requests per second."""

    name: str
    prompt_tokens: int
    output_tokens: int
    capacity: float


STEP_S, TOKEN_S = float(PACE["PACED_STEP_MS"]) / 1e3, float(PACE["PACED_TOKEN_MS"]) / 1e3
PROMPTS = Phase("prompts", 1000, 8, STEP_TOKENS / (STEP_S + STEP_TOKENS * TOKEN_S) / 1000)
ANSWERS = Phase("answers", 16, 200, MAX_NUM_SEQS / (200 * (STEP_S + MAX_NUM_SEQS * TOKEN_S)))
NUM_CONNECTIONS = 16
"""A connection carries at most 100 calls."""
LOAD = 2.5
"""Rate of arrivals, in workers of the role that has the work."""


@dataclass
class Seen:
    """Answers of one phase kind in one kind of round."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    num_failed: int = 0


@contextmanager
def processes(commands: list[list[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    environ = os.environ | PACE | {"OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL) for command in commands]
    try:
        yield started
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)
        for process in started:
            process.wait(60)


def worker_commands(ports: dict[str, int]) -> list[list[str]]:
    paced = str(Path(__file__).with_name("paced_worker.py"))
    sizes = [f"--max-num-seqs={MAX_NUM_SEQS}", f"--max-num-batched-tokens={STEP_TOKENS}", "--connector=tcp"]
    return [
        [sys.executable, paced, ROLES[name], "--port", str(port), "--worker-id", name, "--log-level=warning", *sizes]
        for name, port in ports.items()
    ]


@contextmanager
def router(ports: dict[str, int], flags: list[str]) -> Iterator[tuple[str, str]]:
    """HTTP and gRPC address of a router over these workers."""
    http_port, grpc_port = free_port(), free_port()
    known = [flag for name, port in ports.items() for flag in (f"--{ROLES[name]}", f"127.0.0.1:{port}")]
    command = [
        sys.executable, "-m", "pdserve.cli.main", "router", "--port", str(http_port), "--grpc-port", str(grpc_port),
        "--log-level=warning", *known, *flags,
    ]  # fmt: skip
    with processes([command]) as [process]:
        until_s = time.monotonic() + START_S
        while live(http_port) != len(ports):
            if time.monotonic() > until_s or process.poll() is not None:
                raise RuntimeError("the cluster did not start")
            time.sleep(0.2)
        yield f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}"


def live(http_port: int) -> int:
    try:
        health = httpx.get(f"http://127.0.0.1:{http_port}/health", timeout=1, trust_env=False)
    except httpx.HTTPError:
        return 0
    return sum(role["live"] for role in health.json()["workers"].values())


async def reset_roles(http: str) -> None:
    """The roles with which the workers were started."""
    async with httpx.AsyncClient(base_url=f"http://{http}", trust_env=False) as client:
        for name, role in ROLES.items():
            (await client.post(f"/workers/{name}/role", json={"role": role, "force": True})).raise_for_status()
    await asyncio.sleep(1.5)


async def ask(stub: Any, phase: Phase, prompt: list[int], seen: Seen) -> None:
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=prompt),
        sampling=request_pb2.SamplingParams(temperature=0, max_tokens=phase.output_tokens, ignore_eos=True),
        stream=True,
    )
    start = time.perf_counter()
    first_s = last_s = 0.0
    try:
        async for response in stub.Generate(request, timeout=300):
            if response.token_ids:
                last_s = time.perf_counter()
                first_s = first_s or last_s
    except Exception as error:
        seen.num_failed += 1
        print(f"failed: {error!r:.200}")
        return
    seen.ttft_s.append(first_s - start)
    seen.tpot_s.append((last_s - first_s) / (phase.output_tokens - 1))


async def wave(grpc: str, options: argparse.Namespace, number: int, seen: dict[str, Seen]) -> None:
    """number: of the round; the two of a pair have the same arrivals, and each round has its own tokens, so nothing is cached."""
    draw, tokens = random.Random(SEED + number // 2), random.Random(SEED + 1000 + number)
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(make_public_channel(grpc)) for _ in range(NUM_CONNECTIONS)]
        stubs = itertools.cycle([inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels])
        tasks = []
        for place in range(options.phases):
            phase = (PROMPTS, ANSWERS)[place % 2]
            at_s = time.monotonic()
            until_s = at_s + options.phase_s
            while True:
                # a client that is late sends at once, so that both rounds of a pair have the same requests
                at_s += draw.expovariate(LOAD * phase.capacity)
                prompt = [tokens.randrange(10, VOCABULARY) for _ in range(phase.prompt_tokens)]
                if at_s >= until_s:
                    break
                await asyncio.sleep(at_s - time.monotonic())
                tasks.append(asyncio.create_task(ask(next(stubs), phase, prompt, seen[phase.name])))
            await asyncio.sleep(until_s - time.monotonic())
        await asyncio.gather(*tasks)


def switches(http: str) -> dict[str, float]:
    """Role -> changes to it that the router has asked for."""
    text = httpx.get(f"http://{http}/metrics", trust_env=False).text
    lines = [
        line for line in text.splitlines() if line.startswith("pdserve_role_changes_total") and 'outcome="done"' in line
    ]
    return {line.partition('role="')[2].partition('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--phases", type=int, default=4)
    parser.add_argument("--phase-s", type=float, default=20.0)
    parser.add_argument("--dwell-s", type=float, default=5.0)
    parser.add_argument("--set", action="append", default=[], help="a setting of the router, name=value")
    options = parser.parse_args()
    print_conditions()
    for phase in (PROMPTS, ANSWERS):
        print(
            f"{phase.name:<8} {phase.prompt_tokens} tokens in, {phase.output_tokens} out, "
            f"{LOAD * phase.capacity:.1f} requests/s; a worker serves {phase.capacity:.1f}"
        )
    found: dict[str, dict[str, Seen]] = {
        kind: {phase.name: Seen() for phase in (PROMPTS, ANSWERS)} for kind in ("never", "auto")
    }
    ports = {name: free_port() for name in ROLES}
    with processes(worker_commands(ports)):
        for number in range(2 * options.pairs):
            kind = ("never", "auto")[(number + number // 2) % 2]
            flags = [f"--role-switch={kind}", f"--role-dwell-s={options.dwell_s}"]
            with router(ports, [*flags, *(f"--{setting}" for setting in options.set)]) as (http, grpc):
                asyncio.run(reset_roles(http))
                asyncio.run(wave(grpc, options, number, found[kind]))
                print(f"round {number}: role_switch {kind}, changes of role {switches(http)}")
    for phase_name in (PROMPTS.name, ANSWERS.name):
        never, auto = found["never"][phase_name], found["auto"][phase_name]
        print(
            f"{phase_name}: {len(never.ttft_s)} and {len(auto.ttft_s)} answers, {never.num_failed} and {auto.num_failed} failed"
        )
        for name in ("ttft_s", "tpot_s"):
            without, with_ = getattr(never, name), getattr(auto, name)
            for how, of in (("mean", statistics.mean), ("p99", p99)):
                print(
                    f"  {name.removesuffix('_s')} {how:<4} {of(without) * 1e3:8.1f} ms without, {of(with_) * 1e3:8.1f} with: "
                    f"{of(with_) / of(without):.2f}"
                )


if __name__ == "__main__":
    main()
