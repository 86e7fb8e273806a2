"""CPU time of a router per output token and per request, next to the same of routers of other checkouts.

The workers' steps take no arithmetic (`paced_worker.py`), so that the machine has time for the router. All routers use the same
workers and are measured in turns. A request of n tokens costs `request + n * token`, which two lengths of answers give.

Usage: python benchmarks/router_cost.py [--checkout DIR ...] [--front grpc http] [--streams 64] [--rounds 3] [--set name=value ...]

checkout: has a virtual environment in `.venv`; default: this one. set: of the routers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx
from cluster_of_processes import free_port
from conditions import print_conditions
from probe import HttpProber, Prober, prompt_of

from pdserve.models.model_folder import model_folder

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = 64
LENGTHS = (20, 200)
"""Output tokens of a request."""
START_S = 120.0
STAGGER_S = 0.005
VOCABULARY = 2000
"""Prompts are drawn from the first ids."""
TRIES = 5
PACE = {"PACED_STEP_MS": "20", "PACED_TOKEN_MS": "0", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Router:
    """A running router."""

    name: str
    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int

    def processor_s(self) -> float:
        """CPU seconds of all its threads so far."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(path.read_text().split()[0]) for path in tasks) / 1e9


@contextmanager
def running(command: Sequence[str], cwd: Path, environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, cwd=cwd, env=os.environ | environ, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextmanager
def fleet(checkouts: Sequence[Path], folder: Path, streams: int, settings: Sequence[str]) -> Iterator[list[Router]]:
    """One prefill and one decode worker of this checkout, and a router of each."""
    with ExitStack() as started:
        known: list[str] = []
        for role in ("prefill", "decode"):
            port = free_port()
            command = [sys.executable, str(HERE / "paced_worker.py"), role, "--model", str(folder), "--port", str(port)]
            started.enter_context(running([*command, f"--max-num-seqs={streams}"], HERE.parent, PACE))
            known += [f"--{role}", f"127.0.0.1:{port}"]
        routers = []
        for checkout in checkouts:
            ports = free_port(), free_port()
            command = [
                str(checkout / ".venv/bin/python"), "-m", "pdserve.cli.main", "router", "--model", str(folder),
                "--port", str(ports[0]), "--grpc-port", str(ports[1]), *known, "--local-prefill=never",
                "--log-level=warning", *(f"--{setting}" for setting in settings),
            ]  # fmt: skip
            process = started.enter_context(running(command, checkout, {}))
            routers.append(Router(checkout.name, process, *ports))
        for router in routers:
            _wait_for(router)
        yield routers


def _wait_for(router: Router) -> None:
    until = time.monotonic() + START_S
    while True:
        if router.process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the router of {router.name} did not start")
        try:
            workers = httpx.get(f"http://127.0.0.1:{router.http_port}/health", timeout=1).json()["workers"]
            if all(role["live"] for role in workers.values()):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)


def measured(router: Router, model: str, front: str, length: int, streams: int) -> float:
    """CPU seconds of the router per request of `length` output tokens.

    On a crowded machine a worker may be late and count as lost; then the requests fail, and it is measured again.
    """
    for _ in range(TRIES):
        try:
            return asyncio.run(cost(router, model, front, length, streams))
        except (RuntimeError, grpc.aio.AioRpcError) as error:
            sys.stderr.write(f"again: {str(error)[:300]}\n")
            time.sleep(5)
    raise TimeoutError(f"requests failed {TRIES} times")


async def cost(router: Router, model: str, front: str, length: int, streams: int) -> float:
    """As `measured`. Raises: RuntimeError, AioRpcError for a request that fails."""
    num_each = max(LENGTHS) // length
    probers: list[Prober | HttpProber] = (
        [Prober(f"127.0.0.1:{router.grpc_port}")] * streams
        if front == "grpc"
        else [HttpProber("127.0.0.1", router.http_port, model) for _ in range(streams)]
    )

    seeds = itertools.count(time.time_ns())

    async def one(number: int) -> None:
        await asyncio.sleep(STAGGER_S * number)
        for _ in range(num_each):
            await probers[number].ask(prompt_of(PROMPT_TOKENS, next(seeds), VOCABULARY), length)

    try:
        await probers[0].ask(prompt_of(PROMPT_TOKENS, next(seeds), VOCABULARY), 2)
        before = router.processor_s()
        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(one(number))
        return (router.processor_s() - before) / (streams * num_each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for prober in set(probers):
            await prober.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--checkout", type=Path, nargs="+", default=[HERE.parent])
    parser.add_argument("--front", nargs="+", choices=("grpc", "http"), default=["grpc", "http"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="a setting of the routers, as name=value")
    options = parser.parse_args()
    folder = model_folder(options.model)
    print_conditions()
    print(f"settings     {' '.join(options.set) or 'defaults'}")
    print(
        f"{options.streams} streams, {PROMPT_TOKENS} prompt tokens, a step every {PACE['PACED_STEP_MS']} ms\n",
        flush=True,
    )
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    checkouts = [checkout.resolve() for checkout in options.checkout]
    with fleet(checkouts, folder, options.streams, options.set) as routers:
        for number in range(options.rounds):
            for front in options.front:
                for length in LENGTHS:
                    for router in routers if number % 2 == 0 else reversed(routers):
                        found[router.name, front, length].append(
                            measured(router, folder.name, front, length, options.streams)
                        )
    head = "".join(f"{title:>24}" for title in ("token, us", "request, us", "request of 200, ms"))
    print(f"{'router, front':<24}{head}   (medians of {options.rounds} rounds, least)")
    short, long = LENGTHS
    for router in routers:
        for front in options.front:
            pairs = list(zip(found[router.name, front, short], found[router.name, front, long], strict=True))
            tokens = [(of_long - of_short) / (long - short) * 1e6 for of_short, of_long in pairs]
            requests = [pair[0] * 1e6 - short * token for pair, token in zip(pairs, tokens, strict=True)]
            wholes = [of_long * 1e3 for _, of_long in pairs]
            cells = "".join(f"{statistics.median(of):>16.2f}{min(of):>8.2f}" for of in (tokens, requests, wholes))
            print(f"{router.name + ', ' + front:<24}{cells}")
    print(f"\nload after   {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
